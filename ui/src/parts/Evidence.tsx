/** What was seen, by name. Texts of several lines (stacks, last words of an engine) stand as they are. */
import { anything, words } from "../format";
import type { Json } from "../rest";

export function Evidence({ evidence, title = "Evidence" }: { evidence: Record<string, Json>; title?: string }) {
  const entries = Object.entries(evidence).filter(([, value]) => value !== null && value !== "");
  if (entries.length === 0) return null;
  const isLong = (value: Json): value is string => typeof value === "string" && (value.includes("\n") || value.length > 120);
  const short = entries.filter(([, value]) => !isLong(value));
  return (
    <div className="stack">
      <h3>{title}</h3>
      {short.length > 0 && (
        <table>
          <tbody>{short.map(([name, value]) => <tr key={name}><th scope="row">{words(name)}</th><td className="mono">{anything(value)}</td></tr>)}</tbody>
        </table>
      )}
      {entries.filter(([, value]) => isLong(value)).map(([name, value]) => (
        <figure key={name} className="evidence">
          <figcaption className="muted small">{words(name)}</figcaption>
          <pre tabIndex={0} aria-label={words(name)}>{String(value)}</pre>
        </figure>
      ))}
    </div>
  );
}
