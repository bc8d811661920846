import type { JobView, Json, Step } from "../../rest";

/** One job of a comparison, and how it is drawn. */
export interface Run {
  readonly name: string;
  readonly colour: string;
  readonly dashed: boolean;
  readonly dotted: boolean;
  readonly steps: readonly Step[];
  readonly view: JobView | undefined;
  readonly spec: Record<string, Json> | undefined;
}

/** As many as a chart can tell apart: seven colours, each solid, dashed and dotted. */
export const MOST_RUNS = 20;

const COLOURS = 7;

export function strokeOf(at: number): Pick<Run, "colour" | "dashed" | "dotted"> {
  const round = Math.floor(at / COLOURS);
  return { colour: `--c${(at % COLOURS) + 1}`, dashed: round === 1, dotted: round === 2 };
}

export function strokeClass(run: Pick<Run, "dashed" | "dotted">): string {
  return run.dashed ? "stroke dashed" : run.dotted ? "stroke dotted" : "stroke";
}
