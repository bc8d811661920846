/** What the vertices printed, as they printed it: newest at the end, followed while the job runs. */
import { useEffect, useMemo, useRef, useState } from "react";
import { useJobView } from "../../data/job";
import { useLive } from "../../data/live";
import { plural } from "../../format";
import { Refused } from "../../parts/Refused";
import { useRootSize } from "../../parts/rootSize";
import { VirtualList } from "../../parts/VirtualList";
import { setParams, useRoute } from "../../route";
import { useLogs, type LogLine } from "./logLines";
import "./logs.css";

type Level = "all" | "warning" | "error";

const ERRORS = /\b(ERROR|CRITICAL|FATAL|Traceback|Error:|Exception:)/;
const WARNINGS = /\b(WARN|WARNING)\b/;

function levelOf(text: string): Level {
  return ERRORS.test(text) ? "error" : WARNINGS.test(text) ? "warning" : "all";
}

export default function LogsView() {
  const { job, tick } = useLive();
  const { params } = useRoute();
  const role = params["role"] ?? "";
  const rank = params["rank"] ?? "";
  const level = (params["level"] ?? "all") as Level;
  const [search, setSearch] = useState(params["q"] ?? "");
  const [chosen, setChosen] = useState<number | null>(null);
  const { data: view } = useJobView();
  const { lines, error, loading } = useLogs(job, role, rank, tick);
  const lineHeight = 1.375 * useRootSize();
  const roles = useMemo(() => [...new Set(view?.vertices.map((one) => one.role))], [view]);
  const shown = useMemo(() => {
    const wanted = search.trim().toLowerCase();
    return lines.filter((line) => (level === "all" || levelOf(line.text) === "error" || (level === "warning" && levelOf(line.text) === "warning")) && (!wanted || line.text.toLowerCase().includes(wanted) || line.vertex.includes(wanted)));
  }, [lines, level, search]);
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const list = box.current?.querySelector(".scroller");
    if (list && chosen === null) list.scrollTop = list.scrollHeight;
  }, [shown, chosen]);
  return (
    <>
      <div className="head">
        <h1>Logs</h1>
        <label>Search <input type="search" value={search} onChange={(event) => { setSearch(event.target.value); setParams({ q: event.target.value }); }} /></label>
        <label>Role <select value={role} onChange={(event) => setParams({ role: event.target.value, rank: null })}><option value="">all</option>{roles.map((one) => <option key={one}>{one}</option>)}</select></label>
        <label>Rank <input inputMode="numeric" pattern="[0-9]*" size={4} value={rank} disabled={!role} onChange={(event) => setParams({ rank: event.target.value.replace(/\D/g, "") })} /></label>
        <label>Level <select value={level} onChange={(event) => setParams({ level: event.target.value === "all" ? null : event.target.value })}><option value="all">all</option><option value="warning">warnings and errors</option><option value="error">errors</option></select></label>
      </div>
      {error && <Refused error={error} />}
      <p className="muted small" role="status">
        {loading ? "Loading …" : plural(shown.length, "line")}
        {chosen !== null && <> · <button type="button" className="plain" onClick={() => setChosen(null)}>Follow the end</button></>}
      </p>
      <div ref={box}>
        <VirtualList className="logs" count={shown.length} lineHeight={lineHeight} label="Lines" chosen={chosen} onChoose={setChosen} line={(at) => <Line line={shown[at]} />} />
      </div>
      {chosen !== null && shown[chosen] && <pre className="whole-line" tabIndex={0} aria-label="The chosen line">{shown[chosen].text}</pre>}
    </>
  );
}

function Line({ line }: { line: LogLine | undefined }) {
  if (!line) return null;
  return (
    <>
      <span className="vertex muted">{line.vertex}</span>
      <span className={`text ${levelOf(line.text)}`}>{line.text}</span>
    </>
  );
}
