/**
 * The curves that are shown without asking, in sections. The names, units and meanings are those of METRICS in
 * gyre/workloads/trainer/learning/metric_names.py; a test compares them.
 */
import type { Json } from "../../rest";

export interface Curve {
  readonly name: string;
  readonly title: string;
  readonly unit: string;
  /** The number of the same step that spreads around it, drawn as a band. */
  readonly spread?: string;
  /** A share from 0 to 1, written in percent. */
  readonly ratio?: boolean;
  /** What it is known to, in its unit, where that is more than rounding. */
  readonly known?: number;
}

/** Log-probs of float32 are known to some 1e-6 nat; a KL of k3 goes by the square of their difference, halved. */
const KNOWN_KL = 5e-13;

export interface Section {
  readonly title: string;
  readonly curves: readonly Curve[];
}

export const SECTIONS: readonly Section[] = [
  {
    title: "Does it learn",
    curves: [
      { name: "reward_mean", title: "Reward", unit: "mean ± std", spread: "reward_std" },
      { name: "completion_tokens_mean", title: "Length of answers", unit: "tokens" },
      { name: "cut_off_ratio", title: "Cut off", unit: "share of answers", ratio: true },
      { name: "flat_groups_ratio", title: "Flat groups", unit: "share of groups", ratio: true },
    ],
  },
  {
    title: "What its sessions do",
    curves: [
      { name: "turns_mean", title: "Turns", unit: "by rollout" },
      { name: "rollouts_truncated_ratio", title: "Cut off at a limit", unit: "share of rollouts", ratio: true },
      { name: "rollouts_policy_fault_ratio", title: "Faults of the policy", unit: "share of rollouts", ratio: true },
      { name: "tool_seconds_mean", title: "Between turns", unit: "s by rollout" },
      { name: "engine_seconds_mean", title: "In turns", unit: "s by rollout" },
      { name: "tokens_not_drawn", title: "Put there by agents", unit: "tokens" },
    ],
  },
  {
    title: "Is the policy well",
    curves: [
      { name: "entropy", title: "Entropy", unit: "nat per token" },
      { name: "kl", title: "KL to the reference", unit: "nat per token", known: KNOWN_KL },
      { name: "old_kl", title: "KL to the old policy", unit: "nat per token", known: KNOWN_KL },
      { name: "rollout_kl", title: "KL to the engine", unit: "nat per token", known: KNOWN_KL },
      { name: "grad_norm", title: "Gradient's norm", unit: "before the clip" },
      { name: "loss", title: "Loss", unit: "" },
      { name: "clipped", title: "Clipped", unit: "share of tokens", ratio: true },
      { name: "lr", title: "Learning rate", unit: "" },
    ],
  },
  {
    title: "Is it fast",
    curves: [
      { name: "tokens_per_s", title: "Speed", unit: "tokens/s" },
      { name: "tokens_per_s_per_gpu", title: "Speed by GPU", unit: "tokens/s" },
      { name: "mfu", title: "MFU", unit: "share of the learner's peak", ratio: true },
      { name: "cost_per_million_tokens", title: "Cost", unit: "by million tokens" },
      { name: "seconds", title: "Time of a step", unit: "s" },
      { name: "staleness_mean", title: "Staleness, mean", unit: "versions" },
      { name: "staleness_max", title: "Staleness, greatest", unit: "versions" },
    ],
  },
];

const CHOSEN = new Set(SECTIONS.flatMap((section) => section.curves.flatMap((curve) => [curve.name, curve.spread ?? curve.name])));

/** What says where a step is, and is no curve. */
const PLACES = new Set(["step", "at", "version"]);

/** What a number begins with that the reward function returned beside the reward. */
const COMPONENT = "reward.";

/** What the reward functions returned, by name: each a mean over the samples that have it; a score with its weight. */
export function componentsOf(names: Iterable<string>, weights: ReadonlyMap<string, number>): Curve[] {
  const found = [...names].filter((name) => name.startsWith(COMPONENT)).sort();
  return found.map((name) => {
    const title = name.slice(COMPONENT.length);
    const weight = weights.get(title);
    return { name, title, unit: name.endsWith(".count") ? "samples that have it" : weight === undefined ? "mean" : `mean, weight ${weight}` };
  });
}

/** The weights of `config.reward.functions` in a job's spec, by the name that each score has in the steps. */
export function weightsOf(spec: Json | undefined): ReadonlyMap<string, number> {
  const found = new Map<string, number>();
  const functions = at(at(at(spec, "config"), "reward"), "functions");
  for (const one of Array.isArray(functions) ? functions : []) {
    const own = String(at(one, "function") ?? "").split(":").at(-1) ?? "";
    const weight = at(one, "weight") ?? 1;
    if (typeof weight === "number") found.set(String(at(one, "name") || own.replace(/[^A-Za-z0-9_-]/g, "_").slice(0, 32)), weight);
  }
  return found;
}

function at(of: Json | undefined, key: string): Json | undefined {
  return typeof of === "object" && of !== null && !Array.isArray(of) ? of[key] : undefined;
}

/** The other numbers that the steps have, by name. */
export function restOf(names: Iterable<string>): string[] {
  return [...names].filter((name) => !CHOSEN.has(name) && !PLACES.has(name) && !name.startsWith(COMPONENT)).sort();
}
