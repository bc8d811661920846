/**
 * What groups of runs come to: of each number the mean of its members, and how far they spread. The words are the
 * server's; a click on a heading sorts groups and runs alike.
 */
import { RUNS } from "../../facts";
import { whole } from "../../format";
import type { RunGroup } from "../../rest";
import { hrefOf } from "../../route";
import { MOST_RUNS } from "../compare/runs";
import { Heading } from "./Heading";

/** Beside each other, the newest evaluation says of what it is the last. */
const NUMBERS: readonly [string, string][] = Object.entries(RUNS).flatMap(([name, one]) => (one.mean ? [[name, name === "held_out_last" ? "Last held-out" : one.title]] : []));

/** Names of members in a line; the others are counted. */
const NAMED = 4;

interface Props {
  readonly groups: readonly RunGroup[];
  readonly by: string;
  readonly sort: string;
  /** What each job is called in an address, by its id. */
  readonly keys: ReadonlyMap<string, string>;
}

export function GroupsTable({ groups, by, sort, keys }: Props) {
  const shown = NUMBERS.filter(([name]) => groups.some((group) => group.words[name]));
  const fails = groups.some((group) => group.failed > 0);
  const told = (group: RunGroup): string => (group.settings !== group.title ? group.settings : "");
  const settings = groups.some(told);
  return (
    <div className="wide groups" tabIndex={0} role="region" aria-label="Groups">
      <table>
        <thead>
          <tr>
            <th scope="col">{by}</th>
            <th scope="col" className="number">Runs</th>
            {fails && <th scope="col" className="number">Failed</th>}
            {settings && <th scope="col">Differs in</th>}
            {shown.map(([name, title]) => <Heading key={name} name={name} title={title} sort={sort} number />)}
            <th scope="col"><span className="visually-hidden">Compare</span></th>
          </tr>
        </thead>
        <tbody>
          {groups.map((group) => (
            <tr key={group.key} className="group">
              <th scope="row" title={members(group)}>{group.title || "none"}</th>
              <td className="number">{whole(group.jobs.length)}</td>
              {fails && <td className="number">{group.failed > 0 ? whole(group.failed) : ""}</td>}
              {settings && <td className="muted">{told(group)}</td>}
              {shown.map(([name]) => <td className="number" key={name}>{group.words[name] ?? "–"}</td>)}
              <td>{group.jobs.length > 1 && group.jobs.length <= MOST_RUNS && <a href={compareHref(group.jobs.map((id) => keys.get(id) ?? id))}>Compare</a>}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function compareHref([first = "", ...others]: readonly string[]): string {
  return hrefOf(first, "compare", { with: others.join(",") });
}

function members(group: RunGroup): string {
  const names = [...new Set(group.names)];
  return names.length > NAMED ? `${names.slice(0, NAMED).join(", ")} and ${names.length - NAMED} more` : names.join(", ");
}
