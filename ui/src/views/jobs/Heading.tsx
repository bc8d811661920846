/** A heading by which its table is sorted. */
import { setParams } from "../../route";

/** Numbers and times are wanted from the greatest down first, words from A on; a third click is the newest first. */
export function Heading({ name, title, sort, number }: { name: string; title: string; sort: string; number?: boolean | undefined }) {
  if (!name) return <th scope="col">{title}</th>;
  const down = `-${name}`;
  const orders = number || name === "started" || name === "took" || name.startsWith("held_out") ? [down, name] : [name, down];
  const at = orders.indexOf(sort);
  const next = orders[at + 1] ?? null;
  return (
    <th scope="col" className={number ? "number" : undefined} aria-sort={sort === name ? "ascending" : sort === down ? "descending" : undefined}>
      <button type="button" className="plain heading" onClick={() => setParams({ sort: next })}>{title}<span aria-hidden="true">{sort === name ? " ▲" : sort === down ? " ▼" : ""}</span></button>
    </th>
  );
}
