/** Resources of the job that the page shows. */
import { jobPath } from "./api";
import { useLive } from "./live";
import { useResource, type Loaded } from "./resource";

/** `every`: of how many ticks one is enough, for what is dear to compute. `rest` null asks for nothing. */
export function useJob<T>(rest: string | null, every = 1): Loaded<T> {
  const { job, tick } = useLive();
  return useResource<T>(rest === null ? null : jobPath(job, rest), Math.floor(tick / every));
}

/** A path with a query; empty and missing values are left out. */
export function withQuery(path: string, query: Record<string, string | number | boolean | null | undefined>): string {
  const out = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) if (value != null && value !== "") out.set(key, String(value));
  return out.size ? `${path}?${out}` : path;
}
