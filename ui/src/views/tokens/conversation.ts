/** The turns of a session's row, as the server tells its parts. Pure. */
import { duration, plural } from "../../format";
import type { ConversationPart, SampleTokens } from "../../rest";
import type { Joint } from "./scales";

/** Who put a part there, with what, and after how long. */
export function headOf(part: ConversationPart): string {
  const tokens = plural(part.end - part.start, "token");
  if (!part.drawn) return `Turn ${part.turn}, put there: ${tokens}${part.waited_s === null ? "" : `, ${duration(part.waited_s)} after the answer before`}`;
  const by = [part.versions.map((one) => `v${one}`).join(", "), part.instances.length > 0 ? `on ${part.instances.join(", ")}` : ""].filter(Boolean).join(" ");
  return `Turn ${part.turn}, drawn by ${by || "the policy"}: ${tokens}${part.trained ? "" : ", for an earlier row of the rollout"}`;
}

/** Where in the tokens a turn's parts begin; an older master tells of none. */
export function marksOf(sample: SampleTokens): Joint[] {
  return (sample.conversation ?? []).map((part) => ({ at: part.start, text: part.drawn ? `turn ${part.turn}` : `put there, turn ${part.turn}` }));
}
