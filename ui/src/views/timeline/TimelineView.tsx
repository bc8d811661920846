/** Who did what when, who waited for whom, and what was lost to waiting. */
import { useDeferredValue, useEffect, useMemo, useState } from "react";
import { useJob, withQuery } from "../../data/job";
import { useLive } from "../../data/live";
import { clock, duration, percent, plural } from "../../format";
import { Refused } from "../../parts/Refused";
import type { FlagSchema, SpanState, TimelineSchema } from "../../rest";
import { hrefOf, setParams, useRoute } from "../../route";
import { rolesOf, rowsOf, spanAt, sumsOf, type Row } from "./rows";
import { lookOf, STATES } from "./states";
import { TimelineCanvas } from "./TimelineCanvas";
import { asked, clamped, panned, zoomed, type Window } from "./window";
import "./timeline.css";

const FIRST_SHOWN_S = 600;
const TICKS = 3;
const SETTLED_MS = 180;

export default function TimelineView() {
  const { job, running } = useLive();
  const { params } = useRoute();
  const wanted = params["since"] && params["until"] ? { from: Number(params["since"]), to: Number(params["until"]) } : null;
  const [request, setRequest] = useState<Window | null>(wanted);
  const { data, error } = useJob<TimelineSchema>(withQuery("/timeline", { since: request?.from, until: request?.to }), running ? TICKS : Infinity);
  const [known, setKnown] = useState<TimelineSchema | null>(null);
  useEffect(() => {
    if (data) setKnown(data);
  }, [data]);
  if (!known) return <><h1>Timeline</h1>{error ? <Refused error={error} /> : <p className="empty">Loading …</p>}</>;
  if (known.lanes.length === 0) return <><h1>Timeline</h1><p className="empty">Nobody has started yet.</p></>;
  const bounds = { from: known.first, to: Math.max(known.last, known.first + 1) };
  const follows = { from: Math.max(bounds.from, bounds.to - FIRST_SHOWN_S), to: bounds.to };
  return <Shown key={job} timeline={known} bounds={bounds} window={clamped(wanted ?? follows, bounds)} onNeed={setRequest} />;
}

interface ShownProps {
  readonly timeline: TimelineSchema;
  readonly bounds: Window;
  readonly window: Window;
  readonly onNeed: (window: Window) => void;
}

function Shown({ timeline, bounds, window: shown, onNeed }: ShownProps) {
  const { job } = useLive();
  const [turned, setTurned] = useState<ReadonlySet<string>>(new Set());
  const [chosen, setChosen] = useState(0);
  const [at, setAt] = useState<number | null>(null);
  const roles = useMemo(() => rolesOf(timeline.lanes), [timeline]);
  const rows = useMemo(() => rowsOf(roles, turned), [roles, turned]);
  const settled = useDeferredValue(shown);
  const sums = useMemo(() => sumsOf(timeline.lanes, settled), [timeline, settled]);
  const all = Object.values(sums).reduce((sum, one) => sum + one, 0);

  useEffect(() => {
    const need = asked(shown, bounds);
    const coarse = timeline.until - timeline.since > 6 * (need.to - need.from);
    if (timeline.since <= shown.from + 1e-3 && timeline.until >= shown.to - 1e-3 && !coarse) return;
    const timer = globalThis.setTimeout(() => onNeed(need), SETTLED_MS);
    return () => globalThis.clearTimeout(timer);
  }, [shown.from, shown.to, timeline, bounds.from, bounds.to, onNeed]);

  const show = (next: Window): void => setParams({ since: next.from.toFixed(3), until: next.to.toFixed(3) });
  const turn = (role: string): void => setTurned((old) => new Set(old.has(role) ? [...old].filter((one) => one !== role) : [...old, role]));
  const toFlag = (flag: FlagSchema): void => {
    setAt(flag.at);
    if (flag.at < shown.from || flag.at > shown.to) show(panned(shown, flag.at - (shown.from + shown.to) / 2, bounds));
  };
  const near = at === null ? undefined : timeline.flags.filter((flag) => Math.abs(flag.at - at) < (shown.to - shown.from) / 200).sort((a, b) => Math.abs(a.at - at) - Math.abs(b.at - at))[0];
  const middle = (shown.from + shown.to) / 2;
  return (
    <>
      <div className="head">
        <h1>Timeline</h1>
        <span className="muted">{clock(shown.from)} to {clock(shown.to)}, {duration(shown.to - shown.from)}; {timeline.cut ? "the first " : ""}{plural(timeline.lanes.length, "lane")}</span>
        <div className="row">
          <button type="button" onClick={() => show(zoomed(shown, middle, 0.5, bounds))} aria-label="Zoom in">+</button>
          <button type="button" onClick={() => show(zoomed(shown, middle, 2, bounds))} aria-label="Zoom out">−</button>
          <button type="button" onClick={() => show(bounds)}>All of it</button>
          <button type="button" onClick={() => setParams({ since: null, until: null })}>Newest</button>
        </div>
      </div>
      <ul className="legend" aria-label="States, and their share of the time shown">
        {STATES.filter((one) => (sums[one.state] ?? 0) > 0).map((one) => (
          <li key={one.state}><span className={`swatch state-${one.state}`} />{one.text} <strong>{percent((sums[one.state] ?? 0) / all)}</strong> {duration(sums[one.state])}</li>
        ))}
      </ul>
      <TimelineCanvas rows={rows} flags={timeline.flags} window={shown} bounds={bounds} chosen={chosen} at={at} onWindow={show} onChoose={(row, time) => { setChosen(row); setAt(time); }} onTurn={turn} onFlag={toFlag} />
      <p className="timeline-readout" aria-live="polite">
        {near ? <>{clock(near.at)} <strong>{near.text}</strong> <a href={hrefOf(job, "replay", { seq: near.seq })}>What was then</a></> : <Readout row={rows[chosen]} at={at} shown={settled} />}
      </p>
      <p className="muted small">
        The wheel zooms (with many lanes it scrolls, and Ctrl zooms), Shift and the wheel or a drag pan, a double click shows all. Triangles are incidents; the other marks are versions published, checkpoints, evaluations and commands. Seconds of the trainer's roles, and of an instance that is the only one, are counted; of several instances each is looked at every 5 s, so that their seconds are an estimate.
      </p>
    </>
  );
}

/** The chosen lane at the chosen moment, in words. */
function Readout({ row, at, shown }: { row: Row | undefined; at: number | null; shown: Window }) {
  if (!row) return null;
  if (row.kind === "role") {
    const sums = Object.entries(sumsOf(row.lanes, shown)).sort(([, a], [, b]) => b - a);
    const all = sums.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
    return <><strong>{row.role}</strong>, {plural(row.lanes.length, "lane")}: {sums.map(([state, seconds]) => `${lookOf(state as SpanState).text} ${percent(seconds / all)}`).join(", ")}</>;
  }
  const span = at === null ? undefined : spanAt(row.lane, at);
  if (!span) return <><strong>{row.lane.id}</strong>{at !== null && `: nothing known at ${clock(at)}`}</>;
  return <><strong>{row.lane.id}</strong> {lookOf(span[2]).text} for {duration(span[1] - span[0])}, {clock(span[0])} to {clock(span[1])}{span[3] && `: ${span[3]}`}</>;
}
