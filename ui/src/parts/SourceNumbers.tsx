/** The numbers of one vertex, instance, or of the whole plane over time. */
import { useMemo } from "react";
import { useJob, withQuery } from "../data/job";
import { clock, duration, short, words } from "../format";
import type { SeriesSchema } from "../rest";
import { Chart, type Line } from "./Chart";
import { Refused } from "./Refused";
import "../views/curves/curves.css";

const POINTS = 300;
const TICKS = 5;

type Pairs = readonly [number, number | null][];

export function SourceNumbers({ source, title }: { source: string; title: string }) {
  const { data, error } = useJob<SeriesSchema>(withQuery("/series", { source, points: POINTS }), TICKS);
  if (!data) return error ? <Refused error={error} /> : <p className="empty">Loading the numbers of {title} …</p>;
  const numbers = Object.entries(data.series[source] ?? {}).filter(([, pairs]) => pairs.length > 1);
  return (
    <section aria-label={`Numbers of ${title}`}>
      <h3>{title} over time</h3>
      {numbers.length === 0 ? <p className="empty">Nothing is kept of it yet.</p> : (
        <>
          <div className="curves">{numbers.map(([name, pairs]) => <NumberCard key={name} name={name} pairs={pairs} />)}</div>
          <p className="muted small">A point for about every {duration(data.resolution_s)}.</p>
        </>
      )}
    </section>
  );
}

function NumberCard({ name, pairs }: { name: string; pairs: Pairs }) {
  const x = useMemo(() => pairs.map(([at]) => at), [pairs]);
  const lines = useMemo((): Line[] => [{ label: name, values: pairs.map(([, value]) => value), colour: "--c3" }], [name, pairs]);
  const last = short(pairs.at(-1)?.[1]);
  return (
    <figure className="card curve">
      <figcaption>
        <span className="title">{words(name)}</span>
        <span className="last">{last}</span>
      </figcaption>
      <Chart x={x} lines={lines} group="time" nameX="" time formatX={clock} formatY={short} height={120} label={`${words(name)} over time; the last is ${last}`} />
    </figure>
  );
}
