/**
 * Fewer points of a curve that look the same: of each bucket the least and the greatest value, in their order, so that
 * no spike is lost. Pure.
 */
export interface Points {
  readonly x: number[];
  readonly y: (number | null)[];
}

/** Returns at most about `most` points. `x` grows. A bucket without a number is one gap. */
export function thinned(x: readonly number[], y: readonly (number | null)[], most: number): Points {
  const count = x.length;
  if (count <= most) return { x: [...x], y: [...y] };
  const buckets = Math.max(1, Math.floor(most / 2));
  const out: Points = { x: [], y: [] };
  for (let bucket = 0; bucket < buckets; bucket++) {
    const from = Math.floor((bucket * count) / buckets);
    const to = Math.floor(((bucket + 1) * count) / buckets);
    let least = -1;
    let greatest = -1;
    for (let at = from; at < to; at++) {
      const value = y[at];
      if (value == null) continue;
      if (least < 0 || value < (y[least] ?? 0)) least = at;
      if (greatest < 0 || value > (y[greatest] ?? 0)) greatest = at;
    }
    const chosen = least < 0 ? [from] : least === greatest ? [least] : [Math.min(least, greatest), Math.max(least, greatest)];
    for (const at of chosen) {
      out.x.push(x[at] ?? 0);
      out.y.push(y[at] ?? null);
    }
  }
  return out;
}

/** Where the values from `low` to `high` of a growing list stand: [from, to). */
export function within(x: readonly number[], low: number, high: number): [number, number] {
  return [firstAtLeast(x, low), firstAtLeast(x, high, true)];
}

function firstAtLeast(x: readonly number[], limit: number, beyond = false): number {
  let from = 0;
  let to = x.length;
  while (from < to) {
    const middle = (from + to) >> 1;
    const value = x[middle] ?? 0;
    if (value < limit || (beyond && value === limit)) from = middle + 1;
    else to = middle;
  }
  return from;
}

/** The mean of each value and those before it, `over` of them: what a noisy curve is about. Gaps stay gaps. */
export function smoothed(y: readonly (number | null)[], over: number): (number | null)[] {
  if (over <= 1) return [...y];
  let sum = 0;
  let count = 0;
  return y.map((value, at) => {
    if (value !== null) {
      sum += value;
      count += 1;
    }
    const gone = y[at - over];
    if (at >= over && gone != null) {
      sum -= gone;
      count -= 1;
    }
    return value === null || count === 0 ? null : sum / count;
  });
}
