/** The incidents of late, newest first. */
import { clock, duration, plural, words } from "../../format";
import { Badge } from "../../parts/Badge";
import type { Incident } from "../../rest";
import { hrefOf } from "../../route";

const SHOWN = 5;

export function LateIncidents({ job, incidents }: { job: string; incidents: readonly Incident[] }) {
  const late = incidents.slice(-SHOWN).reverse();
  return (
    <section aria-labelledby="late">
      <h2 id="late">Incidents of late</h2>
      {late.length === 0 ? (
        <p className="empty">None so far.</p>
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
