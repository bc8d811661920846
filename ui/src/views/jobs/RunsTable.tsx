/**
 * The table of runs: a click on a heading sorts by it, first in the direction that is mostly wanted. Of a long table only
 * the lines in sight exist, all of one height.
 */
import { useEffect, useRef, useState } from "react";
import { useRootSize } from "../../parts/rootSize";
import type { Run } from "../../rest";
import { hrefOf, setParams, useRoute } from "../../route";
import { COLUMNS, widthOf } from "./columns";
import { Heading } from "./Heading";
import { heightFor } from "./height";
import "./runs.css";

const LINE_REM = 2.25;
const BOX_REM = 2.25;
const NAME_REM = 10;
const SPARE = 8;

interface Props {
  readonly runs: readonly Run[];
  readonly keyOf: (run: Run) => string;
  readonly chosen: ReadonlyMap<string, string>;
  readonly onToggle: (run: Run) => void;
  readonly onLabels: (run: Run) => void;
}

export function RunsTable({ runs, keyOf, chosen, onToggle, onLabels }: Props) {
  const sort = useRoute().params["sort"] ?? "";
  const line = LINE_REM * useRootSize();
  const { ref, from, to } = useWindow(runs.length, line);
  const columns = COLUMNS.filter((column) => !column.there || runs.some(column.there));
  const wide = NAME_REM + columns.reduce((sum, column) => sum + widthOf(column, runs), BOX_REM);
  return (
    <div className="wide runs" ref={ref} tabIndex={0} role="region" aria-label="Jobs">
      <table style={{ minWidth: `${wide}rem` }} aria-rowcount={runs.length + 1}>
        <colgroup>
          <col style={{ width: `${BOX_REM}rem` }} />
          <col style={{ width: `${NAME_REM}rem` }} />
          {columns.map((column) => <col key={column.title} style={{ width: `${widthOf(column, runs)}rem` }} />)}
        </colgroup>
        <thead>
          <tr>
            <th scope="col"><span className="visually-hidden">Compare</span></th>
            <Heading name="name" title="Job" sort={sort} />
            {columns.map((column) => <Heading key={column.title} name={column.name} title={column.title} sort={sort} number={column.number} />)}
          </tr>
        </thead>
        <tbody>
          {from > 0 && <tr aria-hidden="true"><td colSpan={columns.length + 2} style={{ height: from * line, padding: 0 }} /></tr>}
          {runs.slice(from, to).map((run, at) => {
            const key = keyOf(run);
            return (
              <tr key={run.job_id} className="run" aria-rowindex={from + at + 2} style={{ height: line }}>
                <td><input type="checkbox" aria-label={`Compare ${key}`} checked={chosen.has(run.job_id)} onChange={() => onToggle(run)} /></td>
                <td title={run.name === key ? `${run.name}, ${run.job_id}` : run.job_id}><a href={hrefOf(key, "now")}>{key}</a></td>
                {columns.map((column) => (
                  <td key={column.title} className={column.number ? "number" : undefined} title={column.full?.(run)}>
                    {column.name === "tags" ? <Tags run={run} name={key} onLabels={onLabels} /> : column.cell(run)}
                  </td>
                ))}
              </tr>
            );
          })}
          {to < runs.length && <tr aria-hidden="true"><td colSpan={columns.length + 2} style={{ height: (runs.length - to) * line, padding: 0 }} /></tr>}
        </tbody>
      </table>
    </div>
  );
}

function Tags({ run, name, onLabels }: { run: Run; name: string; onLabels: (run: Run) => void }) {
  return (
    <>
      <button type="button" className="plain small" onClick={() => onLabels(run)}><span aria-hidden="true">✎</span><span className="visually-hidden">Tags and note of {name}</span></button>
      {run.tags.map((tag) => <button key={tag} type="button" className="tag" title={`Only runs with the tag ${tag}`} onClick={() => setParams({ filter: /\s/.test(tag) ? `tag="${tag}"` : `tag=${tag}` })}>{tag}</button>)}
    </>
  );
}

/** Which lines are in sight of a box that scrolls. */
function useWindow(count: number, line: number) {
  const ref = useRef<HTMLDivElement>(null);
  const [seen, setSeen] = useState({ top: 0, height: 900 });
  useEffect(() => {
    const element = ref.current;
    if (!element) return;
    const look = (): void => {
      // To the end of the screen and not beyond, so that no line is hidden while there is room for it.
      element.style.maxHeight = `${heightFor(element.getBoundingClientRect().top + window.scrollY, window.innerHeight)}px`;
      setSeen({ top: element.scrollTop, height: element.clientHeight });
    };
    const observer = new ResizeObserver(look);
    observer.observe(element);
    observer.observe(document.body);
    look();
    element.addEventListener("scroll", look, { passive: true });
    return () => {
      observer.disconnect();
      element.removeEventListener("scroll", look);
    };
  }, []);
  const from = Math.max(0, Math.min(count, Math.floor(seen.top / line)) - SPARE);
  return { ref, from, to: Math.min(count, Math.ceil((seen.top + seen.height) / line) + SPARE) };
}
