/**
 * What a job is called in an address: its name, or its id where several have the name. Which names several have is told
 * of the whole list, so that a filter changes nothing. Pure.
 */
import type { JobList, Run } from "../rest";

type Listed = Pick<JobList, "jobs" | "shared_names">;

export function keyIn(list: Pick<JobList, "shared_names">): (job: Pick<Run, "name" | "job_id">) => string {
  const shared = new Set(list.shared_names);
  return (job) => (shared.has(job.name) ? job.job_id : job.name);
}

/** The job that an address means by its name or its id. */
export function jobIn(list: Listed | undefined, key: string): Run | undefined {
  return list?.jobs.find((one) => one.job_id === key) ?? list?.jobs.find((one) => one.name === key);
}
