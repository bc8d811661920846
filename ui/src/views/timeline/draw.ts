/** Draws the timeline: what is in sight, and nothing else. */
import { percent } from "../../format";
import { moments } from "../../parts/axes";
import { colour } from "../../theme";
import type { FlagSchema, Span, SpanState } from "../../rest";
import { columnsOf, firstAfter, sumsOf, type Row, type Sums } from "./rows";
import { lookOf, STATES, WASTED } from "./states";
import type { Window } from "./window";

/** In pixels at a root size of 16; `scale` enlarges them with the reader's type. */
export interface Layout {
  readonly scale: number;
  readonly label: number;
  readonly share: number;
  readonly axis: number;
  readonly row: number;
}

export function layoutOf(root: number, width: number): Layout {
  const scale = root / 16;
  const narrow = width < 560 * scale;
  return { scale, label: (narrow ? 84 : 148) * scale, share: (narrow ? 0 : 56) * scale, axis: 44 * scale, row: 20 * scale };
}

export interface Scene {
  readonly rows: readonly Row[];
  readonly flags: readonly FlagSchema[];
  readonly window: Window;
  readonly top: number;
  readonly chosen: number;
  readonly at: number | null;
}

const FLAG_COLOURS: Readonly<Record<FlagSchema["kind"], string>> = { incident: "--s-down", publish: "--s-load", evaluation: "--s-evaluate", checkpoint: "--s-checkpoint", command: "--text" };
const COLUMN = 4;

export function drawScene(context: CanvasRenderingContext2D, width: number, height: number, scene: Scene, layout: Layout): void {
  const { window } = scene;
  const left = layout.label;
  const right = width - layout.share;
  const x = (at: number): number => left + ((at - window.from) / (window.to - window.from)) * (right - left);
  const paint = paints();
  const font = getComputedStyle(document.body).fontFamily;
  context.textBaseline = "middle";

  context.font = `${11 * layout.scale}px ${font}`;
  context.fillStyle = paint.muted;
  context.strokeStyle = paint.line;
  for (const { at, label } of moments(window.from, window.to, (right - left) / (80 * layout.scale))) {
    const place = Math.round(x(at)) + 0.5;
    context.beginPath();
    context.moveTo(place, layout.axis - 6);
    context.lineTo(place, height);
    context.stroke();
    if (place + 60 * layout.scale < right) context.fillText(label, place + 3, layout.axis - 12 * layout.scale);
  }

  context.save();
  context.beginPath();
  context.rect(0, layout.axis, width, height - layout.axis);
  context.clip();
  const first = Math.max(0, Math.floor(scene.top / layout.row));
  const last = Math.min(scene.rows.length, Math.ceil((scene.top + height - layout.axis) / layout.row));
  for (let at = first; at < last; at++) {
    const row = scene.rows[at];
    if (!row) continue;
    const y = layout.axis + at * layout.row - scene.top;
    if (at === scene.chosen) {
      context.fillStyle = paint.accentSoft;
      context.fillRect(0, y, width, layout.row);
    }
    const lanes = row.kind === "role" ? row.lanes : [row.lane];
    const sums = sumsOf(lanes, window);
    context.save();
    context.beginPath();
    context.rect(left, y, right - left, layout.row);
    context.clip();
    if (row.kind === "role") drawColumns(context, columnsOf(row.lanes, window, Math.max(1, Math.floor((right - left) / COLUMN))), left, y + 2, (right - left), layout.row - 4, paint.states);
    else drawSpans(context, row.lane.spans, window, x, y + 3, layout.row - 6, paint);
    context.restore();
    context.fillStyle = row.kind === "role" ? paint.text : paint.muted;
    context.font = `${row.kind === "role" ? "600 " : ""}${11.5 * layout.scale}px ${font}`;
    const name = row.kind === "role" ? `${row.open ? "▾" : "▸"} ${row.role} (${row.lanes.length})` : row.alone ? row.lane.id : `   ${row.lane.id}`;
    context.fillText(fitted(context, name, left - 8), 4, y + layout.row / 2);
    if (layout.share > 0) {
      context.textAlign = "right";
      context.fillText(percent(wastedShare(sums)), width - 4, y + layout.row / 2);
      context.textAlign = "left";
    }
  }
  context.restore();

  drawFlags(context, scene, x, left, right, height, layout, paint);
  context.fillStyle = paint.muted;
  context.font = `${11 * layout.scale}px ${font}`;
  if (layout.share > 0) {
    context.textAlign = "right";
    context.fillText("no work", width - 4, layout.axis - 12 * layout.scale);
    context.textAlign = "left";
  }
  if (scene.at !== null && scene.at >= window.from && scene.at <= window.to) {
    context.strokeStyle = paint.text;
    context.setLineDash([2, 3]);
    context.beginPath();
    context.moveTo(x(scene.at), 0);
    context.lineTo(x(scene.at), height);
    context.stroke();
    context.setLineDash([]);
  }
}

