/** How the rewards are spread. A click on a bin lets only its samples through; a second one lets all through again. */
import { short, whole } from "../../format";
import type { SamplePage } from "../../rest";
import { setParams } from "../../route";
import { binCondition } from "./filters";

export function RewardHistogram({ histogram, reward }: { histogram: SamplePage["histogram"]; reward: string }) {
  const { edges, counts } = histogram;
  const most = Math.max(1, ...counts);
  if (counts.length === 0) return <p className="empty">No sample here has a reward.</p>;
  return (
    <div className="histogram" role="group" aria-label="Rewards; a bin filters">
      {counts.map((count, at) => {
        const condition = binCondition(edges, at);
        const what = `${short(edges[at])} to ${short(edges[at + 1])}: ${whole(count)}`;
        return (
          <button key={at} type="button" className="bin" aria-pressed={reward === condition} title={what} aria-label={`Reward ${what} samples`} onClick={() => setParams({ reward: reward === condition ? null : condition, at: null })}>
            <span className="bar" style={{ height: `${count === 0 ? 0 : Math.max(3, (count / most) * 100)}%` }} />
          </button>
        );
      })}
      <span className="edge small muted">{short(edges[0])}</span>
      <span className="edge end small muted">{short(edges.at(-1))}</span>
    </div>
  );
}
