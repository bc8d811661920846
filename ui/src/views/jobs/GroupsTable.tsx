/** What groups of runs come to: of each number the mean of its members, and how far they spread. */
import { duration, percent, short, whole } from "../../format";
import type { RunGroup, Spread } from "../../rest";
import { hrefOf } from "../../route";
import { MOST_RUNS } from "../compare/runs";

const NUMBERS: readonly [string, string][] = [
  ["step", "Steps"],
  ["reward", "Reward"],
  ["held_out", "Best held-out"],
  ["tokens_per_s", "Tokens/s"],
  ["cost", "Cost"],
  ["took", "Took"],
];

/** Names of members in a line; the others are counted. */
const NAMED = 4;

export function GroupsTable({ groups, by }: { groups: readonly RunGroup[]; by: string }) {
  const shown = NUMBERS.filter(([name]) => groups.some((group) => group.values[name]));
  return (
    <div className="wide" tabIndex={0} role="region" aria-label="Groups">
      <table>
        <thead>
          <tr><th scope="col">{by}</th><th scope="col" className="number">Runs</th><th scope="col">Members</th>{shown.map(([name, title]) => <th scope="col" className="number" key={name}>{title}</th>)}<th scope="col"><span className="visually-hidden">Compare</span></th></tr>
        </thead>
        <tbody>
          {groups.map((group) => (
            <tr key={group.key} className="group">
              <th scope="row">{group.key || "none"}</th>
              <td className="number">{whole(group.jobs.length)}</td>
              <td className="muted">{members(group)}</td>
              {shown.map(([name]) => <td className="number" key={name}>{spread(name, group)}</td>)}
              <td>{group.jobs.length > 1 && group.jobs.length <= MOST_RUNS && <a href={hrefOf(group.jobs[0] ?? "", "compare", { with: group.jobs.slice(1).join(",") })}>Compare</a>}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function members(group: RunGroup): string {
  const names = [...new Set(group.names)];
  return names.length > NAMED ? `${names.slice(0, NAMED).join(", ")} and ${names.length - NAMED} more` : names.join(", ");
}

/** `0.71 ± 0.02`: mean and standard deviation; of how many members, where not all have it. */
function spread(name: string, group: RunGroup): string {
  const found: Spread | undefined = group.values[name];
  if (!found) return "–";
  const format = name === "took" ? (value: number) => duration(Math.round(value)) : name === "held_out" && group.held_out?.[1] === "accuracy" ? percent : short;
  const which = name === "held_out" && group.held_out ? `${group.held_out[0]} ` : "";
  const of = found.count < group.jobs.length ? ` of ${found.count}` : "";
  return `${which}${format(found.mean)}${found.std === null ? "" : ` ± ${format(found.std)}`}${of}`;
}
