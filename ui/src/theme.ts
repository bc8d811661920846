/** Dark or light: the system's choice, until the reader chooses; the choice is remembered. */
import { useEffect, useState } from "react";

export type Theme = "dark" | "light";

const KEY = "gyre-theme";
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const changedEvent = "gyre-theme";

function chosen(): Theme | null {
  try {
    const kept = localStorage.getItem(KEY);
    return kept === "dark" || kept === "light" ? kept : null;
  } catch {
    return null; // a browser that keeps nothing: the system's choice
  }
}

export function theme(): Theme {
  return chosen() ?? (dark.matches ? "dark" : "light");
}

/** Also before React draws, so that nothing flashes. */
export function applyTheme(): void {
  document.documentElement.dataset["theme"] = theme();
}

export function switchTheme(): void {
  const next: Theme = theme() === "dark" ? "light" : "dark";
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // it lasts as long as the page
  }
  document.documentElement.dataset["theme"] = next;
  window.dispatchEvent(new Event(changedEvent));
}

/** The theme in force. What draws on a canvas draws again when it changes. */
export function useTheme(): Theme {
  const [now, setNow] = useState<Theme>(() => (document.documentElement.dataset["theme"] as Theme) ?? theme());
  useEffect(() => {
    const read = (): void => setNow(document.documentElement.dataset["theme"] as Theme);
    const system = (): void => {
      if (chosen() === null) applyTheme();
      read();
    };
    dark.addEventListener("change", system);
    window.addEventListener(changedEvent, read);
    return () => {
      dark.removeEventListener("change", system);
      window.removeEventListener(changedEvent, read);
    };
  }, []);
  return now;
}

/** A colour of the palette, for a canvas: `colour("--c1")`. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
