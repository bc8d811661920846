/** Resources of the job that the page shows. */
import { jobPath } from "./api";
import { useLive } from "./live";
import { useResource, type Loaded } from "./resource";
import type { JobView } from "../rest";

/** `every`: of how many ticks one is enough; Infinity for what never changes. `rest` null asks for nothing. */
export function useJob<T>(rest: string | null, every = 1): Loaded<T> {
  const { job, tick } = useLive();
  return useResource<T>(rest === null ? null : jobPath(job, rest), tick, every);
}

/** The view of a job with this many vertices is heavy: it is asked for less often. */
export const LARGE = 1000;
export const TICKS_IF_LARGE = 10;

/** All there is to see of the job. Who shows a part that changes fast asks for that part. */
export function useJobView(): Loaded<JobView> {
  const { job, tick } = useLive();
  const known = useResource<JobView>(jobPath(job), null);
  const every = (known.data?.vertices.length ?? 0) > LARGE ? TICKS_IF_LARGE : 1;
  return useResource<JobView>(jobPath(job), tick, every);
}

/** A path with a query; empty and missing values are left out. */
export function withQuery(path: string, query: Record<string, string | number | boolean | null | undefined>): string {
  const out = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) if (value != null && value !== "") out.set(key, String(value));
  return out.size ? `${path}?${out}` : path;
}
