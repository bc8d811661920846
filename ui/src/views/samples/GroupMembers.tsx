/** The members of a group side by side: the same prompt, so many answers, and what each earned. */
import { useEffect, useRef } from "react";
import { useJob, withQuery } from "../../data/job";
import { anything, short, whole, words } from "../../format";
import { Refused } from "../../parts/Refused";
import type { SampleItem, SamplePage } from "../../rest";
import { setParams } from "../../route";
import { passedOn, rolloutsOf } from "./rollouts";
import { tokensHref } from "./SamplesView";

const MOST = 64;

export function GroupMembers({ job, item }: { job: string; item: SampleItem }) {
  const { data, error } = useJob<SamplePage>(withQuery("/samples", { step: item.step, group: item.group, limit: MOST }), Infinity);
  const members = [...(data?.samples ?? [item])].sort((a, b) => a.sample - b.sample);
  const rollouts = rolloutsOf(members);
  const rewards = rollouts.flatMap((one) => (one.reward === null ? [] : [one.reward]));
  const mean = rewards.length > 0 ? rewards.reduce((sum, one) => sum + one, 0) / rewards.length : null;
  const chosen = useRef<HTMLLIElement>(null);
  useEffect(() => {
    chosen.current?.scrollIntoView({ block: "nearest" });
  }, [item.step, item.group, item.sample, data]);
  return (
    <section className="members" aria-label={`Group ${item.group} of step ${item.step}`}>
      <div className="head">
        <h2>Group {item.group} of step {item.step}</h2>
        <span className="muted">{rollouts.length === members.length ? `${members.length} samples` : `${rollouts.length} rollouts in ${members.length} rows`}, mean reward {short(mean)}</span>
        <button type="button" onClick={() => setParams({ at: null })}>Close</button>
      </div>
      {error && !data && <Refused error={error} />}
      <p className="prompt">{item.prompt ?? "The prompt has no text: the job has no tokenizer."}</p>
      {item.right_answer != null && <p className="right-answer">Right answer: <strong>{item.right_answer}</strong></p>}
      <ol className="side-by-side" tabIndex={0} aria-label="Members">
        {members.map((one) => (
          <li key={one.sample} ref={one.sample === item.sample ? chosen : undefined} className={one.sample === item.sample ? "card chosen" : "card"} aria-current={one.sample === item.sample}>
            <div className="row">
              <strong>{one.step}/{one.group}/{one.sample}</strong>
              {one.rollout != null && <span className="muted">rollout {one.rollout}</span>}
              <span>reward {short(one.reward)}</span>
              {mean !== null && one.reward !== null && <span className="muted">{one.reward >= mean ? "+" : ""}{short(one.reward - mean)} against the mean</span>}
            </div>
            <p className="muted small">
              {whole(one.tokens)} tokens, {words(one.outcome)}, {one.finish_reason || "–"}; {passedOn(one.versions).map((version) => `v${version}`).join(" → ")} on {passedOn(one.instances).join(" → ")}
            </p>
            {one.session && <p className="small">{one.session.sentence}.</p>}
            {Object.keys(one.more).length > 0 && <p className="small">{Object.entries(one.more).map(([name, value]) => `${name} ${anything(value)}`).join(", ")}</p>}
            <a href={tokensHref(job, one)}>Tokens</a>
            <pre className="text" tabIndex={0} aria-label={`Answer ${one.sample}`}>{one.answer ?? "(no text)"}</pre>
          </li>
        ))}
      </ol>
    </section>
  );
}
