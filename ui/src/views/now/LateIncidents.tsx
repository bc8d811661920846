/** The incidents of late, newest first. */
import { clock, duration, plural, words } from "../../format";
import { Badge } from "../../parts/Badge";
import type { IncidentSchema } from "../../rest";
import { hrefOf } from "../../route";

const SHOWN = 5;

/** A job that failed as a whole has none of its own: what it failed of is its phase's message. */
export const noIncident = (phase: string): string => (phase === "failed" ? "None: the job failed as a whole, not one of its processes." : "None so far.");

export function LateIncidents({ job, phase, incidents }: { job: string; phase: string; incidents: readonly IncidentSchema[] }) {
  const late = incidents.slice(-SHOWN).reverse();
  return (
    <section aria-labelledby="late">
      <h2 id="late">Incidents of late</h2>
      {late.length === 0 ? (
        <p className="empty">{noIncident(phase)}</p>
      ) : (
        <>
          <ul className="late">
            {late.map((one) => (
              <li key={one.id}>
                <span className="mono">{clock(one.at)}</span>
                <a href={hrefOf(job, "incidents", { id: one.id })}>{one.vertex}: {words(one.cause)}</a>
                <span className="muted">{one.decision}</span>
                {one.came_to === "recovered" ? <Badge tone="good">{one.recovery_s ? `back after ${duration(one.recovery_s)}` : "recovered"}</Badge> : <Badge tone="attention">{words(one.came_to)}</Badge>}
              </li>
            ))}
          </ul>
          <p className="small"><a href={hrefOf(job, "incidents")}>All {plural(incidents.length, "incident")}</a></p>
        </>
      )}
    </section>
  );
}
