/** What versions answered to the same held-out prompts: two of them side by side, and what changed comes first. */
import { useJob, useJobView, withQuery } from "../../data/job";
import { useLive } from "../../data/live";
import { plural, whole } from "../../format";
import { Refused } from "../../parts/Refused";
import type { HeldOutPage, HeldOutSets } from "../../rest";
import { hrefOf, setParams, useRoute } from "../../route";
import { againstOf } from "./against";
import { HeldOutPrompt } from "./HeldOutPrompt";

/** An evaluation comes each so many steps. */
const TICKS = 10;
/** Prompts that are asked for at first, and further ones with each press of the button. */
const PAGE = 50;
/** What the server gives at most. */
const MOST = 1000;

export function HeldOut({ set }: { set: string }) {
  const { job } = useLive();
  const { params } = useRoute();
  const { data: kept, error } = useJob<HeldOutSets>("/held-out", TICKS);
  const { data: view } = useJobView();
  const versions = kept?.sets.find((one) => one.set === set)?.versions ?? [];
  const version = among(versions, params["version"]) ?? versions.at(-1);
  const against = among(versions, params["against"]) ?? againstOf(versions, version, view?.evaluations[set] ?? []);
  const shown = Math.min(MOST, Number(params["shown"]) || PAGE);
  const { data: page, error: refused } = useJob<HeldOutPage>(version === undefined ? null : withQuery(`/held-out/${encodeURIComponent(set)}`, { version, against, limit: shown }), Infinity);
  const head = (
    <div className="head">
      <h1>Held-out answers</h1>
      <a href={hrefOf(job, "samples")}>Samples of the training</a>
    </div>
  );
  if (!kept) return <>{head}{error ? <Refused error={error} /> : <p className="empty">Loading …</p>}</>;
  if (version === undefined) return <>{head}<p className="empty">No answers to the held-out set {set} are kept. They come with its evaluations, if <code>observe.samples</code> of the job lets them.</p></>;
  return (
    <>
      {head}
      <form className="filters" aria-label="Which answers" onSubmit={(event) => event.preventDefault()}>
        <label>Set <select value={set} onChange={(event) => setParams({ held: event.target.value, version: null, against: null, shown: null })}>{kept.sets.map((one) => <option key={one.set}>{one.set}</option>)}</select></label>
        <Version label="Version" name="version" value={version} versions={versions} />
        {against !== undefined && <Version label="against" name="against" value={against} versions={versions} />}
      </form>
      {refused && !page && <Refused error={refused} />}
      {page && <p role="status">{summaryOf(page)}</p>}
      <ol className="held-out">{page?.prompts.map((one) => <HeldOutPrompt key={one.prompt_number} prompt={one} version={page.version} against={page.against} />)}</ol>
      {page && page.prompts.length < page.total && shown < MOST && <button type="button" onClick={() => setParams({ shown: shown + PAGE })}>{whole(page.total - page.prompts.length)} more</button>}
    </>
  );
}

function among(versions: readonly number[], asked: string | undefined): number | undefined {
  return versions.find((one) => String(one) === asked);
}

function summaryOf(page: HeldOutPage): string {
  if (page.against === null) return `${plural(page.total, "prompt")} of version ${page.version}. A second version to compare comes with the next evaluation.`;
  const unmatched = page.unmatched > 0 ? ` ${plural(page.unmatched, "prompt")} had no answer of version ${page.against}.` : "";
  if (page.changed === 0) return `Of ${plural(page.total, "prompt")} none is judged otherwise than of version ${page.against}.${unmatched}`;
  return `Of ${plural(page.total, "prompt")} ${whole(page.changed)} changed since version ${page.against}: ${whole(page.better)} better, ${whole(page.changed - page.better)} worse. They come first.${unmatched}`;
}

function Version({ label, name, value, versions }: { label: string; name: string; value: number; versions: readonly number[] }) {
  return <label>{label} <select value={value} onChange={(event) => setParams({ [name]: event.target.value })}>{versions.map((one) => <option key={one}>{one}</option>)}</select></label>;
}
