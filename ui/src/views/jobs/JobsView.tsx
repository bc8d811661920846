/**
 * The runs that this server knows: filtered, sorted and grouped by the server, by the grammar that the command line has,
 * too. What is asked for stands in the address. With one job only, its page opens by itself.
 */
import { useEffect, useRef, useState } from "react";
import { urlOf } from "../../data/api";
import { keyIn } from "../../data/jobKeys";
import { useResource } from "../../data/resource";
import { plural, whole } from "../../format";
import { Refused } from "../../parts/Refused";
import type { JobList, Run } from "../../rest";
import { go, hrefOf, setParams, useRoute } from "../../route";
import { MOST_RUNS } from "../compare/runs";
import { GroupsTable } from "./GroupsTable";
import { LabelsDialog } from "./LabelsDialog";
import { RunsTable } from "./RunsTable";

const REFRESH_MS = 10_000;
/** From the last key on: while somebody types, nothing is asked for. */
const TYPED_MS = 200;

const GROUPS: readonly [string, string][] = [
  ["experiment", "settings but for the seed"],
  ["tag", "tag"],
  ["seed", "seed"],
  ["model", "model"],
  ["recipe", "recipe"],
  ["phase", "phase"],
];

export function JobsView() {
  const { params } = useRoute();
  const { filter = "", sort = "", group = "" } = params;
  const [tick, setTick] = useState(0);
  const [chosen, setChosen] = useState<ReadonlyMap<string, string>>(new Map());
  const [labelled, setLabelled] = useState<Run | null>(null);
  const query = new URLSearchParams(Object.entries({ filter, sort, group }).filter(([, value]) => value !== "")).toString();
  const asked = useResource<JobList>(query ? `jobs?${query}` : "jobs", tick);
  const last = useRef<JobList | undefined>(undefined);
  if (asked.data) last.current = asked.data;
  const data = asked.data ?? last.current;
  useEffect(() => {
    document.title = "Jobs · Gyre";
    const timer = window.setInterval(() => !document.hidden && setTick((old) => old + 1), REFRESH_MS);
    return () => window.clearInterval(timer);
  }, []);
  const only = data?.jobs.length === 1 && data.total === 1 && !query ? data.jobs[0] : undefined;
  const stays = params["all"] === "1";
  useEffect(() => {
    if (only && !stays) window.location.replace(hrefOf(only.name, "now"));
  }, [only, stays]);
  if (!data && !filter) return asked.error ? <Refused error={asked.error} /> : <p className="empty">Loading the jobs …</p>;
  const runs = data?.jobs ?? [];
  const keyOf: (run: Run) => string = keyIn(data ?? { shared_names: [] });
  const toggle = (run: Run): void =>
    setChosen((old) => {
      const next = new Map(old);
      if (!next.delete(run.job_id) && next.size < MOST_RUNS) next.set(run.job_id, keyOf(run));
      return next;
    });
  const [first, ...others] = chosen.values();
  return (
    <>
      <div className="head">
        <h1>{data && filter ? `${whole(runs.length)} of ${plural(data.total, "job")}` : data && runs.length < data.total ? `The newest ${whole(runs.length)} of ${plural(data.total, "job")}` : plural(runs.length, "job")}</h1>
        {data?.cost && <span className="muted" title="In the currency of the jobs' prices">cost {data.cost}</span>}
        <FilterField filter={filter} />
        <label>Group by <select value={group} onChange={(event) => setParams({ group: event.target.value })}><option value="">nothing</option>{GROUPS.map(([name, title]) => <option key={name} value={name}>{title}</option>)}</select></label>
        <button type="button" disabled={chosen.size < 2} onClick={() => first && go(hrefOf(first, "compare", { with: others.join(",") }))}>
          Compare {chosen.size >= 2 ? chosen.size : `two to ${MOST_RUNS}`}
        </button>
        <a href={urlOf(`jobs.csv${query ? `?${new URLSearchParams({ filter, sort })}` : ""}`)} download="runs.csv">CSV</a>
      </div>
      {asked.error && <Refused error={asked.error} />}
      {data?.total === 0 && <p className="empty">There is no job in this store yet. <code>gyre run FILE</code> or <code>gyre demo</code> makes one.</p>}
      {data && data.total > 0 && runs.length === 0 && !asked.error && <p className="empty">No job is like that.</p>}
      {group && data?.groups && data.groups.length > 0 && <GroupsTable groups={data.groups} by={GROUPS.find(([name]) => name === group)?.[1] ?? group} sort={sort} keys={new Map(runs.map((run) => [run.job_id, keyOf(run)]))} />}
      {runs.length > 0 && <RunsTable runs={runs} keyOf={keyOf} chosen={chosen} onToggle={toggle} onLabels={setLabelled} />}
      {labelled && <LabelsDialog run={labelled} onClose={() => setLabelled(null)} onSaved={() => { setLabelled(null); setTick((old) => old + 1); }} />}
    </>
  );
}

function FilterField({ filter }: { filter: string }) {
  const [text, setText] = useState(filter);
  useEffect(() => setText(filter), [filter]);
  useEffect(() => {
    if (text === filter) return;
    const timer = window.setTimeout(() => setParams({ filter: text }), TYPED_MS);
    return () => window.clearTimeout(timer);
  }, [text, filter]);
  return <label className="filter">Filter <input type="search" value={text} placeholder="reward>0.5, model~qwen, tag=ablation" onChange={(event) => setText(event.target.value)} /></label>;
}
