/** A row of a session in the order of its conversation: what was put there, and what the policy answered. */
import type { SampleTokens } from "../../rest";
import { headOf } from "./conversation";

export function Conversation({ sample, onChoose }: { sample: SampleTokens; onChoose: (at: number) => void }) {
  if (!sample.session) return null;
  return (
    <section aria-labelledby="conversation">
      <h2 id="conversation">Conversation</h2>
      <p>{sample.session.sentence}.</p>
      <ol className="conversation">
        {sample.conversation.map((part) => (
          <li key={part.start} className={part.drawn ? "drawn" : "put"}>
            <button type="button" className="small" onClick={() => onChoose(part.start)}>{headOf(part)}</button>
            <pre className="text" tabIndex={0} aria-label={headOf(part)}>{part.text ?? sample.token_ids.slice(part.start, part.end).join(" ")}</pre>
          </li>
        ))}
      </ol>
    </section>
  );
}
