/** What the jobs came to, side by side: what the table of runs has of each, and the mean reward of its newest steps. */
import { duration, short, whole, words } from "../../format";
import { Badge, toneOfPhase } from "../../parts/Badge";
import { hrefOf } from "../../route";
import { heldOut, lastHeldOut, tookOf } from "../jobs/columns";
import type { Run } from "./runs";

/** The newest steps whose mean stands for where a job is: one step says little. */
const LATE = 10;

export function Outcomes({ runs }: { runs: readonly Run[] }) {
  const costs = runs.some((run) => run.listed?.cost != null);
  return (
    <div className="wide" tabIndex={0} role="region" aria-label="Outcomes">
      <table>
        <thead>
          <tr>
            <th scope="col">Job</th>
            <th scope="col">Phase</th>
            {["Steps", `Reward, last ${LATE}`, "Best held-out", "Last held-out", "Tokens/s, median", ...(costs ? ["Cost"] : []), "Took", "Incidents"].map((title) => <th scope="col" className="number" key={title}>{title}</th>)}
          </tr>
        </thead>
        <tbody>
          {runs.map((run) => (
            <tr key={run.name}>
              <th scope="row"><a href={hrefOf(run.name, "now")}>{run.name}</a></th>
              <td>{run.view && <Badge tone={toneOfPhase(run.view.job.phase)}>{words(run.view.job.phase)}</Badge>}</td>
              <td className="number">{whole(run.steps.length)}</td>
              <td className="number">{short(mean(run.steps.slice(-LATE).map((step) => step["reward_mean"] ?? null)))}</td>
              <td className="number">{run.listed ? heldOut(run.listed) : "–"}</td>
              <td className="number">{run.listed ? lastHeldOut(run.listed) : "–"}</td>
              <td className="number">{short(run.listed?.tokens_per_s)}</td>
              {costs && <td className="number">{short(run.listed?.cost)}</td>}
              <td className="number">{run.listed ? duration(tookOf(run.listed)) : "–"}</td>
              <td className="number">{run.view ? whole(run.view.incidents.length) : "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function mean(values: readonly (number | null)[]): number | null {
  const there = values.filter((value): value is number => value !== null);
  return there.length > 0 ? there.reduce((sum, value) => sum + value, 0) / there.length : null;
}
