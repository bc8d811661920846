/** All jobs that this server knows. With one job only, its page opens by itself. */
import { useEffect, useState } from "react";
import { jobKeys } from "../../data/jobKeys";
import { useResource } from "../../data/resource";
import { duration, moment, plural, whole, words } from "../../format";
import { Badge, toneOfPhase } from "../../parts/Badge";
import { Refused } from "../../parts/Refused";
import type { Job, JobList } from "../../rest";
import { go, hrefOf, useRoute } from "../../route";

const REFRESH_MS = 10_000;
/** So many can be compared. */
const MOST = 4;

export function JobsView() {
  const [tick, setTick] = useState(0);
  const [chosen, setChosen] = useState<readonly string[]>([]);
  const [search, setSearch] = useState("");
  const { data, error } = useResource<JobList>("jobs", tick);
  const { params } = useRoute();
  useEffect(() => {
    document.title = "Jobs · Gyre";
    const timer = window.setInterval(() => !document.hidden && setTick((old) => old + 1), REFRESH_MS);
    return () => window.clearInterval(timer);
  }, []);
  const only = data?.jobs.length === 1 ? data.jobs[0] : undefined;
  const stays = params["all"] === "1";
  useEffect(() => {
    if (only && !stays) window.location.replace(hrefOf(only.name, "now"));
  }, [only, stays]);
  if (!data) return error ? <Refused error={error} /> : <p className="empty">Loading the jobs …</p>;
  const keys = jobKeys(data.jobs);
  const keyOf = (job: Job): string => keys.get(job) ?? job.name;
  const shown = data.jobs.filter((job) => `${job.name} ${job.phase} ${job.job_id}`.includes(search.trim()));
  const toggle = (key: string): void => setChosen((old) => (old.includes(key) ? old.filter((one) => one !== key) : [...old, key].slice(-MOST)));
  return (
    <>
      <div className="head">
        <h1>{plural(data.jobs.length, "job")}</h1>
        <label>Search <input type="search" value={search} onChange={(event) => setSearch(event.target.value)} /></label>
        <button type="button" disabled={chosen.length < 2} onClick={() => chosen[0] && go(hrefOf(chosen[0], "compare", { with: chosen.slice(1).join(",") }))}>
          Compare {chosen.length >= 2 ? chosen.length : "two to four"}
        </button>
      </div>
      {data.jobs.length === 0 && <p className="empty">There is no job in this store yet. <code>gyre run FILE</code> or <code>gyre demo</code> makes one.</p>}
      {shown.length > 0 && (
        <div className="wide" tabIndex={0} role="region" aria-label="Jobs">
          <table>
            <thead>
              <tr><th scope="col"><span className="visually-hidden">Compare</span></th><th scope="col">Job</th><th scope="col">Phase</th><th scope="col" className="number">Step</th><th scope="col">Began</th><th scope="col">Took</th><th scope="col">Why</th></tr>
            </thead>
            <tbody>
              {shown.map((job) => (
                <tr key={job.job_id}>
                  <td><input type="checkbox" aria-label={`Compare ${keyOf(job)}`} checked={chosen.includes(keyOf(job))} onChange={() => toggle(keyOf(job))} /></td>
                  <td><a href={hrefOf(keyOf(job), "now")}>{keyOf(job)}</a></td>
                  <td><Badge tone={toneOfPhase(job.phase)}>{words(job.phase)}</Badge></td>
                  <td className="number">{whole(job.step)}</td>
                  <td>{moment(job.submitted_at)}</td>
                  <td>{duration(Math.round((job.ended_at ?? Date.now() / 1000) - job.submitted_at))}</td>
                  <td className="muted">{job.message || words(job.reason)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </>
  );
}
