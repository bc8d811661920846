/** Keys that work in every view: `?` shows them, `/` goes to the search, `g` and a letter open a view. */
import { useEffect } from "react";
import { go, hrefOf, type Route } from "../route";

/** By the letter after `g`. */
export const GO_KEYS: Readonly<Record<string, string>> = {
  n: "now", c: "curves", t: "timeline", s: "samples", r: "replay", o: "compare", f: "fleet", g: "graph", w: "weights", a: "account", i: "incidents", l: "logs",
};

/** How long after `g` the letter may come. */
const SECOND_KEY_MS = 1500;

export function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}

export function useKeys(route: Route, showKeys: () => void): void {
  useEffect(() => {
    let waitsSince = -Infinity;
    const pressed = (event: KeyboardEvent): void => {
      if (event.key === "Escape" && isTyping(event.target)) (event.target as HTMLElement).blur();
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || document.querySelector("dialog[open]")) return;
      if (event.key === "?") showKeys();
      else if (event.key === "/") {
        const search = document.querySelector<HTMLElement>("input[type=search]");
        if (!search) return;
        event.preventDefault();
        search.focus();
      } else if (event.key === "g" && event.timeStamp - waitsSince > SECOND_KEY_MS) {
        waitsSince = event.timeStamp;
        return;
      } else if (event.timeStamp - waitsSince <= SECOND_KEY_MS && route.job) {
        const view = GO_KEYS[event.key];
        if (view) go(hrefOf(route.job, view));
      }
      waitsSince = -Infinity;
    };
    window.addEventListener("keydown", pressed);
    return () => window.removeEventListener("keydown", pressed);
  }, [route.job, showKeys]);
}
