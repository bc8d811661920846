/** What went wrong: evidence, culprit, decision, outcome. Newest first; each has a way into the replay. */
import { useState } from "react";
import { useJob, useJobView } from "../../data/job";
import { useLive } from "../../data/live";
import { duration, moment, clock, plural, words } from "../../format";
import { Badge } from "../../parts/Badge";
import { Evidence } from "../../parts/Evidence";
import { Refused } from "../../parts/Refused";
import { useRootSize } from "../../parts/rootSize";
import { VirtualList } from "../../parts/VirtualList";
import type { IncidentSchema, Tone } from "../../rest";
import { hrefOf, setParams, useRoute } from "../../route";
import { noIncident } from "../now/LateIncidents";
import "./incidents.css";

export default function IncidentsView() {
  const { params } = useRoute();
  const [search, setSearch] = useState(params["q"] ?? "");
  const { data, error } = useJob<{ incidents: IncidentSchema[] }>("/incidents");
  const { data: view } = useJobView();
  const lineHeight = 2 * useRootSize();
  if (!data) return <><h1>Incidents</h1>{error ? <Refused error={error} /> : <p className="empty">Loading …</p>}</>;
  const shown = data.incidents.filter((one) => `${one.vertex} ${words(one.cause)} ${one.decision} ${one.outcome}`.toLowerCase().includes(search.trim().toLowerCase())).reverse();
  const index = shown.findIndex((one) => one.id === params["id"]);
  const chosen = shown[index] ?? shown[0];
  return (
    <>
      <div className="head">
        <h1>{plural(data.incidents.length, "incident")}</h1>
        <label>Search <input type="search" value={search} placeholder="vertex, cause, decision" onChange={(event) => { setSearch(event.target.value); setParams({ q: event.target.value }); }} /></label>
      </div>
      {data.incidents.length === 0 ? <p className="empty">{noIncident(view?.job.phase ?? "")}</p> : (
        <div className="incidents">
          <VirtualList className="incident-list" count={shown.length} lineHeight={lineHeight} label="Incidents" chosen={index < 0 ? null : index} onChoose={(at) => setParams({ id: shown[at]?.id })} line={(at) => <Line incident={shown[at]} />} />
          {chosen && <Detail incident={chosen} />}
        </div>
      )}
    </>
  );
}

export function toneOfIncident(incident: IncidentSchema): Tone {
  if (incident.came_to === "recovered") return "good";
  return incident.scope === "give_up" ? "bad" : "attention";
}

function Line({ incident }: { incident: IncidentSchema | undefined }) {
  if (!incident) return null;
  return (
    <>
      <span className="mono">{clock(incident.at)}</span>
      <strong>{incident.vertex}</strong>
      <span>{words(incident.cause)}</span>
      <Badge tone={toneOfIncident(incident)}>{words(incident.came_to)}</Badge>
    </>
  );
}

function Detail({ incident }: { incident: IncidentSchema }) {
  const { job } = useLive();
  const facts: [string, string][] = [
    ["When", moment(incident.at)],
    ["Seen after", duration(incident.detected_after_s)],
    ["Cause", words(incident.cause)],
    ["Decision", incident.decision],
    ["Repair", words(incident.scope)],
    ["Restarted together", incident.region.length > 8 ? `${incident.region.slice(0, 8).join(", ")} and ${incident.region.length - 8} more` : incident.region.join(", ") || "–"],
    ["Back after", incident.came_to === "recovered" ? duration(incident.recovery_s) : "–"],
    ["Outcome", words(incident.came_to)],
    ["Whose code", incident.user_code ? "the user's" : "not the user's"],
  ];
  return (
    <section className="card stack" aria-label={`Incident ${incident.id}`}>
      <div className="head">
        <h2>{incident.vertex}: {words(incident.cause)}</h2>
        <a href={hrefOf(job, "replay", { time: incident.at.toFixed(3) })}>Replay this moment</a>
        <a href={hrefOf(job, "timeline", { since: (incident.at - 120).toFixed(0), until: (incident.at + 180).toFixed(0) })}>Timeline</a>
        <a href={hrefOf(job, "logs", { role: incident.vertex.replace(/-\d+$/, ""), rank: /-(\d+)$/.exec(incident.vertex)?.[1] })}>Logs</a>
      </div>
      <table>
        <tbody>{facts.map(([name, value]) => <tr key={name}><th scope="row">{name}</th><td>{value}</td></tr>)}</tbody>
      </table>
      <Evidence evidence={incident.evidence} />
    </section>
  );
}
