/**
 * By what the tokens of a sample are coloured. Pure.
 *
 * A scale gives each token a class of its own palette: `q0` … `q8` from low over the middle to high, `k0` … `k5` for
 * kinds. Where a token has no value, it has no class.
 */
import type { SampleTokens } from "../../rest";

/** A version or an instance, from token `start` up to `end`. */
type Stretch<T> = [T, number, number];

export type Mode = "version" | "instance" | "engine" | "trainer" | "difference" | "reference" | "advantage";

export interface LegendEntry {
  readonly className: string;
  readonly text: string;
}

export interface Scale {
  readonly mode: Mode;
  readonly title: string;
  readonly classes: readonly string[];
  /** For the strip above the text; null where the colour is a kind. */
  readonly values: readonly (number | null)[] | null;
  readonly legend: readonly LegendEntry[];
}

export const TITLES: Readonly<Record<Mode, string>> = {
  version: "Version",
  instance: "Instance",
  engine: "Engine's log-prob",
  trainer: "Trainer's log-prob",
  difference: "Trainer's less engine's",
  reference: "Reference's log-prob",
  advantage: "Advantage",
};

/** Log-probs from certain to surprising; below the last one a token had less than one chance in a hundred. */
const SURPRISES = [-0.1, -0.5, -1.5, -4.6];
/** Differences in nats: beyond the second one, engine and trainer do not agree. */
const GAPS = [0.02, 0.1, 0.3, 1];
const KINDS = 6;

/** The modes for which the sample has values, in the order in which they are offered. */
export function modesOf(sample: SampleTokens): Mode[] {
  const modes: Mode[] = ["version"];
  if (new Set(sample.instances.map(([name]) => name)).size > 1) modes.push("instance");
  if (sample.logprobs) modes.push("engine");
  if (sample.trainer_logprobs) modes.push("trainer");
  if (sample.trainer_logprobs && sample.logprobs) modes.push("difference");
  if (sample.ref_logprobs) modes.push("reference");
  if (sample.advantage !== null) modes.push("advantage");
  return modes;
}

export function scaleOf(sample: SampleTokens, mode: Mode): Scale {
  const title = TITLES[mode];
  const count = sample.token_ids.length;
  switch (mode) {
    case "version":
      return kinds(mode, title, count, sample.versions, (version) => `version ${version}`);
    case "instance":
      return kinds(mode, title, count, sample.instances, (name) => name);
    case "engine":
      return surprises(mode, title, sample.logprobs ?? []);
    case "trainer":
      return surprises(mode, title, sample.trainer_logprobs ?? []);
    case "reference":
      return surprises(mode, title, sample.ref_logprobs ?? []);
    case "difference":
      return diverging(mode, title, differencesOf(sample), GAPS);
    case "advantage": {
      const values = typeof sample.advantage === "number" ? sample.token_ids.map((_, at) => (seesLoss(sample, at) ? (sample.advantage as number) : null)) : (sample.advantage ?? []);
      const most = Math.max(1e-9, ...values.map((one) => Math.abs(one ?? 0)));
      return diverging(mode, title, values, [0.05, 0.25, 0.5, 0.8].map((part) => part * most));
    }
  }
}

export function differencesOf(sample: SampleTokens): (number | null)[] {
  return (sample.logprobs ?? []).map((engine, at) => {
    const trainer = sample.trainer_logprobs?.[at];
    return engine == null || trainer == null ? null : trainer - engine;
  });
}

function kinds<T extends string | number>(mode: Mode, title: string, count: number, stretches: readonly Stretch<T>[], say: (kind: T) => string): Scale {
  const known = [...new Set(stretches.map(([kind]) => kind))];
  const classes = Array<string>(count).fill("");
  for (const [kind, from, to] of stretches) classes.fill(`k${known.indexOf(kind) % KINDS}`, from, to);
  return { mode, title, classes, values: null, legend: known.map((kind, at) => ({ className: `k${at % KINDS}`, text: say(kind) })) };
}

function surprises(mode: Mode, title: string, values: readonly (number | null)[]): Scale {
  const [a, b, c, d] = SURPRISES as [number, number, number, number];
  const classes = values.map((value) => (value == null ? "" : value > a ? "q4" : value > b ? "q3" : value > c ? "q2" : value > d ? "q1" : "q0"));
  const legend = [
    { className: "q4", text: `above ${minus(a)}` },
    { className: "q3", text: `to ${minus(b)}` },
    { className: "q2", text: `to ${minus(c)}` },
    { className: "q1", text: `to ${minus(d)}` },
    { className: "q0", text: "below" },
  ];
  return { mode, title, classes, values, legend };
}

function diverging(mode: Mode, title: string, values: readonly (number | null)[], limits: readonly number[]): Scale {
  const step = (value: number): number => limits.filter((limit) => Math.abs(value) >= limit).length * Math.sign(value);
  const classes = values.map((value) => (value == null ? "" : `q${4 + step(value)}`));
  const [a = 0, b = 0, c = 0, d = 0] = limits;
  const legend = [
    ...[d, c, b, a].map((limit, at) => ({ className: `q${at}`, text: `−${plain(limit)}` })),
    { className: "q4", text: `within ±${plain(a)}` },
    ...[a, b, c, d].map((limit, at) => ({ className: `q${at + 5}`, text: `+${plain(limit)}` })),
  ];
  return { mode, title, classes, values, legend };
}

const plain = (value: number): string => String(Number(value.toPrecision(3)));
const minus = (value: number): string => `−${plain(-value)}`;

/** Whom or what token `at` belongs to. */
export function stretchAt<T>(stretches: readonly Stretch<T>[], at: number): T | undefined {
  return stretches.find(([, from, to]) => at >= from && at < to)?.[0];
}

export interface Joint {
  readonly at: number;
  readonly text: string;
}

/** Where the sample went on elsewhere, or with other weights. */
export function jointsOf(sample: SampleTokens): Joint[] {
  const places = new Map<number, string[]>();
  const add = (at: number, from: string, to: string): void => {
    if (from !== to) places.set(at, [...(places.get(at) ?? []), `${from} → ${to}`]);
  };
  sample.instances.slice(1).forEach(([name, at], index) => add(at, `${sample.instances[index]?.[0]}`, name));
  sample.versions.slice(1).forEach(([version, at], index) => add(at, `v${sample.versions[index]?.[0]}`, `v${version}`));
  return [...places].sort(([a], [b]) => a - b).map(([at, texts]) => ({ at, text: texts.join(", ") }));
}

/** False where the loss does not look. */
export function seesLoss(sample: SampleTokens, at: number): boolean {
  return sample.mask === null || Boolean(sample.mask[at] ?? true);
}
