/** Samples by their rollouts: one of several turns may have several rows, which have one reward. Pure. */
import type { SampleItem } from "../../rest";

/** Of the samples of one group one a rollout: of several rows the last, with which it ended. */
export function rolloutsOf(members: readonly SampleItem[]): SampleItem[] {
  return [...new Map(members.map((one) => [one.rollout ?? one.sample, one])).values()];
}

/** What follows one another in stretches of tokens, each change once: turns of one instance are stretches of their own. */
export function passedOn<T>(stretches: readonly (readonly [T, number, number])[]): T[] {
  return stretches.map(([what]) => what).filter((what, at, all) => at === 0 || what !== all[at - 1]);
}
