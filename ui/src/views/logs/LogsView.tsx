/** What the job's processes printed, in the order of time: newest at the end, followed while the job runs. */
import { useEffect, useMemo, useRef, useState } from "react";
import { useJobView } from "../../data/job";
import { useLive } from "../../data/live";
import { clock, moment, plural } from "../../format";
import { Refused } from "../../parts/Refused";
import { useRootSize } from "../../parts/rootSize";
import { VirtualList } from "../../parts/VirtualList";
import type { LogLine } from "../../rest";
import { setParams, useRoute } from "../../route";
import { useLogs } from "./logLines";
import "./logs.css";

/** After the last key, so that a search is one question. */
const TYPED_MS = 400;

export default function LogsView() {
  const { job, tick } = useLive();
  const { params } = useRoute();
  const role = params["role"] ?? "";
  const rank = params["rank"] ?? "";
  const level = params["level"] ?? "";
  const minutes = params["minutes"] ?? "";
  const grep = params["q"] ?? "";
  const [typed, setTyped] = useState(grep);
  const [chosen, setChosen] = useState<number | null>(null);
  const { data: view } = useJobView();
  const { lines, missing, searchedFrom, error, loading } = useLogs(job, { role, rank, level, grep, minutes }, tick);
  const lineHeight = 1.375 * useRootSize();
  const roles = useMemo(() => [...new Set([...(view?.vertices.map((one) => one.role) ?? []), "master", "sink"])], [view]);
  useEffect(() => {
    if (typed === grep) return;
    const timer = setTimeout(() => setParams({ q: typed || null }), TYPED_MS);
    return () => clearTimeout(timer);
  }, [typed, grep]);
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const list = box.current?.querySelector(".scroller");
    if (list && chosen === null) list.scrollTop = list.scrollHeight;
  }, [lines, chosen]);
  const line = chosen === null ? undefined : lines[chosen];
  return (
    <>
      <div className="head">
        <h1>Logs</h1>
        <label>Search <input type="search" title="A regular expression, looked for in the text" value={typed} onChange={(event) => setTyped(event.target.value)} /></label>
        <label>Role <select value={role} onChange={(event) => setParams({ role: event.target.value, rank: null })}><option value="">all</option>{roles.map((one) => <option key={one}>{one}</option>)}</select></label>
        <label>Rank <input inputMode="numeric" pattern="[0-9]*" size={4} value={rank} disabled={!role} onChange={(event) => setParams({ rank: event.target.value.replace(/\D/g, "") })} /></label>
        <label>Level <select value={level} onChange={(event) => setParams({ level: event.target.value || null })}><option value="">all</option><option value="I">no debugging</option><option value="W">warnings and errors</option><option value="E">errors</option></select></label>
        <label>Since <select value={minutes} onChange={(event) => setParams({ minutes: event.target.value || null })}><option value="">the newest</option><option value="10">10 minutes</option><option value="60">an hour</option><option value="1440">a day</option></select></label>
      </div>
      {error && <Refused error={error} />}
      <p className="muted small" role="status">
        {loading ? "Loading …" : plural(lines.length, "line")}
        {searchedFrom !== null && <> · older ones than of {moment(searchedFrom)} are not shown</>}
        {chosen !== null && <> · <button type="button" className="plain" onClick={() => setChosen(null)}>Follow the end</button></>}
      </p>
      {missing.map((sentence) => <p key={sentence} className="muted small">{sentence}</p>)}
      <div ref={box}>
        <VirtualList className="logs" count={lines.length} lineHeight={lineHeight} label="Lines" chosen={chosen} onChoose={setChosen} line={(at) => <Line line={lines[at]} />} />
      </div>
      {line && <pre className="whole-line" tabIndex={0} aria-label="The chosen line">{`${moment(line.at)} ${line.file}\n${line.text}`}</pre>}
    </>
  );
}

function Line({ line }: { line: LogLine | undefined }) {
  if (!line) return null;
  return (
    <>
      <time className="muted">{clock(line.at)}</time>
      <span className="level muted">{line.level}</span>
      <span className="vertex muted">{line.vertex}</span>
      <span className={`text level-${line.level}`}>{line.text}</span>
    </>
  );
}
