/**
 * The component of a view, once it is loaded.
 *
 * Invariant *no view is out of reach*: soon after the page has opened, all views are loaded, so that they can be opened
 * while the server is away.
 */
import { useEffect, useState, type ComponentType } from "react";
import { VIEWS, type ViewEntry } from "./viewList";

/** By then the first view has what it needs. */
const REST_AFTER_MS = 3000;

const loaded = new Map<string, ComponentType>();

function load(view: ViewEntry): Promise<void> {
  return view.load().then((module) => void loaded.set(view.id, module.default));
}

export interface ShownView {
  readonly Component: ComponentType | undefined;
  /** It could not be loaded. */
  readonly failed: boolean;
}

export function useView(view: ViewEntry | undefined): ShownView {
  const [failed, setFailed] = useState(false);
  const [, setLoaded] = useState("");
  useEffect(() => {
    setFailed(false);
    if (!view || loaded.has(view.id)) return;
    load(view).then(() => setLoaded(view.id), () => setFailed(true));
  }, [view]);
  return { Component: view && loaded.get(view.id), failed };
}

/** Begins with the view that the address names; the others come when the browser has time. */
export function loadViews(first: string): void {
  // What fails here is tried again when it is wanted.
  const quietly = (view: ViewEntry): Promise<void> => load(view).catch(() => undefined);
  const wanted = VIEWS.find((view) => view.id === first);
  if (wanted) void quietly(wanted);
  window.setTimeout(() => void Promise.all(VIEWS.filter((view) => !loaded.has(view.id)).map(quietly)), REST_AFTER_MS);
}
