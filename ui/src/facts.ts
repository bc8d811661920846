/**
 * What the page calls numbers. `python -m tools.rest_types` writes this file; its sources are METRICS in
 * gyre/workloads/trainer/learning/metric_names.py, Evaluation in gyre/failover/evaluation.py and COLUMNS in
 * gyre/api/runs/columns.py.
 */

/** `caption` is beside the title: the unit, or of what it is; a `share` is from 0 to 1, and written in percent. */
export interface Fact {
  readonly title: string;
  readonly caption: string;
  readonly share: boolean;
}

export interface RunFact {
  readonly title: string;
  readonly mean: boolean;
}

/** The metrics of a step of which there is more to say than their names. */
export const METRICS: Readonly<Record<string, Fact>> = {
  at: { title: "at", caption: "s", share: false },
  reward_mean: { title: "Reward", caption: "mean ± std", share: false },
  loss: { title: "Loss", caption: "", share: false },
  kl: { title: "KL to the reference", caption: "nat per token", share: false },
  old_kl: { title: "KL to the old policy", caption: "nat per token", share: false },
  rollout_kl: { title: "KL to the engine", caption: "nat per token", share: false },
  entropy: { title: "Entropy", caption: "nat per token", share: false },
  clipped: { title: "Clipped", caption: "share of tokens", share: true },
  tis_capped: { title: "tis_capped", caption: "share of tokens", share: true },
  grad_norm: { title: "Gradient's norm", caption: "before the clip", share: false },
  lr: { title: "Learning rate", caption: "", share: false },
  prompt_tokens_mean: { title: "prompt_tokens_mean", caption: "tokens", share: false },
  completion_tokens_mean: { title: "Length of answers", caption: "tokens", share: false },
  completion_tokens_max: { title: "completion_tokens_max", caption: "tokens", share: false },
  cut_off_ratio: { title: "Cut off", caption: "share of answers", share: true },
  flat_groups_ratio: { title: "Flat groups", caption: "share of groups", share: true },
  turns_mean: { title: "Turns of a rollout", caption: "", share: false },
  turns_max: { title: "Turns of a rollout, most", caption: "", share: false },
  rollouts_scored_ratio: { title: "Rollouts that were scored", caption: "share of rollouts", share: true },
  rollouts_truncated_ratio: { title: "Rollouts that were cut off", caption: "share of rollouts", share: true },
  rollouts_policy_fault_ratio: { title: "Rollouts with a fault of the policy", caption: "share of rollouts", share: true },
  tokens_not_drawn: { title: "Tokens that were not drawn", caption: "", share: false },
  tool_seconds_mean: { title: "Time of agents and tools, mean", caption: "s", share: false },
  tool_seconds_max: { title: "Time of agents and tools, longest", caption: "s", share: false },
  engine_seconds_mean: { title: "Time of engines, mean", caption: "s", share: false },
  turn_1_tokens_mean: { title: "Tokens of the first turn", caption: "tokens", share: false },
  turn_2_tokens_mean: { title: "Tokens of the second turn", caption: "tokens", share: false },
  turn_3_tokens_mean: { title: "Tokens of the third turn", caption: "tokens", share: false },
  turn_4_tokens_mean: { title: "Tokens of the fourth turn", caption: "tokens", share: false },
  later_turns_tokens_mean: { title: "Tokens of later turns", caption: "tokens", share: false },
  staleness_mean: { title: "Staleness, mean", caption: "versions", share: false },
  staleness_max: { title: "Staleness, greatest", caption: "versions", share: false },
  seconds: { title: "Time of a step", caption: "s", share: false },
  tokens_per_s: { title: "Speed", caption: "tokens/s", share: false },
  tokens_per_s_per_gpu: { title: "Speed by GPU", caption: "tokens/s", share: false },
  peak_flops: { title: "peak_flops", caption: "1/s", share: false },
  mfu: { title: "MFU", caption: "share of the learner's peak", share: true },
  cost_per_million_tokens: { title: "Cost", caption: "by million tokens", share: false },
};

/** The numbers of an evaluation that have a curve of their own. */
export const EVALUATED: Readonly<Record<string, Fact>> = {
};

/** The columns of the table of runs; groups have the mean of some. */
export const RUNS: Readonly<Record<string, RunFact>> = {
  name: { title: "Job", mean: false },
  id: { title: "ID", mean: false },
  phase: { title: "Phase", mean: false },
  reason: { title: "Why", mean: false },
  recipe: { title: "Recipe", mean: false },
  model: { title: "Model", mean: false },
  seed: { title: "Seed", mean: false },
  step: { title: "Steps", mean: true },
  version: { title: "Version", mean: false },
  reward: { title: "Reward", mean: true },
  held_out: { title: "Best held-out", mean: true },
  held_out_last: { title: "Last", mean: true },
  tokens_per_s: { title: "Tokens/s", mean: true },
  cost: { title: "Cost", mean: true },
  tags: { title: "Tags", mean: false },
  notes: { title: "Note", mean: false },
  started: { title: "Began", mean: false },
  took: { title: "Took", mean: true },
};
