/** The tokens of one sample, coloured by what the reader wants to know of them. */
import { useEffect, useMemo, type KeyboardEvent } from "react";
import { useJob } from "../../data/job";
import { useLive } from "../../data/live";
import { anything, plural, short, whole, words } from "../../format";
import { Badge } from "../../parts/Badge";
import { Refused } from "../../parts/Refused";
import type { SampleTokens } from "../../rest";
import { hrefOf, setParams, useRoute } from "../../route";
import { jointsOf, modesOf, scaleOf, TITLES } from "./scales";
import { Conversation } from "./Conversation";
import { TokenFacts } from "./TokenFacts";
import { TokenStrip } from "./TokenStrip";
import { TokenText } from "./TokenText";
import "./tokens.css";

export default function TokensView() {
  const { job } = useLive();
  const { params } = useRoute();
  const [step, group, member] = [params["step"] ?? "", params["group"] ?? "", params["sample"] ?? ""];
  const { data: sample, error } = useJob<SampleTokens>(step && group && member ? `/samples/${step}/${group}/${member}` : null, Infinity);
  const modes = sample ? modesOf(sample) : [];
  const mode = modes.find((one) => one === params["by"]) ?? (modes.includes("engine") ? "engine" : "version");
  const scale = useMemo(() => (sample ? scaleOf(sample, mode) : null), [sample, mode]);
  const at = Math.max(0, Math.min((sample?.token_ids.length ?? 1) - 1, Number(params["token"] ?? 0) || 0));
  useEffect(() => {
    if (params["token"]) document.getElementById(`t${at}`)?.scrollIntoView({ block: "nearest" });
  }, [at, params["token"], sample]);

  const back = <a href={hrefOf(job, "samples", { step, group })}>The group</a>;
  if (!sample || !scale) return <><h1>Tokens</h1>{error ? <Refused error={error} /> : step ? <p className="empty">Loading …</p> : <p className="empty">Choose a sample under Samples.</p>}</>;
  const joints = jointsOf(sample);
  const choose = (token: number): void => setParams({ token });
  const pressed = (event: KeyboardEvent): void => {
    const joint = event.key === "j" ? (joints.find((one) => one.at > at) ?? joints[0])?.at : undefined;
    const moves: Readonly<Record<string, number>> = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: sample.token_ids.length - 1 };
    const next = joint ?? moves[event.key];
    if (next === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(sample.token_ids.length - 1, next)));
  };
  return (
    <>
      <div className="head">
        <h1>Sample {sample.sample} of group {sample.group}, step {sample.step}</h1>
        {sample.quarantined && <Badge tone="bad">quarantined</Badge>}
        {back}
      </div>
      <p>
        Reward <strong>{short(sample.reward)}</strong>, {words(sample.outcome)}, {plural(sample.token_ids.length, "token")} after {whole(sample.prompt_tokens)} of the prompt{sample.mask && `, ${whole(sample.mask.filter(Boolean).length)} of them drawn by the policy`}, ended by {sample.finish_reason || "–"}{sample.rollout != null && `, a row of rollout ${sample.rollout}`}
        {Object.entries(sample.more).map(([name, value]) => <span key={name} className="muted">; {name} {anything(value)}</span>)}
      </p>
      {sample.right_answer != null && <p className="right-answer">Right answer: <strong>{sample.right_answer}</strong></p>}
      <Conversation sample={sample} onChoose={choose} />
      <div className="row" role="group" aria-label="Colour by">
        <span className="muted" aria-hidden="true">Colour by</span>
        {modes.map((one) => (
          <button key={one} type="button" aria-pressed={one === mode} onClick={() => setParams({ by: one })}>{TITLES[one]}</button>
        ))}
      </div>
      <ul className="legend tokens-legend">
        {scale.legend.map((entry) => <li key={entry.className}><span className={`swatch t ${entry.className}`} />{entry.text}</li>)}
        {sample.mask && <li><span className="masked">masked</span> not drawn by the policy in this row, and not in the loss</li>}
        {joints.length > 0 && <li><span className="joint">joint</span> went on elsewhere or with other weights, {plural(joints.length, "time")}; key <kbd>j</kbd></li>}
      </ul>
      <TokenStrip sample={sample} scale={scale} chosen={at} onChoose={choose} />
      <TokenFacts sample={sample} at={at} />
      <details>
        <summary>Prompt, {plural(sample.prompt_tokens, "token")}</summary>
        <p className="token-text muted">{sample.prompt ?? sample.prompt_ids.join(" ")}</p>
      </details>
      <section tabIndex={0} className="token-box" aria-label="Answer; arrows choose a token" onKeyDown={pressed}>
        <TokenText sample={sample} scale={scale} chosen={at} onChoose={choose} />
      </section>
    </>
  );
}
