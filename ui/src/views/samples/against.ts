/** With which version one is compared, where the reader has chosen none. Pure. */
import type { EvaluationSchema } from "../../rest";

/**
 * The best one, where this one is worse than it; else the one before, which shows what the last steps brought. Of the
 * first version the one after it. Only versions whose answers are kept are meant.
 */
export function againstOf(versions: readonly number[], version: number | undefined, evaluations: readonly Pick<EvaluationSchema, "version" | "accuracy" | "reward_mean">[]): number | undefined {
  if (version === undefined) return undefined;
  const kept = evaluations.filter((one) => versions.includes(one.version));
  const byAccuracy = kept.some((one) => one.accuracy !== null);
  const valueOf = (one: Pick<EvaluationSchema, "accuracy" | "reward_mean"> | undefined): number | null => (byAccuracy ? one?.accuracy : one?.reward_mean) ?? null;
  const own = valueOf(kept.find((one) => one.version === version));
  const best = kept.reduce<(typeof kept)[number] | undefined>((top, one) => ((valueOf(one) ?? -Infinity) > (valueOf(top) ?? -Infinity) ? one : top), undefined);
  if (own !== null && best && best.version < version && (valueOf(best) ?? own) > own) return best.version;
  const at = versions.indexOf(version);
  return versions[at - 1] ?? versions[at + 1];
}
