/** The runs that are compared: of each its steps, its view, its line in the table of runs, and how it is drawn. Pure. */
import type { JobView, Json, Run as Listed, Step } from "../../rest";

/** Dashed and dotted at once is a dash and a dot in turn. */
export interface Stroke {
  readonly colour: string;
  readonly dashed: boolean;
  readonly dotted: boolean;
}

export interface Run extends Stroke {
  readonly name: string;
  readonly steps: readonly Step[];
  readonly view: JobView | undefined;
  readonly spec: Record<string, Json> | undefined;
  readonly listed: Listed | undefined;
}

/** As many as a chart can tell apart. */
export const MOST_RUNS = 20;

const COLOURS = 7;
const STYLES = 4;

/**
 * How each run is drawn, no two alike. `experiments`: what is equal for runs that differ in their seed alone, which share
 * a colour; undefined where that is not known.
 */
export function strokesOf(experiments: readonly (string | undefined)[]): Stroke[] {
  const taken = Array.from({ length: COLOURS }, () => 0);
  const of = new Map<string, number>();
  return experiments.map((experiment) => {
    const known = experiment === undefined ? undefined : of.get(experiment);
    const colour = known !== undefined && (taken[known] ?? STYLES) < STYLES ? known : taken.indexOf(Math.min(...taken));
    if (experiment !== undefined) of.set(experiment, colour);
    const style = taken[colour] ?? 0;
    taken[colour] = style + 1;
    return { colour: `--c${colour + 1}`, dashed: style % 2 === 1, dotted: style >= 2 };
  });
}

export function strokeClass(run: Pick<Run, "dashed" | "dotted">): string {
  return run.dashed && run.dotted ? "stroke dash-dot" : run.dashed ? "stroke dashed" : run.dotted ? "stroke dotted" : "stroke";
}
