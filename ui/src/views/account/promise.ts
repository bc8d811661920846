/** What the account says of the promise, beside how much there was to lose: nothing is not lost where there was nothing. Pure. */
import { short, whole } from "../../format";
import type { Account, Tone } from "../../rest";

export interface Kept {
  tone: Tone;
  words: string;
}

export function promiseOf({ prompts, tokens }: Pick<Account, "prompts" | "tokens">): Kept {
  const { drawn, lost, twice } = prompts;
  const [generated, missing] = [tokens.generated ?? 0, tokens.missing ?? 0];
  const tone = lost + twice + missing > 0 ? "bad" : drawn + generated > 0 ? "good" : "over";
  if (drawn + lost + twice > 0) return { tone, words: `${whole(lost)} lost, ${whole(twice)} twice` };
  if (generated + missing > 0) return { tone, words: `${whole(missing)} of ${short(generated)} tokens missing` };
  return { tone, words: "nothing drawn yet" };
}
