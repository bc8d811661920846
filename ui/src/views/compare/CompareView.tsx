/** Two to twenty jobs over the same axis: their curves, what they came to, and where their settings differ. */
import { useMemo } from "react";
import { jobKeys } from "../../data/jobKeys";
import { useLive } from "../../data/live";
import { useResource } from "../../data/resource";
import { useSteps } from "../../data/steps";
import { jobPath, urlOf } from "../../data/api";
import type { JobList, JobView, Json } from "../../rest";
import { setParams, useRoute } from "../../route";
import { SECTIONS } from "../curves/chosen";
import { SmoothChoice } from "../curves/SmoothChoice";
import "../curves/curves.css";
import { CompareCard } from "./CompareCard";
import { differences } from "./differences";
import { Outcomes } from "./Outcomes";
import { MOST_RUNS, strokeClass, strokeOf, type Run } from "./runs";

/** Other jobs that are offered beside those that are chosen: the list of jobs has all of them. */
const OFFERED = 30;

export default function CompareView() {
  const { job, tick } = useLive();
  const { params } = useRoute();
  const others = useMemo(() => (params["with"] ?? "").split(",").filter(Boolean).slice(0, MOST_RUNS - 1), [params["with"]]);
  const { data: jobs } = useResource<JobList>("jobs");
  const runs = useRuns(job, others, tick);
  const names = [...jobKeys(jobs?.jobs ?? []).values()].filter((name) => name !== job && !others.includes(name));
  const offered = [...others, ...names.slice(0, OFFERED)];
  const toggle = (name: string): void => setParams({ with: (others.includes(name) ? others.filter((one) => one !== name) : [...others, name]).slice(0, MOST_RUNS - 1).join(",") });
  return (
    <>
      <div className="head">
        <h1>Compare</h1>
        <fieldset className="row choices">
          <legend className="visually-hidden">With which jobs</legend>
          <span className="muted">{job} with</span>
          {offered.length === 0 && <span className="muted">no other job: this server knows only one</span>}
          {offered.map((name) => <label key={name}><input type="checkbox" checked={others.includes(name)} disabled={!others.includes(name) && others.length >= MOST_RUNS - 1} onChange={() => toggle(name)} />{name}</label>)}
        </fieldset>
        <SmoothChoice />
        <LogChoice name="logx" label="Log x" />
        <LogChoice name="logy" label="Log y" />
        <a href={urlOf(`curves.csv?jobs=${encodeURIComponent(runs.map((run) => run.name).join(","))}`)} download="curves.csv">Curves as CSV</a>
      </div>
      <ul className="legend">
        {runs.map((run) => <li key={run.name}><span className={strokeClass(run)} style={{ borderColor: `var(${run.colour})` }} />{run.name}</li>)}
      </ul>
      <Outcomes runs={runs} />
      <Settings runs={runs} />
      {SECTIONS.map((section) => (
        <section key={section.title} aria-label={section.title}>
          <h2>{section.title}</h2>
          <div className="curves">{section.curves.map((curve) => <CompareCard key={curve.name} curve={curve} runs={runs} />)}</div>
        </section>
      ))}
    </>
  );
}

function LogChoice({ name, label }: { name: string; label: string }) {
  const { params } = useRoute();
  return <label><input type="checkbox" checked={params[name] === "1"} onChange={(event) => setParams({ [name]: event.target.checked ? "1" : null, from: null, to: null })} />{label}</label>;
}

/** Hooks want a fixed number of calls, of which those without a name ask for nothing. */
function useRuns(job: string, others: readonly string[], tick: number): readonly Run[] {
  const found: Run[] = [];
  for (let at = 0; at < MOST_RUNS; at++) found.push(useRun(at === 0 ? job : (others[at - 1] ?? ""), at, tick));
  return found.filter((run) => run.name !== "");
}

function useRun(name: string, at: number, tick: number): Run {
  const { steps } = useSteps(name, tick);
  const { data: view } = useResource<JobView>(name ? jobPath(name) : null, tick);
  const { data: spec } = useResource<Record<string, Json>>(name ? jobPath(name, "/spec") : null);
  return useMemo(() => ({ name, ...strokeOf(at), steps, view, spec }), [name, at, steps, view, spec]);
}

function Settings({ runs }: { runs: readonly Run[] }) {
  const rows = useMemo(() => {
    const specs = runs.flatMap((run) => (run.spec ? [run.spec] : []));
    return specs.length === runs.length ? differences(specs) : [];
  }, [runs]);
  if (runs.length < 2 || rows.length === 0) return null;
  return (
    <details open={rows.length <= 20}>
      <summary>Settings that differ: {rows.length}</summary>
      <div className="wide" tabIndex={0} role="region" aria-label="Settings that differ">
        <table>
          <thead><tr><th scope="col">Key</th>{runs.map((run) => <th scope="col" key={run.name}>{run.name}</th>)}</tr></thead>
          <tbody>{rows.map((row) => <tr key={row.key}><th scope="row" className="mono">{row.key}</th>{row.values.map((value, at) => <td key={at} className="mono">{value}</td>)}</tr>)}</tbody>
        </table>
      </div>
    </details>
  );
}
