/** How numbers, times and names are written: the same everywhere, short, in digits of one width. Pure. */

const MISSING = "–";

/** Between a number and its unit no line breaks. */
const GAP = "\u00a0";

/** A number with about three significant digits: 0.0021, 41.2, 5.2 k, 1.3 M. */
export function short(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return MISSING;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(1).replace("e-", "e−").replace(/^-/, "−");
  if (size >= 1e12) return signed(value / 1e12, "T");
  if (size >= 1e9) return signed(value / 1e9, "G");
  if (size >= 1e6) return signed(value / 1e6, "M");
  if (size >= 1e4) return signed(value / 1e3, "k");
  return digits(value);
}

function signed(value: number, unit: string): string {
  return `${digits(value)}${GAP}${unit}`;
}

function digits(value: number): string {
  const size = Math.abs(value);
  const places = Number.isInteger(value) && size < 1e4 ? 0 : size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : size >= 0.1 ? 3 : 4;
  return value.toFixed(places).replace("-", "−");
}

/** More do not fit beside an axis. */
const MOST_DECIMALS = 4;

/** A tick of an axis whose ticks are `step` apart: all in as many digits. */
export function tick(value: number, step: number): string {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (decimalsOf(step) > MOST_DECIMALS && size < 1) return value.toExponential(Math.abs(value % 10 ** Math.floor(Math.log10(size))) < step / 2 ? 0 : 1).replace("e-", "e−").replace(/^-/, "−");
  if (size >= 1e4) return short(value).replace(/\.0+(?=\s)/, "");
  return value.toFixed(Math.min(MOST_DECIMALS, decimalsOf(step))).replace("-", "−");
}

export function percentTick(value: number, step: number): string {
  return `${(value * 100).toFixed(Math.min(4, decimalsOf(step * 100))).replace("-", "−")}${GAP}%`;
}

/** How many decimals tell multiples of `step` apart: 0.05 needs two, 0.25 two, 5 none. */
function decimalsOf(step: number): number {
  let places = 0;
  while (places < 8 && Math.abs(step * 10 ** places - Math.round(step * 10 ** places)) > 1e-6 * 10 ** places * step) places += 1;
  return places;
}

/** A whole number with thin spaces: 1 234 567. */
export function whole(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return MISSING;
  return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f").replace("-", "−");
}

/** A tick of an axis of whole numbers, which has none between them: 1, and nothing for 1.5. */
export function wholeTick(value: number): string {
  return Number.isInteger(value) ? whole(value) : "";
}

export function percent(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return MISSING;
  const points = value * 100;
  return `${points !== 0 && Math.abs(points) < 10 ? points.toFixed(1) : points.toFixed(0)}${GAP}%`;
}

export function bytes(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return MISSING;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  let size = value;
  while (size >= 1000 && at < units.length - 1) {
    size /= 1000;
    at += 1;
  }
  return `${at === 0 ? size.toFixed(0) : size < 10 ? size.toFixed(2) : size < 100 ? size.toFixed(1) : size.toFixed(0)}${GAP}${units[at]}`;
}

/** How long, in two units at most: 0.34 s, 12 s, 4 min 10 s, 2 h 5 min, 3 d 4 h. */
export function duration(seconds: number | null | undefined): string {
  if (seconds == null || !Number.isFinite(seconds)) return MISSING;
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds < 1) return seconds === 0 ? `0${GAP}s` : `${seconds.toPrecision(2)}${GAP}s`;
  if (seconds < 10) return `${seconds.toFixed(1)}${GAP}s`;
  const all = Math.round(seconds);
  if (all < 60) return `${all}${GAP}s`;
  const [d, h, m, s] = [Math.floor(all / 86400), Math.floor(all / 3600) % 24, Math.floor(all / 60) % 60, all % 60];
  if (d > 0) return h > 0 ? `${d}${GAP}d ${h}${GAP}h` : `${d}${GAP}d`;
  if (h > 0) return m > 0 ? `${h}${GAP}h ${m}${GAP}min` : `${h}${GAP}h`;
  return s > 0 ? `${m}${GAP}min ${s}${GAP}s` : `${m}${GAP}min`;
}

const two = (value: number): string => value.toString().padStart(2, "0");

/** The clock of the reader's own place: 20:14:03. */
export function clock(at: number | null | undefined): string {
  if (at == null || !Number.isFinite(at)) return MISSING;
  const date = new Date(at * 1000);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** Date and clock: 2026-11-25 20:14. */
export function moment(at: number | null | undefined): string {
  if (at == null || !Number.isFinite(at) || at === 0) return MISSING;
  const date = new Date(at * 1000);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

export function ago(at: number | null | undefined, now: number): string {
  return at == null ? MISSING : `${duration(Math.max(0, Math.round(now - at)))} ago`;
}

/** A name of the program's as words: process_died → process died. */
export function words(name: string): string {
  return name.replaceAll("_", " ");
}

/** An event's kind as words: WeightsPublished → weights published. */
export function kindWords(kind: string): string {
  return kind.replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase();
}

export function plural(count: number, one: string, many = `${one}s`): string {
  return `${whole(count)} ${count === 1 ? one : many}`;
}

/** A value of a workload's own, on one line. */
export function anything(value: unknown): string {
  if (value == null) return MISSING;
  if (typeof value === "number") return short(value);
  if (typeof value === "string") return value;
  return JSON.stringify(value);
}
