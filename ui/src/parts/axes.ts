/**
 * What the axes of a chart show: how much its height stands for at least, and round moments with labels of which no two
 * are alike. Pure.
 */

/** What a number is known to that went through float32, by its size: half a unit in the last place. */
const FLOAT32 = 2 ** -24;

/** What a mean of numbers of order one is known to, whatever it is of: some thousands of roundings of float64. */
export const ROUNDING = 1e-12;

/** A chart's height is at least so many times what its numbers are known to: rounding makes a pixel of it, no curve. */
const LEAST = 100;

const PADDING = 0.08;

/**
 * The least and the greatest value on the axis of numbers from `low` to `high`, which are known to `known`, in their
 * unit, or to what float32 tells apart. Differences that could be rounding are not drawn as a change: such a curve lies
 * in the middle, or on the ground if it cannot be told from nought.
 */
export function heightOf(low: number | null, high: number | null, known = ROUNDING): [number, number] {
  if (low === null || high === null) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  const least = LEAST * Math.max(known, size * FLOAT32);
  const padding = (high - low) * PADDING;
  if (high - low >= least) return [low >= 0 ? Math.max(0, low - padding) : low - padding, high + padding];
  if (size === 0) return [0, 1];
  if (size <= least) return [low < 0 ? -least : 0, least];
  const middle = (low + high) / 2;
  return [middle - Math.abs(middle) / 2, middle + Math.abs(middle) / 2];
}

/** The labels of an axis, as `write` has them; with more digits where two of them would be alike. */
export function labelsOf(values: readonly number[], write: (value: number) => string): string[] {
  const plain = values.map(write);
  for (let digits = 3; digits <= 15 && hasTwins(plain); digits++) {
    const more = values.map((value) => (value === 0 ? "0" : `${Number(value.toPrecision(digits))}`.replace("e-", "e−").replace(/^-/, "−")));
    if (!hasTwins(more)) return more;
  }
  return plain;
}

function hasTwins(labels: readonly string[]): boolean {
  return new Set(labels).size < labels.length;
}

export interface Moment {
  /** In seconds since 1970. */
  readonly at: number;
  readonly label: string;
}

const DAY_S = 86400;
const STEPS_S = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, DAY_S, 2 * DAY_S, 7 * DAY_S, 28 * DAY_S];

/** A year of days has each once; longer ones need its number. */
const MOST_DAYS_S = 300 * DAY_S;

/** Moments for an axis from one time to another, at most about `most` of them, on round times of the reader's own
 *  clock; with labels as fine as the steps between them, of which no two are alike. */
export function moments(from: number, to: number, most: number): Moment[] {
  const step = STEPS_S.find((one) => (to - from) / one <= most) ?? Math.ceil((to - from) / most / (28 * DAY_S)) * 28 * DAY_S;
  const zone = new Date(from * 1000).getTimezoneOffset() * 60;
  const first = Math.ceil((from - zone) / step);
  const count = Math.max(0, Math.floor((to - zone) / step) - first + 1);
  const write = writerOf(step, from, to);
  let before = "";
  return Array.from({ length: count }, (_, place) => {
    const at = (first + place) * step + zone; // not summed up: hundredths would drift
    const label = write(at);
    const twin = label === before; // an hour that comes twice, as clocks are set back
    before = label;
    return { at, label: twin ? "" : label };
  });
}

function writerOf(step: number, from: number, to: number): (at: number) => string {
  const long = to - from > MOST_DAYS_S;
  const day = (date: Date): string => `${long ? `${date.getFullYear()}-` : ""}${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  const minutes = (date: Date): string => `${two(date.getHours())}:${two(date.getMinutes())}`;
  const several = new Date(from * 1000).toDateString() !== new Date(to * 1000).toDateString();
  if (step >= DAY_S) return (at) => day(dateOf(at));
  if (step >= 60) return (at) => `${several ? `${day(dateOf(at))} ` : ""}${minutes(dateOf(at))}`;
  const places = step >= 1 ? 0 : step >= 0.1 ? 1 : 2;
  return (at) => {
    const date = dateOf(at);
    const part = places === 0 ? "" : (at - Math.floor(at + 1e-6)).toFixed(places).slice(1);
    return `${minutes(date)}:${two(date.getSeconds())}${part}`;
  };
}

/** The date of a round moment, whose fraction float64 has a little below it. */
function dateOf(at: number): Date {
  return new Date(Math.round(at * 1000));
}

const two = (value: number): string => value.toString().padStart(2, "0");
