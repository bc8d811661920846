import { useMemo } from "react";
import { smoothed, thinned, within } from "../../data/thinning";
import { percent, percentTick, short, tick } from "../../format";
import { Chart, type Line } from "../../parts/Chart";
import type { Step } from "../../rest";
import type { Axis } from "./axis";
import type { Curve } from "./chosen";
import { useSmoothing } from "./SmoothChoice";

/** More points than a card has pixels say nothing. */
const MOST_POINTS = 1200;

export function CurveCard({ curve, steps, axis }: { curve: Curve; steps: readonly Step[]; axis: Axis }) {
  const format = curve.ratio ? percent : short;
  const over = useSmoothing();
  const [low, high] = [axis.range?.[0] ?? -Infinity, axis.range?.[1] ?? Infinity];
  const { x, lines, band } = useMemo(() => {
    const [from, to] = within(axis.x, low, high);
    const [first, end] = [Math.max(0, from - 1), to + 1];
    const all = steps.map((step) => step[curve.name] ?? null);
    const values = all.slice(first, end);
    const places = axis.x.slice(first, end);
    if (over > 1) {
      const few = thinned(places, smoothed(all, over).slice(first, end), MOST_POINTS);
      const raw = thinned(places, values, MOST_POINTS);
      const there = new Map(raw.x.map((at, index) => [at, raw.y[index] ?? null]));
      const mean = new Map(few.x.map((at, index) => [at, few.y[index] ?? null]));
      const both = [...new Set([...few.x, ...raw.x])].sort((a, b) => a - b);
      const lines: Line[] = [{ label: "each step", values: both.map((at) => there.get(at) ?? null), colour: "--faint", bridged: true }, { label: "mean", values: both.map((at) => mean.get(at) ?? null), colour: "--c1", bridged: true }];
      return { x: both, lines, band: undefined };
    }
    const line = (y: readonly (number | null)[]): Line[] => [{ label: curve.title, values: y, colour: "--c1" }];
    if (!curve.spread || values.length > MOST_POINTS) {
      const few = thinned(places, values, MOST_POINTS);
      return { x: few.x, lines: line(few.y), band: undefined };
    }
    const spread = steps.slice(first, end).map((step) => step[curve.spread ?? ""] ?? null);
    const around = (sign: number): (number | null)[] => values.map((value, at) => (value === null ? null : value + sign * (spread[at] ?? 0)));
    return { x: places, lines: line(values), band: { low: around(-1), high: around(1), colour: "--c1" } };
  }, [steps, axis.x, low, high, curve, over]);
  const last = steps.at(-1)?.[curve.name];
  return (
    <figure className="card curve">
      <figcaption>
        <span className="title" title={curve.name}>{curve.title}</span>
        <span className="muted small">{curve.unit}</span>
        <span className="last">{format(last)}</span>
      </figcaption>
      <Chart x={x} lines={lines} band={band} legend={false} group="steps" formatX={axis.format} formatY={format} tickY={curve.ratio ? percentTick : tick} nameX={axis.name} time={axis.time} known={curve.known} range={axis.range} onRange={axis.onRange} label={`${curve.title}, ${steps.length} steps; the last is ${format(last)}`} />
    </figure>
  );
}
