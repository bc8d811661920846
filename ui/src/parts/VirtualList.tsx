/**
 * A list of which only the lines in sight exist. Lines are of one height.
 *
 * Browsers limit how tall an element may be: beyond `TALLEST` pixels the scroll bar stands for the whole list in
 * proportion, and a million lines stay within reach.
 */
import { useEffect, useRef, useState, type KeyboardEvent, type ReactNode } from "react";

const TALLEST = 8_000_000;
const SPARE = 6;

interface Props {
  readonly count: number;
  readonly lineHeight: number;
  readonly label: string;
  readonly chosen: number | null;
  readonly onChoose: (at: number) => void;
  readonly onOpen?: (at: number) => void;
  readonly line: (at: number) => ReactNode;
  /** Told which lines are in sight. */
  readonly onSight?: (from: number, to: number) => void;
  readonly className?: string;
}

export function VirtualList({ count, lineHeight, label, chosen, onChoose, onOpen, line, onSight, className = "" }: Props) {
  const ref = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(400);
  useEffect(() => {
    const element = ref.current;
    if (!element) return;
    const observer = new ResizeObserver(() => setHeight(element.clientHeight));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);

  const full = count * lineHeight;
  const tall = Math.min(full, TALLEST);
  const travel = Math.max(1, tall - height);
  const offset = full > tall ? (Math.min(top, travel) / travel) * (full - height) : top;
  const from = Math.max(0, Math.floor(offset / lineHeight) - SPARE);
  const to = Math.min(count, Math.ceil((offset + height) / lineHeight) + SPARE);
  useEffect(() => onSight?.(from, to), [from, to, onSight]);

  const show = (at: number): void => {
    const element = ref.current;
    if (!element) return;
    const lineTop = at * lineHeight;
    const wanted = lineTop < offset ? lineTop : lineTop + lineHeight > offset + height ? lineTop + lineHeight - height : null;
    if (wanted === null) return;
    element.scrollTop = full > tall ? (wanted / (full - height)) * travel : wanted;
  };
  const pressed = (event: KeyboardEvent): void => {
    const page = Math.max(1, Math.floor(height / lineHeight) - 1);
    const at = chosen ?? -1;
    const moves: Readonly<Record<string, number>> = { ArrowDown: at + 1, ArrowUp: Math.max(0, at - 1), PageDown: at + page, PageUp: at - page, Home: 0, End: count - 1 };
    const next = moves[event.key];
    if (next !== undefined && count > 0) {
      event.preventDefault();
      const bound = Math.max(0, Math.min(count - 1, next));
      onChoose(bound);
      show(bound);
    } else if (event.key === "Enter" && chosen !== null) {
      onOpen?.(chosen);
    }
  };
  const lines = [];
  for (let at = from; at < to; at++) {
    lines.push(
      <div
        key={at}
        id={`${label}-${at}`}
        role="option"
        aria-selected={at === chosen}
        aria-posinset={at + 1}
        aria-setsize={count}
        className={at === chosen ? "line chosen" : "line"}
        style={{ top: at * lineHeight - offset + top, height: lineHeight }}
        onClick={() => onChoose(at)}
        onDoubleClick={() => onOpen?.(at)}
      >
        {line(at)}
      </div>,
    );
  }
  const inSight = chosen !== null && chosen >= from && chosen < to;
  return (
    <div ref={ref} className={`scroller ${className}`} role="listbox" tabIndex={0} aria-label={label} aria-activedescendant={inSight ? `${label}-${chosen}` : undefined} onKeyDown={pressed} onScroll={(event) => setTop(event.currentTarget.scrollTop)}>
      <div className="all" role="presentation" style={{ height: tall }}>{lines}</div>
    </div>
  );
}
