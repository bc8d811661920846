/** Samples by their rollouts: one of several turns may have several rows, which have one reward. Pure. */
import type { SampleItem } from "../../rest";

/** Of the samples of one group one a rollout: of several rows the last, with which it ended. */
export function rolloutsOf(members: readonly SampleItem[]): SampleItem[] {
  return [...new Map(members.map((one) => [one.rollout ?? one.sample, one])).values()];
}
