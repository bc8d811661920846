/** The job as it was at any moment: the journal folded that far, the event that came then, and what was decided. */
import { lazy, Suspense, useEffect, useState } from "react";
import { get, jobPath } from "../../data/api";
import { useJob, useJobView } from "../../data/job";
import { useLive } from "../../data/live";
import { clock, kindWords, moment as dateOf, plural, whole, words } from "../../format";
import { Badge, toneOfPhase } from "../../parts/Badge";
import { Refused } from "../../parts/Refused";
import type { Decisions, Graph, JobView } from "../../rest";
import { hrefOf, setParams, useRoute } from "../../route";
import { isTyping } from "../../shell/keys";
import { VertexTable } from "../fleet/VertexTable";
import "../fleet/fleet.css";
import { EventCard } from "./EventCard";
import { useMoment } from "./moment";
import "./replay.css";

const GraphCanvas = lazy(() => import("../graph/GraphCanvas"));

export default function ReplayView() {
  const { job } = useLive();
  const { params } = useRoute();
  const { data: now } = useJobView();
  const { data: graph } = useJob<Graph>("/graph?placement=false", Infinity);
  const query = params["seq"] ? `seq=${params["seq"]}` : params["time"] ? `time=${params["time"]}` : now ? `seq=${now.seq}` : null;
  const { moment, error, loading } = useMoment(job, query);
  const [noMore, setNoMore] = useState("");
  const last = Math.max(moment?.last ?? 1, now?.seq ?? 1);
  const asked = params["seq"] ? Number(params["seq"]) : (moment?.event?.seq ?? now?.seq ?? 1);
  const seq = moment || now ? Math.min(asked, last) : asked;
  const first = moment?.first ?? 1;

  const to = (next: number): void => {
    setNoMore("");
    setParams({ seq: Math.max(first, Math.min(last, Math.round(next))), time: null });
  };
  const toDecision = (which: keyof Decisions): void => {
    get<Decisions>(jobPath(job, `/decisions?around=${seq}`))
      .then((around) => {
        const next = around[which];
        if (next === null) setNoMore(which === "next" ? "There is no later decision." : "There is no earlier decision.");
        else to(next);
      })
      .catch(() => setNoMore("The server did not say where the decision is."));
  };
  useEffect(() => {
    const pressed = (event: KeyboardEvent): void => {
      const target = event.target;
      if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      if (isTyping(target) && !(target instanceof HTMLInputElement && target.type === "range")) return;
      if (event.key === "n") toDecision("next");
      else if (event.key === "p") toDecision("previous");
      else if (event.key === "ArrowLeft" && target === document.body) to(seq - 1);
      else if (event.key === "ArrowRight" && target === document.body) to(seq + 1);
    };
    window.addEventListener("keydown", pressed);
    return () => window.removeEventListener("keydown", pressed);
  });

  const view = moment?.view;
  const open = view?.incidents.filter((one) => one.recovered_at === null) ?? [];
  return (
    <>
      <div className="head">
        <h1>Replay</h1>
        <span className="muted">{moment?.event ? dateOf(moment.event.at) : ""}</span>
        <a href={hrefOf(job, "timeline", moment?.event ? { since: (moment.event.at - 120).toFixed(0), until: (moment.event.at + 120).toFixed(0) } : {})}>Timeline of then</a>
      </div>
      <div className="slider">
        <div className="row">
          <button type="button" onClick={() => toDecision("previous")}>Decision before <kbd>p</kbd></button>
          <button type="button" onClick={() => to(seq - 1)} disabled={seq <= first}>−1 event</button>
          <button type="button" onClick={() => to(seq + 1)} disabled={seq >= last}>+1 event</button>
          <button type="button" onClick={() => toDecision("next")}>Decision after <kbd>n</kbd></button>
          <button type="button" onClick={() => setParams({ seq: null, time: null })}>Now</button>
          <span className="muted" role="status">{noMore}</span>
        </div>
        <label htmlFor="moment" className="visually-hidden">Event of the journal</label>
        <input id="moment" type="range" min={first} max={last} value={Math.min(seq, last)} onChange={(event) => to(Number(event.target.value))} aria-valuetext={`event ${seq} of ${last}${moment?.event ? `, ${clock(moment.event.at)}, ${kindWords(moment.event.kind)}` : ""}`} />
        <p className="muted small">Event {whole(seq)} of {whole(last)}{loading && moment ? " …" : ""}</p>
      </div>
      {error && <Refused error={error} />}
      {view && (
        <>
          <p className="row">
            <Badge tone={toneOfPhase(view.job.phase)}>{words(view.job.phase)}</Badge>
            <span>step {whole(view.job.step)}</span>
            <span>version {view.job.version < 0 ? "none yet" : whole(view.job.version)}</span>
            <span>{plural(view.vertices.filter((one) => one.phase === "running").length, "vertex", "vertices")} of {whole(view.vertices.length)} run</span>
            {open.length > 0 && <Badge tone="attention">{plural(open.length, "open incident")}</Badge>}
          </p>
          {graph && <Suspense fallback={<p className="empty">Loading the graph …</p>}><GraphCanvas graph={graph} vertices={view.vertices} chosen={params["role"] ?? ""} onChoose={(role) => setParams({ role: role === params["role"] ? null : role })} /></Suspense>}
          <div className="then">
            <Fleet view={view} role={params["role"] ?? ""} at={moment.event?.at} />
            <EventCard event={moment.event} incidents={view.incidents} />
          </div>
        </>
      )}
      {!view && !error && <p className="empty">Loading …</p>}
    </>
  );
}

/** Who does not run comes first. */
function Fleet({ view, role, at }: { view: JobView; role: string; at: number | undefined }) {
  const chosen = role ? view.vertices.filter((one) => one.role === role) : view.vertices;
  const sorted = [...chosen].sort((a, b) => Number(a.phase === "running") - Number(b.phase === "running"));
  return (
    <section aria-label="Vertices then" className="stack">
      <h2>{role ? `Vertices of ${role}` : "Vertices"}</h2>
      <VertexTable vertices={sorted} ended={false} now={at} />
    </section>
  );
}
