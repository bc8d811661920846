/** One number of several jobs, by step. */
import { useMemo, useRef } from "react";
import { smoothed, thinned } from "../../data/thinning";
import { percent, percentTick, short, tick, wholeTick } from "../../format";
import { Chart, type Line } from "../../parts/Chart";
import { savePng } from "../../parts/png";
import { setParams, useRoute } from "../../route";
import type { Curve } from "../curves/chosen";
import { useSmoothing } from "../curves/SmoothChoice";
import type { Run } from "./runs";

const MOST_POINTS = 600;

export function CompareCard({ curve, runs }: { curve: Curve; runs: readonly Run[] }) {
  const { params } = useRoute();
  const over = useSmoothing();
  const figure = useRef<HTMLElement>(null);
  const { x, lines } = useMemo(() => aligned(curve.name, runs, over), [curve, runs, over]);
  const format = curve.ratio ? percent : short;
  const [from, to] = [Number(params["from"]), Number(params["to"])];
  if (lines.every((line) => line.values.every((value) => value === null))) return null;
  return (
    <figure className="card curve" ref={figure}>
      <figcaption>
        <span className="title" title={curve.name}>{curve.title}</span>
        <span className="muted small">{curve.unit}</span>
        <button type="button" className="plain small" aria-label={`${curve.title} as PNG`} onClick={() => figure.current && savePng(figure.current, `${curve.title}${curve.unit ? `, ${curve.unit}` : ""}`, lines, curve.name)}>PNG</button>
      </figcaption>
      <Chart x={x} lines={lines} legend={false} group="compare" logX={params["logx"] === "1"} logY={params["logy"] === "1"} known={curve.known} formatX={wholeTick} formatY={format} tickY={curve.ratio ? percentTick : tick} nameX="step" range={params["from"] && from < to ? [from, to] : undefined} onRange={(low, high) => setParams({ from: low?.toFixed(1), to: high?.toFixed(1) })} label={`${curve.title} of ${runs.map((run) => `${run.name}, last ${format(run.steps.at(-1)?.[curve.name])}`).join("; ")}`} />
    </figure>
  );
}

/** All jobs over the same steps; each is thinned by itself, so that its spikes stay. */
function aligned(name: string, runs: readonly Run[], over: number): { x: number[]; lines: Line[] } {
  const points = runs.map((run) => {
    const few = thinned(run.steps.map((step) => step["step"] ?? 0), smoothed(run.steps.map((step) => step[name] ?? null), over), MOST_POINTS);
    return new Map(few.x.map((step, at) => [step, few.y[at] ?? null]));
  });
  const x = [...new Set(points.flatMap((one) => [...one.keys()]))].sort((a, b) => a - b);
  const lines = runs.map((run, at): Line => ({ label: run.name, values: x.map((step) => points[at]?.get(step) ?? null), colour: run.colour, dashed: run.dashed, dotted: run.dotted, bridged: true }));
  return { x, lines };
}
