/** The stretch of time that is looked at. Pure. */
export interface Window {
  readonly from: number;
  readonly to: number;
}

const SHORTEST_S = 0.05;

export function clamped(window: Window, bounds: Window): Window {
  const whole = Math.max(SHORTEST_S, bounds.to - bounds.from);
  const width = Math.min(Math.max(window.to - window.from, SHORTEST_S), whole);
  const from = Math.min(Math.max(window.from, bounds.from), bounds.to - width);
  return { from, to: from + width };
}

/** `factor` below 1 looks closer; the moment `at` stays where it is. */
export function zoomed(window: Window, at: number, factor: number, bounds: Window): Window {
  const before = window.to - window.from;
  const width = Math.min(Math.max(before * factor, SHORTEST_S), bounds.to - bounds.from);
  const share = (at - window.from) / (before || 1);
  const from = at - share * width;
  return clamped({ from, to: from + width }, bounds);
}

export function panned(window: Window, seconds: number, bounds: Window): Window {
  return clamped({ from: window.from + seconds, to: window.to + seconds }, bounds);
}

/** What to ask the server for: more than is seen, so that a pan shows something, on a grid, so that answers are used
 *  again. */
export function asked(window: Window, bounds: Window): Window {
  const width = window.to - window.from;
  const grid = 2 ** Math.ceil(Math.log2(Math.max(width, SHORTEST_S)));
  const from = Math.floor((window.from - width / 2) / grid) * grid;
  const to = Math.ceil((window.to + width / 2) / grid) * grid;
  return { from: Math.max(from, Math.floor(bounds.from)), to: Math.min(to, Math.ceil(bounds.to)) };
}
