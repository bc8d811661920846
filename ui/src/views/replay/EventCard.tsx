/** The event that came at that moment, what it said, and the incident that it belongs to. */
import { useLive } from "../../data/live";
import { clock, kindWords, words } from "../../format";
import { Evidence } from "../../parts/Evidence";
import type { EventSchema, IncidentSchema, Json } from "../../rest";
import { hrefOf } from "../../route";

/** An incident begins with the event that tells of it. */
const NEAR_S = 5;

export function EventCard({ event, incidents }: { event: EventSchema | null; incidents: readonly IncidentSchema[] }) {
  const { job } = useLive();
  if (!event) return <p className="empty">Nothing has happened yet.</p>;
  const vertex = event.body["vertex"];
  const incident = incidents.findLast((one) => one.vertex === vertex && Math.abs(one.at - event.at) < NEAR_S);
  return (
    <section className="card stack" aria-label="The event" aria-live="polite">
      <h2>{kindWords(event.kind)}</h2>
      <p className="muted">{clock(event.at)}, told by {event.actor || "the master"}{event.cause && <>, because of <span className="mono">{event.cause}</span></>}</p>
      {incident && (
        <div className="refused">
          <p><strong>{incident.vertex}: {words(incident.cause)}</strong></p>
          <p>Decided: {incident.decision} ({words(incident.scope)})</p>
          <p><a href={hrefOf(job, "incidents", { id: incident.id })}>The incident</a></p>
        </div>
      )}
      <Evidence title="What it says" evidence={flattened(event.body)} />
    </section>
  );
}

/** One level of nesting is brought up: the evidence of a lost vertex is what one looks for. */
function flattened(body: Record<string, Json>): Record<string, Json> {
  const out: Record<string, Json> = {};
  for (const [name, value] of Object.entries(body)) {
    if (value !== null && typeof value === "object" && !Array.isArray(value)) Object.assign(out, Object.fromEntries(Object.entries(value).map(([key, inner]) => [`${name}: ${key}`, inner])));
    else out[name] = value;
  }
  return out;
}
