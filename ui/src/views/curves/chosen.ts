/** The curves that are shown without asking, in sections, and how each is drawn. */
import { METRICS } from "../../facts";
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

const DRAWN: Readonly<Record<string, Pick<Curve, "spread" | "known">>> = {
  reward_mean: { spread: "reward_std" },
  kl: { known: KNOWN_KL },
  old_kl: { known: KNOWN_KL },
  rollout_kl: { known: KNOWN_KL },
};

/** A metric's curve; a number that is none has its name alone. */
export function curveOf(name: string): Curve {
  const fact = METRICS[name];
  return { name, title: fact?.title ?? name, unit: fact?.caption ?? "", ratio: fact?.share ?? false, ...DRAWN[name] };
}

const NAMES = {
  "Does it learn": ["reward_mean", "completion_tokens_mean", "cut_off_ratio", "flat_groups_ratio"],
  "What its sessions do": ["turns_mean", "rollouts_truncated_ratio", "rollouts_policy_fault_ratio", "tool_seconds_mean", "engine_seconds_mean", "tokens_not_drawn"],
  "Is the policy well": ["entropy", "kl", "old_kl", "rollout_kl", "grad_norm", "loss", "clipped", "lr"],
  "Is it fast": ["tokens_per_s", "tokens_per_s_per_gpu", "mfu", "cost_per_million_tokens", "seconds", "staleness_mean", "staleness_max"],
};

export const SECTIONS: readonly Section[] = Object.entries(NAMES).map(([title, names]) => ({ title, curves: names.map(curveOf) }));

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
