/** The evaluations of several jobs on one set, over the same versions. Pure. */
import type { Line } from "../../parts/Chart";
import type { Run } from "./runs";

export function heldOutLines(set: string, runs: readonly Run[]): { unit: "accuracy" | "reward"; x: number[]; lines: Line[] } {
  const of = runs.map((run) => run.view?.evaluations[set] ?? []);
  const unit = of.some((list) => list.some((one) => one.accuracy !== null)) ? "accuracy" : "reward";
  const values = of.map((list) => new Map(list.map((one) => [one.version, unit === "accuracy" ? one.accuracy : one.reward_mean])));
  const x = [...new Set(values.flatMap((one) => [...one.keys()]))].sort((a, b) => a - b);
  const lines = runs.flatMap((run, at): Line[] => {
    const own = values[at];
    if (!own || own.size === 0) return [];
    return [{ label: run.name, values: x.map((version) => own.get(version) ?? null), colour: run.colour, dashed: run.dashed, dotted: run.dotted, bridged: true, points: true }];
  });
  return { unit, x, lines };
}
