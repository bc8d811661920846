/** What the policy's versions earned on a held-out set: accuracy where that has a meaning, and the reward. */
import { useMemo } from "react";
import { percent, plural, short } from "../../format";
import { Chart, type Line } from "../../parts/Chart";
import type { Evaluation } from "../../rest";

const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];

export function EvaluationCard({ set, list }: { set: string; list: readonly Evaluation[] }) {
  const x = useMemo(() => list.map((one) => one.version), [list]);
  const lines = useMemo(() => linesOf(list), [list]);
  const last = list.at(-1);
  const value = last?.accuracy ?? last?.reward_mean;
  const format = last?.accuracy == null ? short : percent;
  return (
    <figure className="card curve">
      <figcaption>
        <span className="title">{set}</span>
        <span className="muted small">by version; {plural(last?.prompts ?? 0, "prompt")}</span>
        <span className="last">{format(value)}</span>
      </figcaption>
      <Chart x={x} lines={lines} group="versions" formatX={(version) => (Number.isInteger(version) ? `${version}` : "")} formatY={short} nameX="version" label={`Evaluations on ${set}: ${list.length}; version ${last?.version} has ${format(value)}`} />
    </figure>
  );
}

function linesOf(list: readonly Evaluation[]): Line[] {
  const measures: [string, (one: Evaluation) => number | null][] = [["accuracy", (one) => one.accuracy], ["reward", (one) => one.reward_mean]];
  const ks = Object.keys(list.at(-1)?.pass_at ?? {}).filter((k) => k !== "1").slice(0, 3);
  for (const k of ks) measures.push([`pass@${k}`, (one) => one.pass_at[k] ?? null]);
  return measures
    .map(([label, read], at): Line => ({ label, values: list.map(read), colour: COLOURS[at] ?? "--c7", points: true, dashed: label === "reward" }))
    .filter((line) => line.values.some((value) => value !== null));
}
