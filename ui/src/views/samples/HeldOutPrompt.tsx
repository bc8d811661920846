/** One held-out prompt with its right answer, and what each of two versions answered to it. */
import { anything, short, whole } from "../../format";
import { Badge } from "../../parts/Badge";
import type { HeldOutPair, HeldOutSide } from "../../rest";

/** Of so many samples the answers are shown; the numbers are of all. */
const MOST = 8;

export function HeldOutPrompt({ prompt, version, against }: { prompt: HeldOutPair; version: number; against: number | null }) {
  return (
    <li className="card">
      <div className="row">
        <h2>Prompt {prompt.prompt_number}</h2>
        {prompt.changed && <Badge tone={prompt.difference > 0 ? "good" : "bad"}>{prompt.difference > 0 ? "better" : "worse"}</Badge>}
      </div>
      <p className="prompt" tabIndex={0}>{prompt.prompt ?? "The prompt has no text: the job has no tokenizer."}</p>
      {prompt.right_answer !== null && <p className="right-answer">Right answer: <strong>{prompt.right_answer}</strong></p>}
      <div className="sides">
        {against !== null && <Side of={against} side={prompt.before} place={prompt.prompt_number} />}
        <Side of={version} side={prompt.now} place={prompt.prompt_number} />
      </div>
    </li>
  );
}

function Side({ of, side, place }: { of: number; side: HeldOutSide | null; place: number }) {
  if (side === null) return <div><h3>Version {of}</h3><p className="empty">It was not asked this prompt, or that is not kept.</p></div>;
  return (
    <div>
      <h3>Version {of}: {verdictOf(side)}</h3>
      {side.samples.slice(0, MOST).map((one) => (
        <div key={one.sample}>
          <p className="muted small">
            reward {short(one.reward)}, {whole(one.tokens)} tokens{one.finish_reason === "length" ? ", cut off" : ""}
            {Object.entries(one.more).map(([name, value]) => `; ${name} ${anything(value)}`)}
          </p>
          <pre className="text" tabIndex={0} aria-label={`Answer ${one.sample} of version ${of} to prompt ${place}`}>{one.answer === "" ? "(empty)" : (one.answer ?? "(no text)")}</pre>
        </div>
      ))}
      {side.samples.length > MOST && <p className="muted small">{whole(side.samples.length - MOST)} more answers are not shown.</p>}
    </div>
  );
}

function verdictOf(side: HeldOutSide): string {
  if (side.right === null) return `reward ${short(side.reward)}`;
  if (side.count === 1) return side.right === 1 ? "right" : "wrong";
  return `${whole(side.right)} of ${whole(side.count)} right`;
}
