/** What the jobs came to, side by side. */
import { duration, percent, short, whole, words } from "../../format";
import { Badge, toneOfPhase } from "../../parts/Badge";
import { hrefOf } from "../../route";
import type { Run } from "./runs";

/** The newest steps whose mean stands for where a job is: one step says little. */
const LATE = 10;

export function Outcomes({ runs }: { runs: readonly Run[] }) {
  return (
    <div className="wide" tabIndex={0} role="region" aria-label="Outcomes">
      <table>
        <thead>
          <tr><th scope="col">Job</th><th scope="col">Phase</th><th scope="col" className="number">Steps</th><th scope="col" className="number">Reward, last {LATE}</th><th scope="col" className="number">Best accuracy</th><th scope="col" className="number">Tokens/s, median</th><th scope="col" className="number">Took</th><th scope="col" className="number">Incidents</th></tr>
        </thead>
        <tbody>
          {runs.map((run) => (
            <tr key={run.name}>
              <th scope="row"><a href={hrefOf(run.name, "now")}>{run.name}</a></th>
              <td>{run.view && <Badge tone={toneOfPhase(run.view.job.phase)}>{words(run.view.job.phase)}</Badge>}</td>
              <td className="number">{whole(run.steps.length)}</td>
              <td className="number">{short(mean(run.steps.slice(-LATE).map((step) => step["reward_mean"] ?? null)))}</td>
              <td className="number">{best(run)}</td>
              <td className="number">{short(median(run.steps.map((step) => step["tokens_per_s"] ?? null)))}</td>
              <td className="number">{run.view ? duration(Math.round((run.view.job.ended_at ?? Date.now() / 1000) - run.view.job.submitted_at)) : "–"}</td>
              <td className="number">{run.view ? whole(run.view.incidents.length) : "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function best(run: Run): string {
  const all = Object.values(run.view?.evaluations ?? {}).flat().filter((one) => one.accuracy !== null);
  const top = all.sort((a, b) => (b.accuracy ?? 0) - (a.accuracy ?? 0))[0];
  return top ? `${percent(top.accuracy)}${top.right_by ? ` by ${top.right_by}` : ""} at v${top.version}` : "–";
}

function mean(values: readonly (number | null)[]): number | null {
  const there = values.filter((value): value is number => value !== null);
  return there.length > 0 ? there.reduce((sum, value) => sum + value, 0) / there.length : null;
}

function median(values: readonly (number | null)[]): number | null {
  const there = values.filter((value): value is number => value !== null).sort((a, b) => a - b);
  return there[Math.floor(there.length / 2)] ?? null;
}
