/**
 * Where the reader is: `#/jobs/{name}/{view}?key=value`. Everything that a link should share is in it. Parsing and
 * writing are pure; `useRoute` follows the address.
 */
import { useSyncExternalStore } from "react";

export interface Route {
  job: string;
  view: string;
  params: Readonly<Record<string, string>>;
}

export type Params = Record<string, string | number | null | undefined>;

export function parseRoute(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#?\/?/, "").split("?", 2);
  const parts = path.split("/").map(decoded);
  const params = Object.fromEntries(new URLSearchParams(query));
  if (parts[0] !== "jobs" || !parts[1]) return { job: "", view: parts[0] === "compare" ? "compare" : "jobs", params };
  return { job: parts[1], view: parts[2] || "now", params };
}

/** An address that somebody cut in the middle of an escape is still an address. */
function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Empty and missing parameters are left out. */
export function hrefOf(job: string, view: string, params: Params = {}): string {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) if (value != null && value !== "") query.set(key, String(value));
  const path = job ? `#/jobs/${encodeURIComponent(job)}/${view}` : `#/${view}`;
  return query.size ? `${path}?${query}` : path;
}

function subscribe(changed: () => void): () => void {
  window.addEventListener("hashchange", changed);
  return () => window.removeEventListener("hashchange", changed);
}

let known = "\0";
let route: Route = { job: "", view: "jobs", params: {} };

function current(): Route {
  if (window.location.hash !== known) {
    known = window.location.hash;
    route = parseRoute(known);
  }
  return route;
}

export function useRoute(): Route {
  return useSyncExternalStore(subscribe, current);
}

export function go(href: string): void {
  window.location.hash = href;
}

/** Changes parameters of the present view, without a new entry in the browser's history. */
export function setParams(changes: Params): void {
  const here = current();
  const href = hrefOf(here.job, here.view, { ...here.params, ...changes });
  if (href === window.location.hash) return;
  window.history.replaceState(null, "", href);
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}
