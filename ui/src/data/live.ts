/**
 * Follows a job while it runs: a `tick` that grows when what is shown may be stale.
 *
 * Invariants:
 * - *at most once a second*: however many events come, a tick comes no more often;
 * - *nothing for nobody*: a page that is not seen, or a job that has ended, has no stream and no ticks.
 *
 * Events resume by the browser's Last-Event-ID. What is no event (rates, progress) comes with the slow tick.
 */
import { createContext, useContext, useEffect, useRef, useState } from "react";
import { jobPath, urlOf } from "./api";
import { EVENT_KINDS } from "./kinds";

const FASTEST_MS = 1000;
/** Vertices report their numbers about this often. */
const SLOW_MS = 5000;
/** A stream that the server refused is tried again; one that broke is the browser's own matter. */
const REOPEN_MS = 3000;

export interface Live {
  readonly job: string;
  readonly tick: number;
  readonly running: boolean;
}

export const LiveContext = createContext<Live>({ job: "", tick: 0, running: false });

export function useLive(): Live {
  return useContext(LiveContext);
}

/** Grows as long as the page is open: what was loaded for another view is stale by then. */
let ticks = 0;

/** Returns the tick. `after` is the sequence number up to which events are known; null while that is not known. */
export function useTick(job: string, running: boolean, after: number | null): number {
  const [tick, setTick] = useState(() => ++ticks);
  const seen = useSeen();
  const wasHidden = useRef(false);
  const follows = running && seen && after !== null;
  useEffect(() => {
    if (!follows) return;
    const advance = (): void => setTick(++ticks);
    const slow = window.setInterval(advance, SLOW_MS);
    let soon = 0;
    let source: EventSource | null = null;
    let reopen = 0;
    let last = after;
    const heard = (event: MessageEvent): void => {
      last = Math.max(last, Number(event.lastEventId) || 0);
      soon ||= window.setTimeout(() => {
        soon = 0;
        advance();
      }, FASTEST_MS);
    };
    const open = (): void => {
      source = new EventSource(urlOf(jobPath(job, `/events/stream?after=${last}`)));
      for (const kind of EVENT_KINDS) source.addEventListener(kind, heard);
      source.addEventListener("error", () => {
        if (source?.readyState === EventSource.CLOSED) reopen = window.setTimeout(open, REOPEN_MS);
      });
    };
    open();
    if (wasHidden.current) advance(); // what is no event, and happened while nobody looked
    wasHidden.current = false;
    return () => {
      wasHidden.current = document.hidden;
      source?.close();
      window.clearInterval(slow);
      window.clearTimeout(soon);
      window.clearTimeout(reopen);
    };
    // `after` is where the first stream begins; a later value must not begin another one.
  }, [job, follows]);
  return tick;
}

function useSeen(): boolean {
  const [seen, setSeen] = useState(!document.hidden);
  useEffect(() => {
    const changed = (): void => setSeen(!document.hidden);
    document.addEventListener("visibilitychange", changed);
    return () => document.removeEventListener("visibilitychange", changed);
  }, []);
  return seen;
}
