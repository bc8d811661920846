/**
 * What the server said of one path, shared by all who show it.
 *
 * Invariants:
 * - *the last data stays*: a failed or a running request never removes what is known;
 * - *one request*: a path has at most one request at a time, however many views want it.
 */
import { useEffect, useSyncExternalStore } from "react";
import { ApiError, get } from "./api";
import { useConnection } from "./connection";

export interface Loaded<T> {
  readonly data: T | undefined;
  readonly error: ApiError | null;
  readonly loading: boolean;
}

/** Paths with filters are many; those asked for longest ago are forgotten. */
const KEPT = 400;

const NOTHING: Loaded<never> = { data: undefined, error: null, loading: true };

class Resource {
  state: Loaded<unknown> = NOTHING;
  readonly listeners = new Set<() => void>();
  private running = false;
  private wanted = "";
  private loaded = "";

  constructor(private readonly path: string) {}

  /** `stamp` says which state of the world is wanted; one that is there already is not asked for again. */
  load(stamp: string): void {
    this.wanted = stamp;
    if (this.running || this.loaded === stamp) return;
    this.running = true;
    this.loaded = stamp;
    void get<unknown>(this.path)
      .then((data) => this.become({ data, error: null, loading: false }))
      .catch((error: unknown) => {
        const known = error instanceof ApiError ? error : new ApiError(String(error), 1);
        this.become({ ...this.state, error: known, loading: false });
      })
      .finally(() => {
        this.running = false;
        if (this.wanted !== this.loaded && this.listeners.size > 0) this.load(this.wanted);
      });
  }

  private become(state: Loaded<unknown>): void {
    this.state = state;
    for (const changed of this.listeners) changed();
  }
}

const resources = new Map<string, Resource>();

function resourceOf(path: string): Resource {
  const known = resources.get(path);
  if (known) {
    resources.delete(path);
    resources.set(path, known);
    return known;
  }
  const made = new Resource(path);
  resources.set(path, made);
  for (const [old, one] of resources) {
    if (resources.size <= KEPT) break;
    if (one.listeners.size === 0 && one !== made) resources.delete(old);
  }
  return made;
}

/** `tick` grows when the data may have changed. A null path asks for nothing. */
export function useResource<T>(path: string | null, tick = 0): Loaded<T> {
  const { generation } = useConnection();
  const resource = path === null ? null : resourceOf(path);
  useEffect(() => resource?.load(`${generation}/${tick}`), [resource, generation, tick]);
  return useSyncExternalStore(
    (changed) => {
      resource?.listeners.add(changed);
      return () => resource?.listeners.delete(changed);
    },
    () => (resource?.state ?? NOTHING) as Loaded<T>,
  );
}
