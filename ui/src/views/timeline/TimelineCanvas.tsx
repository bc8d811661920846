/**
 * The timeline's canvas and what the reader does with it: the wheel zooms, or scrolls where the lanes do not fit and no
 * key is held; a drag pans; keys do all of it.
 */
import { useCallback, useEffect, useRef, useState, type KeyboardEvent, type PointerEvent } from "react";
import { Canvas, type Draw } from "../../parts/Canvas";
import { useRootSize } from "../../parts/rootSize";
import type { FlagSchema } from "../../rest";
import { drawScene, layoutOf } from "./draw";
import { spanAt, type Row } from "./rows";
import { panned, zoomed, type Window } from "./window";

interface Props {
  readonly rows: readonly Row[];
  readonly flags: readonly FlagSchema[];
  readonly window: Window;
  readonly bounds: Window;
  readonly chosen: number;
  readonly at: number | null;
  readonly onWindow: (window: Window) => void;
  readonly onChoose: (row: number, at: number | null) => void;
  readonly onTurn: (role: string) => void;
  readonly onFlag: (flag: FlagSchema) => void;
}

const FLAG_REACH = 7;

export function TimelineCanvas(props: Props) {
  const { rows, flags, window: shown, bounds, chosen, at, onWindow, onChoose, onTurn, onFlag } = props;
  const ref = useRef<HTMLCanvasElement>(null);
  const root = useRootSize();
  const [top, setTop] = useState(0);
  const drag = useRef<{ x: number; y: number; top: number; window: Window; moved: boolean } | null>(null);

  const draw = useCallback<Draw>((context, width, height) => {
    drawScene(context, width, height, { rows, flags, window: shown, top, chosen, at }, layoutOf(root, width));
  }, [rows, flags, shown, top, chosen, at, root]);

  const layout = (): ReturnType<typeof layoutOf> => layoutOf(root, ref.current?.clientWidth ?? 800);
  const room = (): number => Math.max(0, rows.length * layout().row - ((ref.current?.clientHeight ?? 0) - layout().axis));
  const scrollTo = (wanted: number): void => setTop(Math.max(0, Math.min(room(), wanted)));
  const inner = (): number => Math.max(1, (ref.current?.clientWidth ?? 800) - layout().label - layout().share);
  const timeAt = (x: number): number => shown.from + ((x - layout().label) / inner()) * (shown.to - shown.from);

  const latest = useRef({ shown, bounds, onWindow, room, scrollTo, timeAt, top });
  latest.current = { shown, bounds, onWindow, room, scrollTo, timeAt, top };
  useEffect(() => {
    const canvas = ref.current;
    if (!canvas) return;
    // React's own wheel events cannot keep the page from scrolling.
    const wheel = (event: WheelEvent): void => {
      const now = latest.current;
      const wide = now.shown.to - now.shown.from;
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) now.onWindow(panned(now.shown, ((event.deltaX || event.deltaY) / 1000) * wide, now.bounds));
      else if (now.room() > 0 && !event.ctrlKey && !event.metaKey) now.scrollTo(now.top + event.deltaY);
      else now.onWindow(zoomed(now.shown, now.timeAt(event.offsetX), Math.exp(event.deltaY / 300), now.bounds));
    };
    canvas.addEventListener("wheel", wheel, { passive: false });
    return () => canvas.removeEventListener("wheel", wheel);
  }, []);

  const reveal = (row: number): void => {
    const { row: tall, axis } = layout();
    const high = (ref.current?.clientHeight ?? 0) - axis;
    if (row * tall < top) scrollTo(row * tall);
    else if ((row + 1) * tall > top + high) scrollTo((row + 1) * tall - high);
  };
  const choose = (row: number, time: number | null): void => {
    const bound = Math.max(0, Math.min(rows.length - 1, row));
    onChoose(bound, time);
    reveal(bound);
  };
  const pressed = (event: KeyboardEvent): void => {
    const wide = shown.to - shown.from;
    const middle = at !== null && at >= shown.from && at <= shown.to ? at : (shown.from + shown.to) / 2;
    const row = rows[chosen];
    const acts: Readonly<Record<string, () => void>> = {
      ArrowLeft: () => (event.shiftKey ? step(-1) : onWindow(panned(shown, -wide / 8, bounds))),
      ArrowRight: () => (event.shiftKey ? step(1) : onWindow(panned(shown, wide / 8, bounds))),
      ArrowUp: () => choose(chosen - 1, at),
      ArrowDown: () => choose(chosen + 1, at),
      Home: () => onWindow(panned(shown, -Infinity, bounds)),
      End: () => onWindow(panned(shown, Infinity, bounds)),
      "+": () => onWindow(zoomed(shown, middle, 0.6, bounds)),
      "=": () => onWindow(zoomed(shown, middle, 0.6, bounds)),
      "-": () => onWindow(zoomed(shown, middle, 1 / 0.6, bounds)),
      "0": () => onWindow(bounds),
      Enter: () => row?.kind === "role" && onTurn(row.role),
      f: () => {
        const next = flags.find((flag) => flag.kind === "incident" && flag.at > (at ?? -Infinity) + 1e-3);
        if (next) onFlag(next);
      },
    };
    const act = acts[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  };
  /** To the span before or after the chosen moment of the chosen lane. */
  const step = (by: 1 | -1): void => {
    const row = rows[chosen];
    if (row?.kind !== "lane") return;
    const from = at ?? shown.from;
    const here = spanAt(row.lane, from);
    const next = by > 0 ? row.lane.spans.find((span) => span[0] >= (here?.[1] ?? from)) : row.lane.spans.findLast((span) => span[1] <= (here?.[0] ?? from));
    if (!next) return;
    const middle = (next[0] + next[1]) / 2;
    onChoose(chosen, middle);
    if (middle < shown.from || middle > shown.to) onWindow(panned(shown, middle - (shown.from + shown.to) / 2, bounds));
  };

  const down = (event: PointerEvent): void => {
    drag.current = { x: event.clientX, y: event.clientY, top, window: shown, moved: false };
    event.currentTarget.setPointerCapture(event.pointerId);
  };
  const move = (event: PointerEvent): void => {
    const held = drag.current;
    if (!held) return;
    const [dx, dy] = [event.clientX - held.x, event.clientY - held.y];
    if (!held.moved && Math.hypot(dx, dy) < 4) return;
    held.moved = true;
    onWindow(panned(held.window, (-dx / inner()) * (held.window.to - held.window.from), bounds));
    scrollTo(held.top - dy);
  };
  const up = (event: PointerEvent): void => {
    const held = drag.current;
    drag.current = null;
    if (!held || held.moved) return;
    const box = event.currentTarget.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const { axis, row, label } = layout();
    if (y < axis) {
      const near = flags.filter((flag) => Math.abs(xOf(flag.at) - x) < FLAG_REACH * (root / 16));
      const flag = near.find((one) => one.kind === "incident") ?? near[0];
      if (flag) onFlag(flag);
      return;
    }
    const index = Math.floor((y - axis + top) / row);
    const clicked = rows[index];
    if (!clicked) return;
    if (clicked.kind === "role" && x < label) onTurn(clicked.role);
    onChoose(index, x < label ? at : timeAt(x));
  };
  const xOf = (time: number): number => layout().label + ((time - shown.from) / (shown.to - shown.from)) * inner();

  const { row, axis } = layout();
  const height = Math.max(8 * row, Math.min(rows.length * row, 44 * row)) + axis;
  return (
    <div className="timeline-frame" tabIndex={0} role="group" aria-label="Timeline. Arrows up and down choose a lane, left and right pan, plus and minus zoom, shift and an arrow go from span to span, f to the next incident." onKeyDown={pressed}>
      <Canvas draw={draw} canvasRef={ref} style={{ height: `min(${height}px, calc(100vh - 15rem))` }} role="img" aria-label="Spans of the lanes; what is chosen is said below" onPointerDown={down} onPointerMove={move} onPointerUp={up} onDoubleClick={() => onWindow(bounds)} />
    </div>
  );
}
