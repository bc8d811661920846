/** One number of several jobs, by step. */
import { useMemo } from "react";
import { thinned } from "../../data/thinning";
import { percent, percentTick, short, tick, whole } from "../../format";
import { Chart, type Line } from "../../parts/Chart";
import { setParams, useRoute } from "../../route";
import type { Curve } from "../curves/chosen";
import type { Run } from "./runs";

const MOST_POINTS = 600;

export function CompareCard({ curve, runs }: { curve: Curve; runs: readonly Run[] }) {
  const { params } = useRoute();
  const { x, lines } = useMemo(() => aligned(curve.name, runs), [curve, runs]);
  const format = curve.ratio ? percent : short;
  const [from, to] = [Number(params["from"]), Number(params["to"])];
  if (lines.every((line) => line.values.every((value) => value === null))) return null;
  return (
    <figure className="card curve">
      <figcaption>
        <span className="title" title={curve.name}>{curve.title}</span>
        <span className="muted small">{curve.unit}</span>
      </figcaption>
      <Chart x={x} lines={lines} group="compare" formatX={whole} formatY={format} tickY={curve.ratio ? percentTick : tick} nameX="step" range={params["from"] && from < to ? [from, to] : undefined} onRange={(low, high) => setParams({ from: low?.toFixed(1), to: high?.toFixed(1) })} label={`${curve.title} of ${runs.map((run) => `${run.name}, last ${format(run.steps.at(-1)?.[curve.name])}`).join("; ")}`} />
    </figure>
  );
}

/** All jobs over the same steps; each is thinned by itself, so that its spikes stay. */
function aligned(name: string, runs: readonly Run[]): { x: number[]; lines: Line[] } {
  const points = runs.map((run) => {
    const few = thinned(run.steps.map((step) => step["step"] ?? 0), run.steps.map((step) => step[name] ?? null), MOST_POINTS);
    return new Map(few.x.map((step, at) => [step, few.y[at] ?? null]));
  });
  const x = [...new Set(points.flatMap((one) => [...one.keys()]))].sort((a, b) => a - b);
  const lines = runs.map((run, at): Line => ({ label: run.name, values: bridged(x, points[at] ?? new Map()), colour: run.colour, dashed: run.dashed }));
  return { x, lines };
}

/** Where only another job has a point, this one's line goes straight on; beyond its ends it has nothing. */
function bridged(x: readonly number[], known: ReadonlyMap<number, number | null>): (number | null)[] {
  const out: (number | null)[] = x.map((step) => known.get(step) ?? null);
  let before = -1;
  for (let at = 0; at < x.length; at++) {
    if (!known.has(x[at] ?? NaN)) continue;
    const [from, to] = [out[before] ?? null, out[at] ?? null];
    if (before >= 0 && from !== null && to !== null) {
      for (let gap = before + 1; gap < at; gap++) out[gap] = from + ((to - from) * ((x[gap] ?? 0) - (x[before] ?? 0))) / ((x[at] ?? 1) - (x[before] ?? 0));
    }
    before = at;
  }
  return out;
}
