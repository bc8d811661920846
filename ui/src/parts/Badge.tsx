import type { ReactNode } from "react";
import type { Tone } from "../rest";

/** A shape for each tone, so that it is not told by colour alone. */
const MARKS: Readonly<Record<Tone, string>> = { good: "●", attention: "▲", bad: "■", over: "○" };

export function Badge({ tone, children }: { tone: Tone; children: ReactNode }) {
  return (
    <span className={`badge ${tone}`}>
      <span aria-hidden="true">{MARKS[tone]}</span>
      {children}
    </span>
  );
}

export function toneOfPhase(phase: string): Tone {
  switch (phase) {
    case "running":
    case "succeeded":
      return "good";
    case "failed":
      return "bad";
    case "stopped":
      return "over";
    default:
      return "attention";
  }
}
