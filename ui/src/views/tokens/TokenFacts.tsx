/** What is known of the chosen token. */
import { short, whole } from "../../format";
import type { SampleTokens } from "../../rest";
import { seesLoss, stretchAt } from "./scales";
import { pieceOf } from "./TokenText";

export function TokenFacts({ sample, at }: { sample: SampleTokens; at: number }) {
  const engine = sample.logprobs?.[at];
  const trainer = sample.trainer_logprobs?.[at];
  const advantage = Array.isArray(sample.advantage) ? sample.advantage[at] : sample.advantage;
  const facts: [string, string][] = [
    ["token", `${whole(at + 1)} of ${whole(sample.token_ids.length)}`],
    ["text", JSON.stringify(sample.pieces ? (sample.pieces[at] ?? "") : pieceOf(sample, at))],
    ["id", String(sample.token_ids[at] ?? "–")],
    ["engine", `${short(engine)}${engine == null ? "" : ` (p ${short(Math.exp(engine))})`}`],
    ["trainer", short(trainer)],
    ["difference", engine == null || trainer == null ? "–" : short(trainer - engine)],
    ["advantage", short(advantage)],
    ["version", String(stretchAt(sample.versions, at) ?? "–")],
    ["instance", stretchAt(sample.instances, at) ?? "–"],
    ["in the loss", seesLoss(sample, at) ? "yes" : "no, masked"],
  ];
  return (
    <dl className="token-facts" aria-live="polite">
      {facts.map(([name, value]) => <div key={name}><dt>{name}</dt><dd>{value}</dd></div>)}
    </dl>
  );
}
