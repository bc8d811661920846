/** A step on one line, as in the trainer's log. Pure. */
import { percent, plusMinus, short, whole } from "../../format";
import type { Step } from "../../rest";

export function stepLine(step: Step): string {
  const has = (name: string): boolean => typeof step[name] === "number";
  const parts = [`step ${whole(step["step"])}`];
  const add = (name: string, text: string): void => {
    if (has(name)) parts.push(text);
  };
  add("reward_mean", `reward ${plusMinus(step["reward_mean"] ?? 0, step["reward_std"])}`);
  add("loss", `loss ${short(step["loss"])}`);
  const kl = ["kl", "rollout_kl", "old_kl"].find(has);
  if (kl) parts.push(`${kl} ${short(step[kl])}`);
  add("entropy", `entropy ${short(step["entropy"])}`);
  add("grad_norm", `grad ${short(step["grad_norm"])}`);
  add("completion_tokens_mean", `answer ${short(step["completion_tokens_mean"])} tok${has("cut_off_ratio") ? ` (cut ${percent(step["cut_off_ratio"])})` : ""}`);
  add("flat_groups", `flat ${whole(step["flat_groups"])}/${whole(step["groups"])}`);
  add("staleness_max", `stale ${whole(step["staleness_max"])}`);
  add("tokens_per_s", `${short(step["tokens_per_s"])} tok/s`);
  return parts.join("  ");
}
