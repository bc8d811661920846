/** The lines of a job's processes: the newest page first, or what came since a time, and then what comes after it. */
import { useEffect, useRef, useState } from "react";
import { ApiError, get, jobPath } from "../../data/api";
import { withQuery } from "../../data/job";
import type { LogLine, LogPage } from "../../rest";

/** Which lines are wanted. Empty texts narrow nothing; `minutes` is how far back. */
export interface Wanted {
  readonly role: string;
  readonly rank: string;
  readonly level: string;
  readonly grep: string;
  readonly minutes: string;
}

interface Known {
  readonly lines: readonly LogLine[];
  readonly missing: readonly string[];
  /** Seconds since 1970: what is older was not looked at. */
  readonly searchedFrom: number | null;
  readonly error: ApiError | null;
  readonly loading: boolean;
}

/** Older lines go; the files have them. */
const KEPT = 50_000;
const PAGE_BYTES = 2 ** 19;
const NOTHING: Known = { lines: [], missing: [], searchedFrom: null, error: null, loading: true };

export function useLogs(job: string, wanted: Wanted, tick: number): Known {
  const [known, setKnown] = useState<Known>(NOTHING);
  const [pages, setPages] = useState(0);
  const { role, rank, level, grep, minutes } = wanted;
  const place = useRef({ key: "", cursor: "", since: "", running: false, refused: false });
  useEffect(() => {
    const key = JSON.stringify([job, role, rank, level, grep, minutes]);
    if (place.current.key !== key) {
      const since = minutes ? String(Date.now() / 1000 - 60 * Number(minutes)) : "";
      place.current = { key, cursor: "", since, running: false, refused: false };
      setKnown(NOTHING);
    }
    const mine = place.current;
    if (mine.running || mine.refused) return;
    mine.running = true;
    get<LogPage>(jobPath(job, withQuery("/logs", { role, rank: role ? rank : "", level, grep, since: mine.since, cursor: mine.cursor, limit_bytes: PAGE_BYTES })))
      .then((page) => {
        if (place.current !== mine) return;
        const first = mine.cursor === "";
        mine.cursor = page.cursor;
        mine.running = false;
        if (page.more) setPages((read) => read + 1);
        setKnown((old) => {
          if (!first && page.lines.length === 0 && !old.error) return old;
          return { lines: [...old.lines, ...page.lines].slice(-KEPT), missing: first ? page.missing : old.missing, searchedFrom: first ? page.searched_from : old.searchedFrom, error: null, loading: false };
        });
      })
      .catch((error: unknown) => {
        if (place.current !== mine) return;
        const told = error instanceof ApiError ? error : new ApiError(String(error), 1);
        mine.refused = told.status === 422;
        setKnown((old) => ({ ...old, loading: false, error: told }));
      })
      .finally(() => {
        mine.running = false;
      });
  }, [job, role, rank, level, grep, minutes, tick, pages]);
  return known;
}
