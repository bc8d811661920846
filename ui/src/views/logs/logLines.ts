/** The lines of the vertices' output: the newest page first, and then what comes after it. */
import { useEffect, useRef, useState } from "react";
import { ApiError, get, jobPath } from "../../data/api";
import { withQuery } from "../../data/job";
import type { LogPage } from "../../rest";

export interface LogLine {
  readonly vertex: string;
  readonly text: string;
}

interface Known {
  readonly lines: readonly LogLine[];
  readonly error: ApiError | null;
  readonly loading: boolean;
}

/** Older lines go; the files have them. */
const KEPT = 50_000;
const PAGE_BYTES = 2 ** 19;

export function useLogs(job: string, role: string, rank: string, tick: number): Known {
  const [known, setKnown] = useState<Known>({ lines: [], error: null, loading: true });
  const place = useRef({ key: "", cursor: "", running: false });
  useEffect(() => {
    const key = `${job}/${role}/${rank}`;
    if (place.current.key !== key) {
      place.current = { key, cursor: "", running: false };
      setKnown({ lines: [], error: null, loading: true });
    }
    const mine = place.current;
    if (mine.running) return;
    mine.running = true;
    get<LogPage>(jobPath(job, withQuery("/logs", { role, rank: role ? rank : "", cursor: mine.cursor, limit_bytes: PAGE_BYTES })))
      .then((page) => {
        if (place.current !== mine) return;
        mine.cursor = page.cursor;
        const fresh = page.chunks.flatMap((chunk) => chunk.text.replace(/\n$/, "").split("\n").map((text): LogLine => ({ vertex: chunk.vertex, text })));
        setKnown((old) => (fresh.length === 0 && !old.loading && !old.error ? old : { lines: [...old.lines, ...fresh].slice(-KEPT), error: null, loading: false }));
      })
      .catch((error: unknown) => {
        if (place.current === mine) setKnown((old) => ({ ...old, loading: false, error: error instanceof ApiError ? error : new ApiError(String(error), 1) }));
      })
      .finally(() => {
        mine.running = false;
      });
  }, [job, role, rank, tick]);
  return known;
}
