/** A job's page: its head, its views, and what follows it while it runs. */
import { useEffect, useMemo, type ReactNode } from "react";
import { jobPath } from "../data/api";
import { LARGE, TICKS_IF_LARGE } from "../data/job";
import { LiveContext, useTick } from "../data/live";
import { useResource } from "../data/resource";
import { clock, words } from "../format";
import { hrefOf, type Route } from "../route";
import type { JobView } from "../rest";
import { Badge, toneOfPhase } from "../parts/Badge";
import { Refused } from "../parts/Refused";
import { Commands } from "./Commands";
import { ThemeSwitch } from "./ThemeSwitch";
import { useView } from "./useView";
import { VIEWS, type ViewEntry } from "./viewList";

const GROUPS: readonly ViewEntry["group"][] = ["Every day", "Looking back", "The parts"];

/** The view that a link inside another one belongs to, for the list of views. */
const WITHIN: Readonly<Record<string, string>> = { tokens: "samples" };

/** What a job lacks is told first; its message says what it is. */
const TOLD_FIRST = new Set(["store_lost", "disk_full", "no_room"]);

export function JobShell({ route, away, onKeys }: { route: Route; away: ReactNode; onKeys: () => void }) {
  const known = useResource<JobView>(jobPath(route.job), null).data;
  const running = known !== undefined && known.job.ended_at === null;
  const tick = useTick(route.job, running, known?.seq ?? null);
  const every = (known?.vertices.length ?? 0) > LARGE ? TICKS_IF_LARGE : 1;
  const { data: view, error } = useResource<JobView>(jobPath(route.job), tick, every);
  const live = useMemo(() => ({ job: route.job, tick, running }), [route.job, tick, running]);
  const shown = VIEWS.find((one) => one.id === route.view);
  const { Component, failed } = useView(shown);
  const title = shown?.title ?? "No such view";
  useEffect(() => {
    document.title = `${title} · ${route.job} · Gyre`;
  }, [title, route.job]);
  return (
    <LiveContext value={live}>
      <header className="top">
        <a className="home" href={hrefOf("", "jobs")}>Gyre</a>
        <a className="job" href={hrefOf(route.job, "now")}>{route.job}</a>
        {view && <Badge tone={toneOfPhase(view.job.phase)}>{words(view.job.phase)}</Badge>}
        {view && <span className="muted">step {view.job.step}{view.job.steps_asked ? ` of ${view.job.steps_asked}` : ""}</span>}
        <div className="right">
          {view && <Commands view={view} />}
          <button type="button" className="plain keys" onClick={onKeys}>Keys</button>
          <ThemeSwitch />
        </div>
      </header>
      {away || (view && running && !view.master.answering && (
        <p className="away" role="status">
          The job's master is away. What is shown is what the store has, up to {clock(lastSeen(view))}.
        </p>
      ))}
      {view && running && TOLD_FIRST.has(view.job.reason) && <p className="away" role="alert">{view.job.message}</p>}
      <div className="frame">
        <div className="views">
          <nav aria-label="Views of the job">
            {GROUPS.map((group) => (
              <ul key={group} aria-label={group}>
                <li className="group" aria-hidden="true">{group}</li>
                {VIEWS.filter((one) => one.group === group && !WITHIN[one.id]).map((one) => (
                  <li key={one.id}>
                    <a href={hrefOf(route.job, one.id)} aria-current={(WITHIN[route.view] ?? route.view) === one.id ? "page" : undefined}>{one.title}</a>
                  </li>
                ))}
              </ul>
            ))}
          </nav>
        </div>
        <main id="content" tabIndex={-1}>
          {error && !view ? <Refused error={error} /> : Component ? (
            <Component />
          ) : shown ? (
            <p className="empty" role="status">{failed ? "This view could not be loaded: the server does not answer. Open it again when it does." : "Loading …"}</p>
          ) : (
            <p className="empty">There is no view {route.view}. The list of views has those that there are.</p>
          )}
        </main>
      </div>
    </LiveContext>
  );
}

function lastSeen(view: JobView): number {
  return Math.max(view.job.started_at ?? view.job.submitted_at, ...view.vertices.map((one) => one.since));
}
