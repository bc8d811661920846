/** Which version of the policy each instance serves, how it came there, and the versions that were published. */
import { useMemo } from "react";
import { useJob, useJobView } from "../../data/job";
import { bytes, clock, plural } from "../../format";
import { Badge } from "../../parts/Badge";
import { Refused } from "../../parts/Refused";
import type { EngineSchema, EngineList, EventSchema, EventPage } from "../../rest";

const EVENTS = 400;
const PUBLISHED = 40;
const INSTANCES = 500;

export default function WeightsView() {
  const { data: view } = useJobView();
  const { data: engines, error } = useJob<EngineList>("/engines", 2);
  const after = view ? Math.max(0, view.seq - EVENTS) : null;
  const { data: page } = useJob<EventPage>(after === null ? null : `/events?after=${after - (after % 100)}&limit=${EVENTS + 100}`, 5);
  const published = useMemo(() => publishedIn(page?.events ?? []), [page]);
  const newest = published[0]?.version ?? view?.job.version ?? -1;
  const served = useMemo(() => servedIn(engines?.engines ?? []), [engines]);
  return (
    <>
      <div className="head">
        <h1>Weights</h1>
        <span className="muted">published: version {newest < 0 ? "none yet" : newest}</span>
      </div>
      {error && !engines && <Refused error={error} />}
      {engines && engines.engines.length === 0 && <p className="empty">There is no rollout plane that serves weights, or it has not reported.</p>}
      {served.length > 0 && (
        <section aria-labelledby="served">
          <h2 id="served">Served</h2>
          <p className="row">{served.map(([version, count]) => <Badge key={version} tone={version === newest ? "good" : version < 0 ? "over" : "attention"}>{plural(count, "instance")} {version < 0 ? "have none" : `serve version ${version}`}</Badge>)}</p>
          <div className="wide" tabIndex={0} role="region" aria-label="Weights by instance">
            <table>
              <thead>
                <tr><th scope="col">Instance</th><th scope="col" className="number">Version</th><th scope="col" className="number">Behind</th><th scope="col">State</th><th scope="col">Loads</th><th scope="col">Travels</th><th scope="col">Why so</th></tr>
              </thead>
              <tbody>
                {engines?.engines.slice(0, INSTANCES).map((one) => (
                  <tr key={one.instance}>
                    <td>{one.instance}</td>
                    <td className="number">{one.version < 0 ? "–" : one.version}</td>
                    <td className="number">{one.version < 0 ? "–" : Math.max(0, newest - one.version)}</td>
                    <td>{one.state}</td>
                    <td>{one.loads || "–"}</td>
                    <td>{[one.transport, one.codec].filter(Boolean).join(", ") || "–"}</td>
                    <td className="muted">{[one.loads_why, one.transfer_why].filter(Boolean).join("; ")}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </section>
      )}
      <section aria-labelledby="published">
        <h2 id="published">Published of late</h2>
        {published.length === 0 ? <p className="empty">Nothing among the last events.</p> : (
          <div className="wide" tabIndex={0} role="region" aria-label="Versions published of late">
            <table>
              <thead>
                <tr><th scope="col" className="number">Version</th><th scope="col">At</th><th scope="col" className="number">Step</th><th scope="col" className="number">Bytes</th><th scope="col">Made from</th><th scope="col">Checksum</th></tr>
              </thead>
              <tbody>
                {published.slice(0, PUBLISHED).map((one) => (
                  <tr key={one.seq}>
                    <td className="number">{one.version}</td>
                    <td>{clock(one.at)}</td>
                    <td className="number">{one.step}</td>
                    <td className="number">{bytes(one.size)}</td>
                    <td>{one.base === null ? "itself" : `version ${one.base}`}</td>
                    <td className="mono">{one.checksum.slice(0, 16)}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        )}
      </section>
    </>
  );
}

interface Published {
  readonly seq: number;
  readonly at: number;
  readonly version: number;
  readonly step: number;
  readonly size: number;
  readonly base: number | null;
  readonly checksum: string;
}

/** Newest first. */
function publishedIn(events: readonly EventSchema[]): Published[] {
  return events
    .filter((event) => event.kind === "WeightsPublished")
    .map(({ seq, at, body }) => ({ seq, at, version: Number(body["version"]), step: Number(body["step"]), size: Number(body["size_bytes"]), base: typeof body["base"] === "number" ? body["base"] : null, checksum: String(body["checksum"] ?? "") }))
    .reverse();
}

/** By version, newest first, how many serve it. */
function servedIn(engines: readonly EngineSchema[]): [number, number][] {
  const counts = new Map<number, number>();
  for (const one of engines) counts.set(one.version, (counts.get(one.version) ?? 0) + 1);
  return [...counts].sort(([a], [b]) => b - a);
}
