/** The columns of the table of runs, by the names that the server filters and sorts by. */
import type { ReactNode } from "react";
import { RUNS } from "../../facts";
import { duration, moment, percent, short, whole, words } from "../../format";
import { Badge, toneOfPhase } from "../../parts/Badge";
import { Sparkline } from "../../parts/Sparkline";
import type { Run } from "../../rest";

export interface RunColumn {
  readonly name: string;
  readonly title: string;
  /** In rem; the others share what is left. */
  readonly width: number;
  /** The same where no run has it, of a column that is there all the same. */
  readonly narrow?: number;
  readonly number?: boolean;
  /** Left out where no run has it. */
  readonly there?: (run: Run) => boolean;
  readonly cell: (run: Run) => ReactNode;
  /** What the cell says in full, where it may be cut. */
  readonly full?: (run: Run) => string;
}

export function heldOut(run: Run): string {
  const best = run.held_out[0];
  if (!best) return "–";
  const value = best.unit === "accuracy" ? percent(best.value) : `reward ${short(best.value)}`;
  const set = best.set === "held_out" ? "" : `${best.set} `; // a set without a name
  return `${set}${value}${best.right_by ? ` by ${best.right_by}` : ""} v${best.version}`;
}

const outcome = (run: Run): string => run.message || words(run.reason);

/** The newest evaluation of the same set, beside which luck of the best one is seen. */
export function lastHeldOut(run: Run): string {
  const one = run.held_out[0];
  if (!one || one.last == null) return "–";
  return `${one.unit === "accuracy" ? percent(one.last) : short(one.last)} v${one.last_version}`;
}

/**
 * What is looked at first comes first, so that a screen of 1440 pixels has it without scrolling, up to the tags. The box
 * to compare by, the name, and what changes the tags, are the table's own.
 */
const DRAWN: readonly (Omit<RunColumn, "title"> & { title?: string })[] = [
  { name: "phase", width: 7.25, cell: (run) => <Badge tone={toneOfPhase(run.phase)}>{words(run.phase)}</Badge> },
  { name: "step", width: 6.5, number: true, cell: (run) => (run.steps ? `${whole(run.step)} of ${whole(run.steps)}` : whole(run.step)) },
  { name: "reward", width: 4.5, number: true, cell: (run) => short(run.reward) },
  { name: "", title: "Curve", width: 3.5, there: (run) => run.rewards.length > 1, cell: (run) => run.rewards.length > 1 && <Sparkline values={run.rewards} label={`Reward of ${run.name} over its steps`} /> },
  { name: "held_out", width: 10, there: (run) => run.held_out.length > 0, cell: heldOut, full: (run) => run.held_out.map((one) => heldOut({ ...run, held_out: [one] })).join(", ") },
  { name: "held_out_last", width: 6.25, there: (run) => run.held_out.length > 0, cell: lastHeldOut, full: (run) => (run.held_out[0] ? `The newest evaluation of ${run.held_out[0].set}: ${lastHeldOut(run)}` : "") },
  { name: "cost", width: 4.5, number: true, there: (run) => run.cost !== null, cell: (run) => short(run.cost) },
  { name: "took", width: 5.25, cell: (run) => duration(tookOf(run)) },
  { name: "reason", width: 8.5, cell: outcome, full: outcome },
  { name: "notes", width: 8.5, there: (run) => run.notes !== "", cell: (run) => <span className="muted">{run.notes}</span>, full: (run) => run.notes },
  { name: "tags", width: 14, narrow: 3.5, cell: () => null, full: (run) => run.tags.join(", ") },
  { name: "tokens_per_s", width: 5, number: true, there: (run) => run.tokens_per_s !== null, cell: (run) => short(run.tokens_per_s) },
  { name: "model", width: 8, there: (run) => run.model !== "", cell: (run) => run.model, full: (run) => run.model },
  { name: "recipe", width: 5.5, there: (run) => run.recipe !== "", cell: (run) => run.recipe, full: (run) => run.recipe },
  { name: "seed", width: 3.5, number: true, there: (run) => run.seed !== null, cell: (run) => whole(run.seed) },
  { name: "started", width: 9, cell: (run) => moment(run.submitted_at) },
];

export const COLUMNS: readonly RunColumn[] = DRAWN.map((column) => ({ title: RUNS[column.name]?.title ?? column.name, ...column }));

export function widthOf(column: RunColumn, runs: readonly Run[]): number {
  return column.narrow !== undefined && !runs.some((run) => column.full?.(run)) ? column.narrow : column.width;
}

/** Seconds of its last run, as `ran_for` in gyre/observe/run_lines.py has it. */
export function tookOf(run: Pick<Run, "ended_at" | "ran_since" | "submitted_at">): number {
  const seconds = (run.ended_at ?? Date.now() / 1000) - (run.ran_since ?? run.submitted_at);
  return Math.max(0, seconds < 10 ? seconds : Math.round(seconds));
}
