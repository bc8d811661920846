/** The samples that the filters let through, page by page as they come into sight. */
import { useCallback, useEffect, useRef, useState } from "react";
import { ApiError, get, jobPath } from "../../data/api";
import { useConnection } from "../../data/connection";
import type { SampleItem, SamplePage } from "../../rest";
import { pathOf, type Filters } from "./filters";

const PAGE = 100;
/** So many pages are kept; the ones that were looked at longest ago go. */
const KEPT = 60;

export interface SampleList {
  readonly total: number | null;
  readonly histogram: SamplePage["histogram"] | null;
  readonly error: ApiError | null;
  readonly at: (index: number) => SampleItem | undefined;
  readonly onSight: (from: number, to: number) => void;
}

interface Known {
  readonly total: number | null;
  readonly histogram: SamplePage["histogram"] | null;
  readonly error: ApiError | null;
  readonly pages: ReadonlyMap<number, readonly SampleItem[]>;
}

const NOTHING: Known = { total: null, histogram: null, error: null, pages: new Map() };

export function useSampleList(job: string, filters: Filters, tick: number): SampleList {
  const key = pathOf(filters, PAGE, 0);
  const { generation } = useConnection();
  const [known, setKnown] = useState<Known & { readonly key: string }>({ ...NOTHING, key: "" });
  const asked = useRef<{ key: string; pages: Set<number> }>({ key: "", pages: new Set() });

  const load = useCallback((page: number) => {
    if (asked.current.pages.has(page)) return;
    const mine = asked.current;
    mine.pages.add(page);
    get<SamplePage>(jobPath(job, pathOf(filters, PAGE, page * PAGE)))
      .then((answer) => {
        if (asked.current !== mine) return;
        setKnown((old) => {
          const pages = new Map(old.key === key ? old.pages : []);
          pages.delete(page);
          pages.set(page, answer.samples);
          for (const one of pages.keys()) {
            if (pages.size <= KEPT) break;
            pages.delete(one);
            mine.pages.delete(one);
          }
          return { key, total: answer.total, histogram: answer.histogram, error: null, pages };
        });
      })
      .catch((error: unknown) => {
        mine.pages.delete(page);
        if (asked.current === mine) setKnown((old) => ({ ...(old.key === key ? old : { ...NOTHING, key }), error: error instanceof ApiError ? error : new ApiError(String(error), 1) }));
      });
    // `key` stands for the filters.
  }, [job, key]);

  useEffect(() => {
    asked.current = { key, pages: new Set() };
    load(0);
  }, [key, load, tick, generation]);

  const onSight = useCallback((from: number, to: number) => {
    for (let page = Math.floor(from / PAGE); page * PAGE < to; page++) load(page);
  }, [load]);
  const current = known.key === key ? known : { ...known, pages: NOTHING.pages };
  return { total: current.total, histogram: current.histogram, error: known.key === key ? known.error : null, at: (index) => current.pages.get(Math.floor(index / PAGE))?.[index % PAGE], onSight };
}
