/** The columns of the table of runs, by the names that the server filters and sorts by. */
import type { ReactNode } from "react";
import { duration, moment, percent, short, whole, words } from "../../format";
import { Badge, toneOfPhase } from "../../parts/Badge";
import { Sparkline } from "../../parts/Sparkline";
import type { Run } from "../../rest";

export interface RunColumn {
  readonly name: string;
  readonly title: string;
  /** In rem; the others share what is left. */
  readonly width: number;
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
  return `${best.set} ${value}${best.right_by ? ` by ${best.right_by}` : ""} v${best.version}`;
}

const outcome = (run: Run): string => run.message || words(run.reason);

/** The box to compare by, the name, what changes the tags, and the note are the table's own. */
export const COLUMNS: readonly RunColumn[] = [
  { name: "phase", title: "Phase", width: 7, cell: (run) => <Badge tone={toneOfPhase(run.phase)}>{words(run.phase)}</Badge> },
  { name: "step", title: "Steps", width: 6, number: true, cell: (run) => (run.steps ? `${whole(run.step)} of ${whole(run.steps)}` : whole(run.step)) },
  { name: "reward", title: "Reward", width: 5, number: true, cell: (run) => short(run.reward) },
  { name: "", title: "Curve", width: 6, there: (run) => run.rewards.length > 1, cell: (run) => run.rewards.length > 1 && <Sparkline values={run.rewards} label={`Reward of ${run.name} over its steps`} /> },
  { name: "held_out", title: "Best held-out", width: 11, there: (run) => run.held_out.length > 0, cell: heldOut, full: (run) => run.held_out.map((one) => heldOut({ ...run, held_out: [one] })).join(", ") },
  { name: "tags", title: "Tags", width: 11, cell: () => null, full: (run) => run.tags.join(", ") },
  { name: "model", title: "Model", width: 10, there: (run) => run.model !== "", cell: (run) => run.model, full: (run) => run.model },
  { name: "recipe", title: "Recipe", width: 6, there: (run) => run.recipe !== "", cell: (run) => run.recipe, full: (run) => run.recipe },
  { name: "tokens_per_s", title: "Tokens/s", width: 5.5, number: true, there: (run) => run.tokens_per_s !== null, cell: (run) => short(run.tokens_per_s) },
  { name: "cost", title: "Cost", width: 5, number: true, there: (run) => run.cost !== null, cell: (run) => short(run.cost) },
  { name: "seed", title: "Seed", width: 4, number: true, there: (run) => run.seed !== null, cell: (run) => whole(run.seed) },
  { name: "started", title: "Began", width: 9, cell: (run) => moment(run.submitted_at) },
  { name: "took", title: "Took", width: 6, cell: (run) => duration(Math.round((run.ended_at ?? Date.now() / 1000) - (run.ran_since ?? run.submitted_at))) },
  { name: "reason", title: "Why", width: 12, cell: outcome, full: outcome },
];
