/** What a job is called in an address: its name, or its id where several have the name. Pure. */
import type { Run } from "../rest";

export function jobKeys<T extends Pick<Run, "name" | "job_id">>(jobs: readonly T[]): Map<T, string> {
  const names = new Map<string, number>();
  for (const job of jobs) names.set(job.name, (names.get(job.name) ?? 0) + 1);
  return new Map(jobs.map((job) => [job, (names.get(job.name) ?? 0) > 1 ? job.job_id : job.name]));
}
