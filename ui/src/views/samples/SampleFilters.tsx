/** The filters of the samples. Each is in the address; text is applied when Enter is pressed or the field is left. */
import { useEffect, useState } from "react";
import { useJobView } from "../../data/job";
import type { SampleSteps } from "../../rest";
import { setParams, type Params } from "../../route";
import { countOf, NO_FILTERS, type Filters } from "./filters";

const OUTCOMES = ["trained", "stale", "no_gradient", "quarantined", "stop", "length"];

export function SampleFilters({ filters, steps }: { filters: Filters; steps: SampleSteps | undefined }) {
  const { data: view } = useJobView();
  const instances = view?.vertices.filter((one) => one.role.startsWith("rollout") && one.role !== "rollout_manager").map((one) => one.id) ?? [];
  const first = steps?.steps[0]?.step;
  const last = steps?.steps.at(-1)?.step;
  return (
    <form className="filters" role="search" aria-label="Filters of the samples" onSubmit={(event) => event.preventDefault()}>
      <Field label="Step" name="step" value={filters.step} placeholder={first === undefined ? "" : `${first}–${last}`} width={6} numeric />
      <Field label="Group" name="group" value={filters.group} width={6} numeric />
      <Field label="Reward" name="reward" value={filters.reward} placeholder="<0.2" width={8} />
      <Field label="Tokens" name="tokens" value={filters.tokens} placeholder=">=1000" width={7} />
      <Field label="Version" name="version" value={filters.version} width={5} numeric />
      <Field label="Outcome" name="outcome" value={filters.outcome} width={8} options={OUTCOMES} />
      <Field label="Instance" name="instance" value={filters.instance} width={8} options={instances.slice(0, 500)} />
      <label>Quarantine <select value={filters.quarantined} onChange={(event) => apply({ quarantined: event.target.value })}><option value="">with and without</option><option value="true">only</option><option value="false">without</option></select></label>
      <label>Order <select value={filters.order} onChange={(event) => apply({ order: event.target.value })}><option value="step">newest</option><option value="worst">worst first</option><option value="best">best first</option></select></label>
      {countOf(filters) > 0 && <button type="button" onClick={() => apply({ ...NO_FILTERS, order: filters.order })}>Clear</button>}
    </form>
  );
}

function apply(changes: Params): void {
  setParams({ ...changes, at: null });
}

interface FieldProps {
  readonly label: string;
  readonly name: keyof Filters;
  readonly value: string;
  readonly width: number;
  readonly placeholder?: string;
  readonly numeric?: boolean;
  readonly options?: readonly string[];
}

function Field({ label, name, value, width, placeholder = "", numeric = false, options }: FieldProps) {
  const [text, setText] = useState(value);
  useEffect(() => setText(value), [value]);
  const done = (): void => {
    if (text.trim() !== value) apply({ [name]: text.trim() });
  };
  return (
    <label>
      {label}
      <input
        type={name === "step" ? "search" : "text"}
        inputMode={numeric ? "numeric" : "text"}
        pattern={numeric ? "-?[0-9]*" : undefined}
        value={text}
        placeholder={placeholder}
        list={options ? `${name}-options` : undefined}
        style={{ width: `${width}rem` }}
        onChange={(event) => setText(event.target.value)}
        onBlur={done}
        onKeyDown={(event) => event.key === "Enter" && done()}
      />
      {options && <datalist id={`${name}-options`}>{options.map((one) => <option key={one} value={one} />)}</datalist>}
    </label>
  );
}
