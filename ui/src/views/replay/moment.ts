/**
 * The journal folded to where the slider is.
 *
 * Invariant *the last wish wins*: while one fold is asked for, only the newest position is kept; a slider that is
 * dragged over a million events never queues a million requests.
 */
import { useEffect, useRef, useState } from "react";
import { ApiError, get, jobPath } from "../../data/api";
import type { MomentSchema } from "../../rest";

export interface Asked {
  readonly moment: MomentSchema | null;
  readonly error: ApiError | null;
  readonly loading: boolean;
}

/** Folds looked at of late: going back and forth asks for nothing. */
const KEPT = 64;

export function useMoment(job: string, wanted: string | null): Asked {
  const [asked, setAsked] = useState<Asked>({ moment: null, error: null, loading: true });
  const place = useRef({ job, wanted, running: "", known: new Map<string, MomentSchema>() });
  useEffect(() => {
    const here = place.current;
    if (here.job !== job) here.known.clear();
    here.job = job;
    here.wanted = wanted;
    const next = (): void => {
      const query = here.wanted;
      if (query === null || here.running) return;
      const known = here.known.get(query);
      if (known) {
        setAsked({ moment: known, error: null, loading: false });
        return;
      }
      here.running = query;
      setAsked((old) => ({ ...old, loading: true }));
      get<MomentSchema>(jobPath(job, `/at?${query}`))
        .then((moment) => {
          here.known.set(query, moment);
          for (const old of here.known.keys()) {
            if (here.known.size <= KEPT) break;
            here.known.delete(old);
          }
          // A fold on the way is shown too: the picture follows the hand.
          setAsked({ moment, error: null, loading: here.wanted !== query });
        })
        .catch((error: unknown) => setAsked((old) => ({ ...old, loading: false, error: error instanceof ApiError ? error : new ApiError(String(error), 1) })))
        .finally(() => {
          here.running = "";
          if (here.wanted !== query) next();
        });
    };
    next();
  }, [job, wanted]);
  return asked;
}
