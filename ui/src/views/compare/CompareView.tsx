/** Two to twenty jobs over the same axis: their curves, what they came to, and where their settings differ. */
import { useMemo } from "react";
import { jobIn, keyIn } from "../../data/jobKeys";
import { useLive } from "../../data/live";
import { useResource } from "../../data/resource";
import { useSteps } from "../../data/steps";
import { jobPath, urlOf } from "../../data/api";
import type { JobList, JobView, Json, Run as Listed } from "../../rest";
import { setParams, useRoute } from "../../route";
import { componentsOf, SECTIONS, type Section } from "../curves/chosen";
import { SmoothChoice } from "../curves/SmoothChoice";
import "../curves/curves.css";
import { CompareCard } from "./CompareCard";
import { differences } from "./differences";
import { HeldOutCard } from "./HeldOutCard";
import { Outcomes } from "./Outcomes";
import { MOST_RUNS, strokeClass, strokesOf, type Run, type Stroke } from "./runs";

/** Other jobs that are offered beside those that are chosen: the list of jobs has all of them. */
const OFFERED = 30;

/** Cost and speed of the list change slowly, and it is of all jobs. */
const TICKS = 10;

export default function CompareView() {
  const { job, tick } = useLive();
  const { params } = useRoute();
  const { data: jobs, error } = useResource<JobList>("jobs", Math.floor(tick / TICKS));
  const keyOf = useMemo(() => keyIn(jobs ?? { shared_names: [] }), [jobs]);
  // An address may have names or ids, and a job once by each.
  const asked = [job, ...(params["with"] ?? "").split(",").filter(Boolean)];
  const called = (key: string): string => {
    const listed = jobIn(jobs, key);
    return listed ? keyOf(listed) : key;
  };
  const [own = job, ...others] = [...new Set(asked.map(called))].slice(0, MOST_RUNS);
  const runs = useRuns(jobs || error ? [own, ...others] : [], jobs, tick);
  const names = (jobs?.jobs ?? []).map(keyOf).filter((name) => name !== own && !others.includes(name));
  const offered = [...others, ...names.slice(0, OFFERED)];
  const toggle = (name: string): void => setParams({ with: (others.includes(name) ? others.filter((one) => one !== name) : [...others, name]).slice(0, MOST_RUNS - 1).join(",") });
  return (
    <>
      <div className="head">
        <h1>Compare</h1>
        <fieldset className="row choices">
          <legend className="visually-hidden">With which jobs</legend>
          <span className="muted">{own} with</span>
          {offered.length === 0 && <span className="muted">no other job: this server knows only one</span>}
          {offered.map((name) => <label key={name}><input type="checkbox" checked={others.includes(name)} disabled={!others.includes(name) && others.length >= MOST_RUNS - 1} onChange={() => toggle(name)} />{name}</label>)}
        </fieldset>
        <SmoothChoice />
        <LogChoice name="logx" label="Log x" />
        <LogChoice name="logy" label="Log y" />
        <a href={urlOf(`curves.csv?jobs=${encodeURIComponent(runs.map((run) => run.name).join(","))}`)} download="curves.csv">Curves as CSV</a>
      </div>
      <ul className="legend">
        {runs.map((run) => <li key={run.name}><span className={strokeClass(run)} style={{ borderColor: `var(${run.colour})`, color: `var(${run.colour})` }} />{run.name}</li>)}
      </ul>
      <Outcomes runs={runs} />
      <Settings runs={runs} />
      <HeldOut runs={runs} />
      {sectionsOf(runs).map((section) => (
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

/** What each version earned on the held-out sets of these jobs. */
function HeldOut({ runs }: { runs: readonly Run[] }) {
  const sets = [...new Set(runs.flatMap((run) => Object.entries(run.view?.evaluations ?? {}).flatMap(([set, list]) => (list.length > 0 ? [set] : []))))].sort();
  if (sets.length === 0) return null;
  return (
    <section aria-label="Held-out sets">
      <h2>Held-out</h2>
      <div className="curves">{sets.map((set) => <HeldOutCard key={set} set={set} runs={runs} />)}</div>
    </section>
  );
}

/** The chosen sections of which any of the runs has a number, and after the reward what it is made of. */
function sectionsOf(runs: readonly Run[]): readonly Section[] {
  const names = new Set(runs.flatMap((run) => [run.steps[0], run.steps.at(-1)].flatMap((step) => Object.keys(step ?? {}))));
  const parts = componentsOf(names, new Map());
  const [first, ...others] = SECTIONS.filter((one) => names.size === 0 || one.curves.some((curve) => names.has(curve.name)));
  return [...(first ? [first] : []), ...(parts.length === 0 ? [] : [{ title: "What the reward is made of", curves: parts }]), ...others];
}

/** Hooks want a fixed number of calls, of which those without a name ask for nothing. */
function useRuns(names: readonly string[], jobs: JobList | undefined, tick: number): readonly Run[] {
  const listed = names.map((name) => jobIn(jobs, name));
  const strokes = strokesOf(listed.map((one) => one?.config));
  const found: Run[] = [];
  for (let at = 0; at < MOST_RUNS; at++) found.push(useRun(names[at] ?? "", listed[at], strokes[at] ?? PLAIN, tick));
  return found.filter((run) => run.name !== "");
}

const PLAIN: Stroke = { colour: "--c1", dashed: false, dotted: false };

function useRun(name: string, listed: Listed | undefined, { colour, dashed, dotted }: Stroke, tick: number): Run {
  const { steps } = useSteps(name, tick);
  const { data: view } = useResource<JobView>(name ? jobPath(name) : null, tick);
  const { data: spec } = useResource<Record<string, Json>>(name ? jobPath(name, "/spec?whole=true") : null);
  return useMemo(() => ({ name, colour, dashed, dotted, steps, view, spec, listed }), [name, colour, dashed, dotted, steps, view, spec, listed]);
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
