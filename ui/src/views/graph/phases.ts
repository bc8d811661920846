/** How a role is, from its vertices. Pure. */
import { words } from "../../format";
import type { Tone, VertexSchema } from "../../rest";

export interface RoleState {
  readonly total: number;
  readonly running: number;
  readonly tone: Tone;
  /** Of those that do not run, why. */
  readonly why: string;
  readonly busy: string;
}

export function roleStates(vertices: readonly VertexSchema[]): Map<string, RoleState> {
  const byRole = new Map<string, VertexSchema[]>();
  for (const one of vertices) {
    const known = byRole.get(one.role);
    if (known) known.push(one);
    else byRole.set(one.role, [one]);
  }
  return new Map([...byRole].map(([role, list]) => [role, stateOf(list)]));
}

function stateOf(vertices: readonly VertexSchema[]): RoleState {
  const running = vertices.filter((one) => one.phase === "running").length;
  const away = vertices.find((one) => one.phase !== "running");
  const over = vertices.every((one) => one.phase === "stopped");
  const tone: Tone = over ? "over" : running === vertices.length ? "good" : running === 0 ? "bad" : "attention";
  const why = away ? `${away.id}: ${words(away.phase)}${away.reason ? `, ${words(away.reason)}` : ""}` : "";
  return { total: vertices.length, running, tone, why, busy: vertices.find((one) => one.busy)?.busy ?? "" };
}
