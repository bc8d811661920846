/** About sixteen curves in sections, the evaluations with their version, and every other number by search. */
import { useMemo, useState } from "react";
import { jobPath } from "../../data/api";
import { useJobView } from "../../data/job";
import { useLive } from "../../data/live";
import { useResource } from "../../data/resource";
import { useSteps } from "../../data/steps";
import { clock, plural, wholeTick } from "../../format";
import { SourceNumbers } from "../../parts/SourceNumbers";
import type { Json, Step } from "../../rest";
import { setParams, useRoute } from "../../route";
import { componentsOf, curveOf, restOf, SECTIONS, weightsOf, type Curve, type Section } from "./chosen";
import { CurveCard } from "./CurveCard";
import { EvaluatedNumber, numbersOf, EvaluationCard } from "./EvaluationCard";
import { SmoothChoice } from "./SmoothChoice";
import type { Axis } from "./axis";
import "./curves.css";

/** What is measured over time, and not step by step. */
const PLANE = ["plane", "trainer", "master"];

/** Without a search, so many of the rest would be a wall. */
const REST_SHOWN = 24;

export default function CurvesView() {
  const { job, tick } = useLive();
  const { steps, complete } = useSteps(job, tick);
  const { data: view } = useJobView();
  const { data: spec } = useResource<Json>(jobPath(job, "/spec"));
  const weights = useMemo(() => weightsOf(spec), [spec]);
  const { params } = useRoute();
  const [search, setSearch] = useState(params["q"] ?? "");
  const [plane, setPlane] = useState(false);
  const axis = useAxis(steps, params["x"] === "time");
  const names = useMemo(() => namesOf(steps), [steps]);
  const wanted = search.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (curve: Curve): boolean => wanted.every((word) => `${curve.name} ${curve.title} ${curve.unit}`.toLowerCase().includes(word));
  const rest = restOf(names).map(curveOf).filter(matches);
  const evaluations = Object.entries(view?.evaluations ?? {}).filter(([, list]) => list.length > 0);
  const showsEvaluations = evaluations.length > 0 && (wanted.length === 0 || wanted.every((word) => "evaluations accuracy reward pass".includes(word)));
  const parts = evaluations.flatMap(([set, list]) => numbersOf(list).map((name) => ({ set, name, list }))).filter(({ set, name }) => wanted.every((word) => `evaluations ${set} ${name}`.toLowerCase().includes(word)));

  if (steps.length === 0) return <><h1>Curves</h1><p className="empty">{complete ? "No step is done yet: the curves begin with the first." : "Loading the steps …"}</p></>;
  return (
    <>
      <div className="head">
        <h1>Curves</h1>
        <span className="muted">{plural(steps.length, "step")}</span>
        <label>Search <input type="search" value={search} placeholder="any number of a step" onChange={(event) => { setSearch(event.target.value); setParams({ q: event.target.value }); }} /></label>
        <label>Over <select value={params["x"] ?? "step"} onChange={(event) => setParams({ x: event.target.value === "step" ? null : event.target.value, from: null, to: null })}><option value="step">step</option><option value="time">time</option></select></label>
        <SmoothChoice />
        {axis.range && <button type="button" onClick={() => setParams({ from: null, to: null })}>All of it</button>}
      </div>
      <p className="muted small">Drag over a chart to look closer; double-click for all of it. The cursor is the same in every chart.</p>
      {sectionsOf(names, weights).map((section) => {
        const shown = section.curves.filter((curve) => names.has(curve.name) && matches(curve));
        return shown.length > 0 && (
          <section key={section.title} aria-label={section.title}>
            <h2>{section.title}</h2>
            <div className="curves">{shown.map((curve) => <CurveCard key={curve.name} curve={curve} steps={steps} axis={axis} />)}</div>
          </section>
        );
      })}
      {(showsEvaluations || parts.length > 0) && (
        <section aria-label="Evaluations">
          <h2>Evaluations</h2>
          <div className="curves">
            {showsEvaluations && evaluations.map(([set, list]) => <EvaluationCard key={set} set={set} list={list} />)}
            {parts.map((part) => <EvaluatedNumber key={`${part.set} ${part.name}`} {...part} />)}
          </div>
        </section>
      )}
      {rest.length > 0 && (
        <section aria-label="Other numbers">
          <h2>Other numbers</h2>
          <div className="curves">{rest.slice(0, REST_SHOWN).map((curve) => <CurveCard key={curve.name} curve={curve} steps={steps} axis={axis} />)}</div>
          {rest.length > REST_SHOWN && <p className="empty">{plural(rest.length - REST_SHOWN, "more number")}: search for them.</p>}
        </section>
      )}
      <details onToggle={(event) => setPlane(event.currentTarget.open)}>
        <summary>Rollout plane, trainer and master over time</summary>
        {plane && PLANE.map((source) => <SourceNumbers key={source} source={source} title={source} />)}
      </details>
    </>
  );
}

/** The chosen sections, and after the reward what it is made of. */
function sectionsOf(names: ReadonlySet<string>, weights: ReadonlyMap<string, number>): readonly Section[] {
  return [...SECTIONS.slice(0, 1), { title: "What the reward is made of", curves: componentsOf(names, weights) }, ...SECTIONS.slice(1)];
}

function useAxis(steps: readonly Step[], byTime: boolean): Axis {
  const { params } = useRoute();
  const x = useMemo(() => steps.map((step) => (byTime ? step["at"] : step["step"]) ?? 0), [steps, byTime]);
  const [from, to] = [Number(params["from"]), Number(params["to"])];
  const range = params["from"] && params["to"] && from < to ? ([from, to] as const) : undefined;
  return { name: byTime ? "" : "step", time: byTime, x, range, format: byTime ? clock : wholeTick, onRange: (low, high) => setParams({ from: low === null ? null : low.toFixed(1), to: high === null ? null : high.toFixed(1) }) };
}

/** A number that only some steps have counts too, so all are looked at; the newest hundred and the first ten suffice. */
function namesOf(steps: readonly Step[]): Set<string> {
  const names = new Set<string>();
  for (const step of [...steps.slice(0, 10), ...steps.slice(-100)]) for (const [name, value] of Object.entries(step)) if (typeof value === "number") names.add(name);
  return names;
}

