/** What the reader asks of the samples: kept in the address, sent to the server as it is. Pure. */
import { withQuery } from "../../data/job";
import type { Params } from "../../route";

export interface Filters {
  readonly step: string;
  readonly group: string;
  readonly outcome: string;
  readonly instance: string;
  readonly version: string;
  /** Conditions, all of which hold: `>=0.2,<0.4`. */
  readonly reward: string;
  readonly tokens: string;
  readonly quarantined: string;
  readonly order: string;
}

const KEYS: readonly (keyof Filters)[] = ["step", "group", "outcome", "instance", "version", "reward", "tokens", "quarantined", "order"];

export const NO_FILTERS: Params = Object.fromEntries(KEYS.map((key) => [key, null]));

export function filtersOf(params: Readonly<Record<string, string>>): Filters {
  const read = Object.fromEntries(KEYS.map((key) => [key, params[key] ?? ""])) as Record<keyof Filters, string>;
  return { ...read, order: read.order || "step" };
}

export function pathOf(filters: Filters, limit: number, offset: number): string {
  return withQuery("/samples", { ...filters, limit, offset });
}

/** How many filters are set, the order not counted. */
export function countOf(filters: Filters): number {
  return KEYS.filter((key) => key !== "order" && filters[key] !== "").length;
}

/** The condition of a bin of the histogram; the last bin includes its end. */
export function binCondition(edges: readonly number[], at: number): string {
  const [low, high] = [edges[at] ?? 0, edges[at + 1] ?? 0];
  return `>=${low},${at === edges.length - 2 ? "<=" : "<"}${high}`;
}
