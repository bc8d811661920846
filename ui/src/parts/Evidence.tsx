/** What was seen, by name. Texts of several lines (stacks, last words of an engine) stand as they are. */
import { anything, clock, moment, words } from "../format";
import type { Json } from "../rest";

export function Evidence({ evidence, title = "Evidence" }: { evidence: Record<string, Json>; title?: string }) {
  const entries = Object.entries(evidence).filter(([, value]) => value !== null && value !== "");
  if (entries.length === 0) return null;
  const texts = entries.map(([name, value]): [string, string] => [name, textOf(name, value)]);
  const short = texts.filter(([, text]) => !isLong(text));
  return (
    <div className="stack">
      <h3>{title}</h3>
      {short.length > 0 && (
        <table>
          <tbody>{short.map(([name, text]) => <tr key={name}><th scope="row">{words(name)}</th><td className="mono">{text}</td></tr>)}</tbody>
        </table>
      )}
      {texts.filter(([, text]) => isLong(text)).map(([name, text]) => (
        <figure key={name} className="evidence">
          <figcaption className="muted small">{words(name)}</figcaption>
          <pre tabIndex={0} aria-label={words(name)}>{text}</pre>
        </figure>
      ))}
    </div>
  );
}

const LONG = 120;
/** Seconds since 1970 are more than any other number under such a name. */
const A_MOMENT = 1e9;

function isLong(text: string): boolean {
  return text.includes("\n") || text.length > LONG;
}

/** What is nested stands in lines of its own where it is long. */
function textOf(name: string, value: Json): string {
  if (typeof value === "number" && value > A_MOMENT && /\b(at|since|until|time)$/.test(words(name))) return `${moment(value)}:${clock(value).slice(-2)}`;
  const line = anything(value);
  return value !== null && typeof value === "object" && line.length > LONG ? JSON.stringify(value, null, 2) : line;
}
