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

/** The generation of the connection, and the tick. */
type Stamp = readonly [number, number];

const NEVER: Stamp = [-1, -1];

function isNewer(one: Stamp, other: Stamp): boolean {
  return one[0] > other[0] || (one[0] === other[0] && one[1] > other[1]);
}

class Resource {
  state: Loaded<unknown> = NOTHING;
  readonly listeners = new Set<() => void>();
  private running = false;
  private wanted: Stamp = NEVER;
  private loaded: Stamp = NEVER;

  constructor(private readonly path: string) {}

  /** `wanted` says how new the data must be; data that is as new is not asked for again. */
  load(wanted: Stamp): void {
    if (isNewer(wanted, this.wanted)) this.wanted = wanted;
    if (this.running || !isNewer(this.wanted, this.loaded)) return;
    this.running = true;
    this.loaded = this.wanted;
    void get<unknown>(this.path)
      .then((data) => this.become({ data, error: null, loading: false }))
      .catch((error: unknown) => {
        const known = error instanceof ApiError ? error : new ApiError(String(error), 1);
        this.become({ ...this.state, error: known, loading: false });
      })
      .finally(() => {
        this.running = false;
        if (this.listeners.size > 0) this.load(this.wanted);
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

/** `tick` grows when the data may have changed; `every` is of how many ticks one is enough, for what is dear to
 *  compute. A null path asks for nothing; with a null tick what others asked for is followed. */
export function useResource<T>(path: string | null, tick: number | null = 0, every = 1): Loaded<T> {
  const { generation } = useConnection();
  const resource = path === null ? null : resourceOf(path);
  const wanted = tick === null ? null : every === Infinity ? 0 : tick - (tick % every);
  useEffect(() => {
    if (wanted !== null) resource?.load([generation, wanted]);
  }, [resource, generation, wanted]);
  return useSyncExternalStore(
    (changed) => {
      resource?.listeners.add(changed);
      return () => resource?.listeners.delete(changed);
    },
    () => (resource?.state ?? NOTHING) as Loaded<T>,
  );
}
