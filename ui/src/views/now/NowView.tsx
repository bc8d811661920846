/** Is it well, does it learn, what is slow, and because of what: in sentences, with the facts beside them. */
import { useJob, useJobView } from "../../data/job";
import { useLive } from "../../data/live";
import { useSteps } from "../../data/steps";
import { short } from "../../format";
import { Badge } from "../../parts/Badge";
import { Refused } from "../../parts/Refused";
import { Sparkline } from "../../parts/Sparkline";
import type { Account, Now, Tone } from "../../rest";
import { hrefOf } from "../../route";
import { promiseOf } from "../account/promise";
import { LateIncidents } from "./LateIncidents";
import { stepLine } from "./stepLine";
import "./now.css";

export default function NowView() {
  const { job, tick } = useLive();
  const { data: now, error } = useJob<Now>("/now");
  const { data: view } = useJobView();
  const { steps } = useSteps(job, tick);
  const last = steps.at(-1);
  return (
    <>
      <h1 className="visually-hidden">Now</h1>
      <section className={`now ${now?.tone ?? "over"}`} aria-label="In a sentence">
        <p className="sentence" aria-live="polite">{now ? <Sentence text={now.sentence} /> : error ? "What the job does is not known." : "…"}</p>
        <div className="row">
          {now && <Badge tone={now.tone}>{WORD_OF_TONE[now.tone]}</Badge>}
          {now && <Badge tone={now.learns.tone}>{now.learns.words}</Badge>}
          <AccountBadge />
        </div>
      </section>
      {error && !now && <Refused error={error} />}
      {now && (
        <div className="grid">
          <section className="card">
            <h2>Does it learn?</h2>
            <p>{now.learns.words}{now.learns.because && `: ${now.learns.because}`}.</p>
            {now.learns.beside.length > 0 && <ul className="small beside" aria-label="Warnings">{now.learns.beside.map((one) => <li key={one}>{one}</li>)}</ul>}
            <Sparkline values={steps.map((step) => step["reward_mean"] ?? null)} label={`Mean reward of ${steps.length} steps, now ${short(last?.["reward_mean"])}`} />
            <p className="small"><a href={hrefOf(job, "curves")}>All curves</a></p>
          </section>
          <section className="card">
            <h2>What is slow?</h2>
            <p>{now.slow.words}</p>
            {steps.length > 1 && <p className="small muted spark-title">Tokens trained on a second, by step; now {short(last?.["tokens_per_s"])}</p>}
            <Sparkline values={steps.map((step) => step["tokens_per_s"] ?? null)} label={`Tokens per second of ${steps.length} steps, now ${short(last?.["tokens_per_s"])}`} />
            <p className="small"><a href={hrefOf(job, "timeline")}>Who waits for whom</a></p>
          </section>
          <section className="card">
            <h2>Facts</h2>
            <dl className="facts">
              {now.facts.map((fact) => (
                <div key={fact.label}>
                  <dt>{fact.view ? <a href={hrefOf(job, fact.view)}>{fact.label}</a> : fact.label}</dt>
                  <dd>{fact.value}</dd>
                </div>
              ))}
            </dl>
          </section>
        </div>
      )}
      {last && (
        <section aria-labelledby="last-step">
          <h2 id="last-step">Last step</h2>
          <p className="mono step-line">{stepLine(last)}</p>
        </section>
      )}
      {view && <LateIncidents job={job} phase={view.job.phase} incidents={view.incidents} />}
    </>
  );
}

const WORD_OF_TONE: Readonly<Record<Tone, string>> = { good: "well", attention: "needs a look", bad: "not well", over: "over" };

/** Names such as rollout-3 are not broken at their hyphens. */
function Sentence({ text }: { text: string }) {
  return text.split(/(\w+(?:-\w+)+)/).map((part, at) => (at % 2 === 1 ? <span key={at} className="name">{part}</span> : part));
}

/** The promise of the account, at a glance: no prompt lost, none trained twice; of a job without a trainer, no token missing. */
function AccountBadge() {
  const { job } = useLive();
  const { data } = useJob<Account>("/account");
  if (!data) return null;
  const { tone, words } = promiseOf(data);
  return (
    <a className="badge-link" href={hrefOf(job, "account")}>
      <Badge tone={tone}>{words}</Badge>
    </a>
  );
}
