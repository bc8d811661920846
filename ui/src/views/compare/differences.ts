/** The keys of several configurations whose values are not the same in all. Pure. */
import type { Json } from "../../rest";

export interface Difference {
  readonly key: string;
  readonly values: readonly string[];
}

/** A job's name, and where it keeps its files, differ by nature. */
const BY_NATURE = new Set(["name", "job_id", "store.url"]);

export function differences(configs: readonly Record<string, Json>[]): Difference[] {
  const flat = configs.map((config) => new Map(leaves(config, "")));
  const keys = new Set(flat.flatMap((one) => [...one.keys()]));
  return [...keys]
    .filter((key) => !BY_NATURE.has(key))
    .map((key) => ({ key, values: flat.map((one) => one.get(key) ?? "–") }))
    .filter(({ values }) => new Set(values).size > 1)
    .sort((a, b) => a.key.localeCompare(b.key));
}

function leaves(value: Json, path: string): [string, string][] {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    return Object.entries(value).flatMap(([key, inner]) => leaves(inner, path ? `${path}.${key}` : key));
  }
  return [[path, typeof value === "string" ? value : JSON.stringify(value)]];
}
