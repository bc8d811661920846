/** What was sampled: filters, rewards, a list of any length, and the chosen group's members side by side. */
import { useJob } from "../../data/job";
import { useLive } from "../../data/live";
import { bytes, plural, short, whole, words } from "../../format";
import { Refused } from "../../parts/Refused";
import { VirtualList } from "../../parts/VirtualList";
import { useRootSize } from "../../parts/rootSize";
import type { HeldOutSets, SampleItem, SampleSteps } from "../../rest";
import { go, hrefOf, setParams, useRoute } from "../../route";
import { filtersOf } from "./filters";
import { GroupMembers } from "./GroupMembers";
import { HeldOut } from "./HeldOut";
import { useSampleList } from "./pages";
import { passedOn } from "./rollouts";
import { RewardHistogram } from "./RewardHistogram";
import { SampleFilters } from "./SampleFilters";
import "./samples.css";

/** New samples come with every step; a list that the reader reads should not jump so often. */
const TICKS = 10;

export default function SamplesView() {
  const { params } = useRoute();
  return params["held"] ? <HeldOut set={params["held"]} /> : <Trained />;
}

function Trained() {
  const { job, tick, running } = useLive();
  const { params } = useRoute();
  const filters = filtersOf(params);
  const { data: held } = useJob<HeldOutSets>("/held-out", TICKS);
  const { data: steps, error } = useJob<SampleSteps>("/samples/steps", TICKS);
  const list = useSampleList(job, filters, running && !params["at"] ? Math.floor(tick / TICKS) : 0);
  const lineHeight = 2 * useRootSize();
  const chosen = params["at"] ? Number(params["at"]) : null;
  const item = chosen === null ? undefined : list.at(chosen);
  const open = (at: number): void => {
    const one = list.at(at);
    if (one) go(tokensHref(job, one));
  };
  const heldOut = held?.sets[0] && <a href={hrefOf(job, "samples", { held: held.sets[0].set })}>Held-out answers</a>;
  if (error && !steps) return <><h1>Samples</h1><Refused error={error} /></>;
  if (steps && steps.steps.length === 0 && steps.quarantined === 0) {
    return <><div className="head"><h1>Samples</h1>{heldOut}</div><p className="empty">No samples are kept yet. They come with the first step, if <code>observe.samples</code> of the job lets them.</p></>;
  }
  const kept = steps?.steps.reduce((sum, one) => sum + one.bytes, 0);
  return (
    <>
      <div className="head">
        <h1>Samples</h1>
        {steps && <span className="muted">{plural(steps.steps.length, "step")} kept, {bytes(kept)}; {whole(steps.quarantined)} quarantined</span>}
        {heldOut}
      </div>
      <SampleFilters filters={filters} steps={steps} />
      {list.error && <Refused error={list.error} />}
      {list.histogram && <RewardHistogram histogram={list.histogram} reward={filters.reward} />}
      <p className="muted small" role="status">{list.total === null ? "Looking …" : `${plural(list.total, "sample")}. Arrows choose one, Enter opens its tokens.`}</p>
      <div className={item ? "samples both" : "samples"}>
        <VirtualList className="sample-list" count={list.total ?? 0} lineHeight={lineHeight} label="Samples" chosen={chosen} onChoose={(at) => setParams({ at })} onOpen={open} onSight={list.onSight} line={(at) => <Line item={list.at(at)} />} />
        {item && <GroupMembers job={job} item={item} />}
      </div>
    </>
  );
}

export function tokensHref(job: string, item: SampleItem): string {
  return hrefOf(job, "tokens", { step: item.step, group: item.group, sample: item.sample });
}

/** Of a prompt, for a line of the list: templates and examples make prompts long. */
const PROMPT_CHARS = 200;

function beginningOf(prompt: string | null): string {
  return (prompt ?? "").slice(0, PROMPT_CHARS).replace(/\s+/g, " ").trim();
}

function Line({ item }: { item: SampleItem | undefined }) {
  if (!item) return <span className="muted">…</span>;
  const by = passedOn(item.instances);
  return (
    <>
      <span className="reward">{short(item.reward)}</span>
      <span className="where mono">{item.step}/{item.group}/{item.sample}</span>
      <span className="length">{whole(item.tokens)} tok</span>
      <span className="outcome">{words(item.outcome)}{item.finish_reason === "length" ? ", cut off" : ""}</span>
      <span className="by">{by.length > 1 ? `${by[0]} +${by.length - 1}` : by[0]}</span>
      <span className="of muted" title={item.prompt ?? undefined}>{beginningOf(item.prompt)}</span>
      <span className="answer">{item.answer ?? "(no text)"}</span>
      {item.right_answer != null && <span className="right muted" title={`Right answer: ${item.right_answer}`}>right answer: {item.right_answer}</span>}
    </>
  );
}
