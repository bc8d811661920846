/** Whether the server answers, since when it does not, and whether it wants a token. One for the whole page. */
import { useSyncExternalStore } from "react";

export interface Connection {
  /** Since when nobody answers, in seconds since 1970; null while somebody does. */
  readonly awaySince: number | null;
  readonly needsToken: boolean;
  /** Grows when everything should be asked for again: after a token was given, after the server came back. */
  readonly generation: number;
}

let state: Connection = { awaySince: null, needsToken: false, generation: 0 };
const listeners = new Set<() => void>();

function become(next: Partial<Connection>): void {
  state = { ...state, ...next };
  for (const changed of listeners) changed();
}

export function answered(): void {
  if (state.awaySince !== null) become({ awaySince: null, generation: state.generation + 1 });
}

export function failed(): void {
  if (state.awaySince === null) become({ awaySince: Date.now() / 1000 });
}

export function askForToken(): void {
  if (!state.needsToken) become({ needsToken: true });
}

export function tokenGiven(): void {
  become({ needsToken: false, generation: state.generation + 1 });
}

export function useConnection(): Connection {
  return useSyncExternalStore(
    (changed) => {
      listeners.add(changed);
      return () => listeners.delete(changed);
    },
    () => state,
  );
}
