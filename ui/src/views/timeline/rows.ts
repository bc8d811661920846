/** The rows of the timeline: for each role of several lanes a row that opens and closes, and below it its lanes. Pure. */
import type { LaneSchema, Span, SpanState } from "../../rest";
import type { Window } from "./window";

export type Row =
  | { readonly kind: "role"; readonly role: string; readonly lanes: readonly LaneSchema[]; readonly open: boolean }
  | { readonly kind: "lane"; readonly lane: LaneSchema; readonly alone: boolean };

/** A role of more lanes is closed at first: its own row sums them. */
export const OPEN_UP_TO = 32;

/** Instances that joined from elsewhere have no role of the job's. */
const BY_ITSELF = "joined";

export function rolesOf(lanes: readonly LaneSchema[]): Map<string, LaneSchema[]> {
  const roles = new Map<string, LaneSchema[]>();
  for (const lane of lanes) {
    const role = lane.role || BY_ITSELF;
    const known = roles.get(role);
    if (known) known.push(lane);
    else roles.set(role, [lane]);
  }
  return roles;
}

/** `turned` are the roles that the reader opened or closed, against what they would be. */
export function rowsOf(roles: ReadonlyMap<string, readonly LaneSchema[]>, turned: ReadonlySet<string>): Row[] {
  const rows: Row[] = [];
  for (const [role, lanes] of roles) {
    const [only] = lanes;
    if (only && lanes.length === 1) {
      rows.push({ kind: "lane", lane: only, alone: true });
      continue;
    }
    const open = lanes.length <= OPEN_UP_TO !== turned.has(role);
    rows.push({ kind: "role", role, lanes, open });
    if (open) for (const lane of lanes) rows.push({ kind: "lane", lane, alone: false });
  }
  return rows;
}

/** The place of the first span that ends after `at`. Spans are in order and do not overlap. */
export function firstAfter(spans: readonly Span[], at: number): number {
  let low = 0;
  let high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((spans[middle]?.[1] ?? 0) <= at) low = middle + 1;
    else high = middle;
  }
  return low;
}

export function spanAt(lane: LaneSchema, at: number): Span | undefined {
  const span = lane.spans[firstAfter(lane.spans, at)];
  return span && span[0] <= at ? span : undefined;
}

export type Sums = Partial<Record<SpanState, number>>;

/** Seconds by state within the window, over all of these lanes. */
export function sumsOf(lanes: readonly LaneSchema[], window: Window): Sums {
  const sums: Sums = {};
  for (const { spans } of lanes) {
    for (let at = firstAfter(spans, window.from); at < spans.length; at++) {
      const span = spans[at];
      if (!span || span[0] >= window.to) break;
      sums[span[2]] = (sums[span[2]] ?? 0) + Math.min(span[1], window.to) - Math.max(span[0], window.from);
    }
  }
  return sums;
}

/** Of `columns` equal parts of the window, the seconds by state: what a role's own row shows. */
export function columnsOf(lanes: readonly LaneSchema[], window: Window, columns: number): Sums[] {
  const out = Array.from({ length: columns }, (): Sums => ({}));
  const wide = (window.to - window.from) / columns;
  for (const { spans } of lanes) {
    for (let at = firstAfter(spans, window.from); at < spans.length; at++) {
      const span = spans[at];
      if (!span || span[0] >= window.to) break;
      const first = Math.max(0, Math.floor((span[0] - window.from) / wide));
      const last = Math.min(columns - 1, Math.floor((span[1] - window.from) / wide));
      for (let column = first; column <= last; column++) {
        const from = Math.max(span[0], window.from + column * wide);
        const to = Math.min(span[1], window.from + (column + 1) * wide);
        const sums = out[column];
        if (sums && to > from) sums[span[2]] = (sums[span[2]] ?? 0) + to - from;
      }
    }
  }
  return out;
}
