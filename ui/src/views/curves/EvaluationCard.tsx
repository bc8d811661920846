/**
 * What the policy's versions earned on a held-out set: accuracy where that has a meaning, and the reward; and each
 * number that the reward function returned beside it.
 */
import { useMemo } from "react";
import { EVALUATED } from "../../facts";
import { percent, plural, short, wholeTick } from "../../format";
import { Chart, type Line } from "../../parts/Chart";
import type { EvaluationSchema } from "../../rest";

const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];

export function EvaluationCard({ set, list }: { set: string; list: readonly EvaluationSchema[] }) {
  const x = useMemo(() => list.map((one) => one.version), [list]);
  const lines = useMemo(() => linesOf(list), [list]);
  const last = list.at(-1);
  const value = last?.accuracy ?? last?.reward_mean;
  const format = last?.accuracy == null ? short : percent;
  return <Card title={set} list={list} lines={lines} x={x} value={format(value)} />;
}

/** One number by itself: of the reward function, `name` as "reward.format", or of the evaluation. */
export function EvaluatedNumber({ set, name, list }: { set: string; name: string; list: readonly EvaluationSchema[] }) {
  const there = useMemo(() => list.filter((one) => valueOf(one, name) !== null), [list, name]);
  const x = useMemo(() => there.map((one) => one.version), [there]);
  const { title, caption, share } = EVALUATED[name] ?? { title: name, caption: "", share: false };
  const lines = useMemo((): Line[] => [{ label: title, values: there.map((one) => valueOf(one, name)), colour: "--c1", points: true }], [there, name, title]);
  const last = there.at(-1);
  return <Card title={`${set} ${title}`} caption={caption} list={there} lines={lines} x={x} value={(share ? percent : short)(last && valueOf(last, name))} />;
}

function valueOf(one: EvaluationSchema, name: string): number | null {
  const all: Record<string, unknown> = { ...one.components, ...one };
  const value = all[name];
  return typeof value === "number" ? value : null;
}

/** What has a curve of its own: numbers of the evaluations of a set, and of its reward function without those that count samples. */
export function numbersOf(list: readonly EvaluationSchema[]): string[] {
  const components = [...new Set(list.flatMap((one) => Object.keys(one.components ?? {})))].filter((name) => !name.endsWith(".count")).sort();
  return [...Object.keys(EVALUATED).filter((name) => list.some((one) => valueOf(one, name) !== null)), ...components];
}

function Card({ title, caption = "", list, lines, x, value }: { title: string; caption?: string; list: readonly EvaluationSchema[]; lines: Line[]; x: number[]; value: string }) {
  const last = list.at(-1);
  return (
    <figure className="card curve">
      <figcaption>
        <span className="title">{title}</span>
        <span className="muted small">{caption && `${caption}, `}by version; {plural(last?.prompts ?? 0, "prompt")}</span>
        <span className="last">{value}</span>
      </figcaption>
      <Chart x={x} lines={lines} group="versions" formatX={wholeTick} formatY={short} nameX="version" label={`Evaluations on ${title}: ${list.length}; version ${last?.version} has ${value}`} />
    </figure>
  );
}

function linesOf(list: readonly EvaluationSchema[]): Line[] {
  const measures: [string, (one: EvaluationSchema) => number | null][] = [[accuracyName(list), (one) => one.accuracy], ["reward", (one) => one.reward_mean]];
  const ks = Object.keys(list.at(-1)?.pass_at ?? {}).filter((k) => k !== "1").slice(0, 3);
  for (const k of ks) measures.push([`pass@${k}`, (one) => one.pass_at[k] ?? null]);
  return measures
    .map(([label, read], at): Line => ({ label, values: list.map(read), colour: COLOURS[at] ?? "--c7", points: true, dashed: label === "reward" }))
    .filter((line) => line.values.some((value) => value !== null));
}

/** As `accuracy_name` in gyre/api/terminal/formats.py has it. */
function accuracyName(list: readonly EvaluationSchema[]): string {
  const by = list.at(-1)?.right_by;
  return by ? `accuracy (${by})` : "accuracy";
}
