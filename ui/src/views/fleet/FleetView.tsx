/** The instances of the rollout plane by pool, the vertices by role, and the machines that they stand on. */
import { useState } from "react";
import { useJob, useJobView } from "../../data/job";
import { useLive } from "../../data/live";
import { duration, percent, plural, short, whole, words } from "../../format";
import { Badge } from "../../parts/Badge";
import { Refused } from "../../parts/Refused";
import { useRootSize } from "../../parts/rootSize";
import { VirtualList } from "../../parts/VirtualList";
import type { DoorSchema, EngineSchema, EngineList, MachineList, PoolSchema, SessionsSchema, Tone } from "../../rest";
import { go, hrefOf, setParams, useRoute } from "../../route";
import { SourceNumbers } from "../../parts/SourceNumbers";
import { Machines } from "./Machines";
import { VertexTable } from "./VertexTable";
import "./fleet.css";

export default function FleetView() {
  const { job, running } = useLive();
  const { params } = useRoute();
  const [search, setSearch] = useState(params["q"] ?? "");
  const { data: view } = useJobView();
  const { data: engines, error } = useJob<EngineList>("/engines", 2);
  const { data: machines, error: noMachines } = useJob<MachineList>(running ? "/nodes" : null, 5);
  const found = (text: string): boolean => text.toLowerCase().includes(search.trim().toLowerCase());
  const shown = engines?.engines.filter((one) => found(`${one.instance} ${one.node} ${one.state} ${one.engine}`)) ?? [];
  const vertices = view?.vertices.filter((one) => found(`${one.id} ${one.node} ${one.phase} ${one.reason}`)) ?? [];
  return (
    <>
      <div className="head">
        <h1>Fleet</h1>
        <label>Search <input type="search" value={search} placeholder="instance, machine, state" onChange={(event) => { setSearch(event.target.value); setParams({ q: event.target.value }); }} /></label>
      </div>
      {error && !engines && <Refused error={error} />}
      {engines?.door && <DoorOfFleet door={engines.door} />}
      {engines?.sessions && <SessionsOfAgents sessions={engines.sessions} />}
      {engines && engines.engines.length > 0 && (
        <section aria-labelledby="instances">
          <h2 id="instances">{plural(shown.length, "instance")}</h2>
          <Pools pools={engines.pools} engines={engines.engines} />
          <Instances job={job} engines={shown} published={view?.job.version ?? -1} />
        </section>
      )}
      {view && (
        <section aria-labelledby="vertices">
          <h2 id="vertices">{plural(vertices.length, "vertex", "vertices")}</h2>
          <VertexTable vertices={vertices} ended={view.job.ended_at !== null} />
        </section>
      )}
      {machines && machines.nodes.length > 0 && <Machines machines={machines.nodes} found={found} />}
      {(!running || (noMachines && !machines)) && <p className="empty">{noMachines && `${noMachines.message} `}Instances and machines are known while the job runs; their numbers and the timeline are kept.</p>}
    </>
  );
}

/** What came of requests at a fleet's door since its manager started. */
function DoorOfFleet({ door }: { door: DoorSchema }) {
  const { requests } = door;
  return (
    <section aria-labelledby="door">
      <h2 id="door">Door</h2>
      <p>
        {door.url && <><code>{door.url}</code>: </>}
        {plural(door.open, "request")} open, {whole(requests.answered)} answered with {whole(requests.tokens)} tokens, {whole(requests.failed)} failed since the manager started.
        {requests.median_s !== null && ` Of the recent ones half took up to ${duration(requests.median_s)}, 95 % up to ${duration(requests.slow_s ?? requests.median_s)}.`}
      </p>
      {Object.keys(requests.keys).length > 0 && (
        <div className="wide" tabIndex={0} role="region" aria-label="Keys">
          <table>
            <thead><tr><th>Key</th><th className="number">answered</th><th className="number">failed</th><th className="number">tokens</th></tr></thead>
            <tbody>
              {Object.entries(requests.keys).map(([name, one]) => (
                <tr key={name}><td>{name}</td><td className="number">{whole(one.answered)}</td><td className="number">{whole(one.failed)}</td><td className="number">{whole(one.tokens)}</td></tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}

/** Where the sessions of a job's agents are, and what came of them since its rollout manager started. */
function SessionsOfAgents({ sessions }: { sessions: SessionsSchema }) {
  const [, ...older] = sessions.since_start.faults;
  return (
    <section aria-labelledby="sessions">
      <h2 id="sessions">Sessions</h2>
      <p>{sessions.sentence}</p>
      {older.length > 0 && (
        <details>
          <summary>{plural(older.length, "earlier fault")}</summary>
          <ul>{older.map((one) => <li key={one.session}><code>{one.session}</code>: {one.reason || "no reason was given"}</li>)}</ul>
        </details>
      )}
    </section>
  );
}

function Pools({ pools, engines }: { pools: Record<string, PoolSchema>; engines: readonly EngineSchema[] }) {
  const rate = engines.reduce((sum, one) => sum + one.rate_tokens_s, 0);
  return (
    <p>
      Together {short(rate)} tokens/s.
      {Object.entries(pools).map(([role, pool]) => (
        <span key={role}> Pool <strong>{role}</strong>: {whole(pool.instances)} instances at {short(pool.price_per_hour)} an hour each{pool.price_per_million_tokens === null ? "" : `, ${short(pool.price_per_million_tokens)} a million tokens`}.</span>
      ))}
    </p>
  );
}

function toneOf(engine: EngineSchema): Tone {
  if (engine.state === "working" || engine.state === "idle") return "good";
  return engine.state === "cut" ? "bad" : "attention";
}

function Instances({ job, engines, published }: { job: string; engines: readonly EngineSchema[]; published: number }) {
  const [chosen, setChosen] = useState<number | null>(null);
  const lineHeight = 2 * useRootSize();
  const name = chosen === null ? undefined : engines[chosen]?.instance;
  return (
    <>
      <div className="fleet-wide">
        <div className="fleet-line fleet-head" aria-hidden="true">
          <span>instance</span><span>state</span><span>version</span><span className="n">runs</span><span className="n">tokens/s</span><span className="n">KV</span><span className="n">silent</span><span>machine</span><span>engine</span>
        </div>
        <VirtualList
          className={engines.length > 12 ? "fleet-list tall" : "fleet-list"}
          count={engines.length}
          lineHeight={lineHeight}
          label="Instances"
          chosen={chosen}
          onChoose={setChosen}
          onOpen={(at) => go(hrefOf(job, "samples", { instance: engines[at]?.instance }))}
          line={(at) => {
            const one = engines[at];
            if (!one) return null;
            const behind = published - one.version;
            return (
              <div className="fleet-line">
                <span><strong>{one.instance}</strong></span>
                <span><Badge tone={toneOf(one)}>{one.state}</Badge> {one.not_admitted && <span className="muted small">{words(one.not_admitted)}</span>}</span>
                <span>{one.version < 0 ? "none" : one.version}{one.version >= 0 && behind > 0 && <span className="muted"> {behind} behind</span>}</span>
                <span className="n">{one.running}/{one.max_running}</span>
                <span className="n">{short(one.rate_tokens_s)}</span>
                <span className="n">{one.kv_tokens > 0 ? percent(one.kv_used_tokens / one.kv_tokens) : "–"}</span>
                <span className="n">{one.silent_s === null ? "–" : duration(one.silent_s)}</span>
                <span>{one.node}</span>
                <span className="muted">{one.engine}</span>
              </div>
            );
          }}
        />
      </div>
      {name && <SourceNumbers source={`instance/${name}`} title={name} />}
    </>
  );
}