export function wastedShare(sums: Sums): number {
  let all = 0;
  let wasted = 0;
  for (const [state, seconds] of Object.entries(sums) as [SpanState, number][]) {
    all += seconds;
    if (WASTED.includes(state)) wasted += seconds;
  }
  return all > 0 ? wasted / all : 0;
}

interface Paints {
  readonly text: string;
  readonly muted: string;
  readonly line: string;
  readonly accentSoft: string;
  readonly outline: string;
  readonly states: ReadonlyMap<SpanState, string>;
}

function paints(): Paints {
  return { text: colour("--text"), muted: colour("--muted"), line: colour("--line"), accentSoft: colour("--accent-soft"), outline: colour("--line-strong"), states: new Map(STATES.map((one) => [one.state, colour(one.colour)])) };
}

function drawSpans(context: CanvasRenderingContext2D, spans: readonly Span[], window: Window, x: (at: number) => number, y: number, height: number, paint: Paints): void {
  let drawnTo = -1;
  for (let at = firstAfter(spans, window.from); at < spans.length; at++) {
    const span = spans[at];
    if (!span || span[0] >= window.to) break;
    const from = x(span[0]);
    const wide = x(span[1]) - from;
    const down = span[2] === "down";
    if (wide < 0.5 && from < drawnTo && !down) continue; // the pixel has something already
    drawnTo = from + Math.max(wide, 1);
    const look = lookOf(span[2]);
    const tall = height * look.height;
    context.fillStyle = paint.states.get(look.state) ?? paint.muted;
    context.fillRect(from, y + height - tall, Math.max(wide, down ? 2 : 1), tall);
    if (look.height < 0.5 && wide > 3) {
      context.strokeStyle = paint.outline;
      context.strokeRect(from + 0.5, y + height - tall + 0.5, wide - 1, tall - 1);
    }
    if (look.hatched && wide > 4) hatch(context, from, y, wide, height, paint.text);
  }
}

function hatch(context: CanvasRenderingContext2D, x: number, y: number, width: number, height: number, stroke: string): void {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = stroke;
  context.beginPath();
  for (let at = x - height; at < x + width; at += 5) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}

function drawColumns(context: CanvasRenderingContext2D, columns: readonly Sums[], left: number, y: number, width: number, height: number, states: Paints["states"]): void {
  const wide = width / columns.length;
  columns.forEach((sums, at) => {
    const all = Object.values(sums).reduce((sum, one) => sum + one, 0);
    if (all <= 0) return;
    let bottom = y + height;
    for (const { state } of STATES) {
      const tall = ((sums[state] ?? 0) / all) * height;
      if (tall <= 0) continue;
      context.fillStyle = states.get(state) ?? "";
      context.fillRect(left + at * wide, bottom - tall, wide + 0.5, tall);
      bottom -= tall;
    }
  });
}

/** Incidents are triangles, all else are ticks; incidents come last, on top. */
function drawFlags(context: CanvasRenderingContext2D, scene: Scene, x: (at: number) => number, left: number, right: number, height: number, layout: Layout, paint: Paints): void {
  const ordered = [...scene.flags].sort((a, b) => Number(a.kind === "incident") - Number(b.kind === "incident"));
  const size = 6 * layout.scale;
  for (const flag of ordered) {
    const place = x(flag.at);
    if (place < left || place > right) continue;
    context.fillStyle = colour(FLAG_COLOURS[flag.kind]) || paint.text;
    if (flag.kind === "incident") {
      context.beginPath();
      context.moveTo(place, size * 2);
      context.lineTo(place - size, 1);
      context.lineTo(place + size, 1);
      context.fill();
      context.globalAlpha = 0.6;
      context.fillRect(place, size * 2, 1, height);
      context.globalAlpha = 1;
    } else {
      context.fillRect(place - 1, 2, 2, size * 1.6);
    }
  }
}

function fitted(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (context.measureText(text).width <= width) return text;
  let short = text;
  while (short.length > 2 && context.measureText(`${short}…`).width > width) short = short.slice(0, -1);
  return `${short}…`;
}
