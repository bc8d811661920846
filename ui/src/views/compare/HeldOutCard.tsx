/** What the versions of several jobs earned on one held-out set: accuracy where one of them has it, or else the reward. */
import { useMemo } from "react";
import { percent, percentTick, short, tick, wholeTick } from "../../format";
import { Chart } from "../../parts/Chart";
import { heldOutLines } from "./heldOutLines";
import type { Run } from "./runs";

export function HeldOutCard({ set, runs }: { set: string; runs: readonly Run[] }) {
  const { unit, x, lines } = useMemo(() => heldOutLines(set, runs), [set, runs]);
  const format = unit === "accuracy" ? percent : short;
  return (
    <figure className="card curve">
      <figcaption>
        <span className="title">{set}</span>
        <span className="muted small">{unit}, by version</span>
      </figcaption>
      <Chart x={x} lines={lines} legend={false} group="compared-versions" formatX={wholeTick} formatY={format} tickY={unit === "accuracy" ? percentTick : tick} nameX="version" label={`${unit} on ${set} of ${lines.map((line) => `${line.label}, last ${format(line.values.findLast((value) => value !== null))}`).join("; ")}`} />
    </figure>
  );
}
