/** The states of a lane: their names, colours, and shapes, for colour alone tells nobody anything. */
import type { SpanState } from "../../rest";

export interface StateLook {
  readonly state: SpanState;
  readonly text: string;
  readonly colour: string;
  /** How much of the lane's height is filled; work fills it all, waiting and idling do not. */
  readonly height: number;
  readonly hatched?: boolean;
}

export const STATES: readonly StateLook[] = [
  { state: "train", text: "trains", colour: "--s-train", height: 1 },
  { state: "generate", text: "generates", colour: "--s-generate", height: 1 },
  { state: "reward", text: "scores", colour: "--s-reward", height: 1 },
  { state: "evaluate", text: "evaluates", colour: "--s-evaluate", height: 1 },
  { state: "load", text: "loads weights", colour: "--s-load", height: 0.75 },
  { state: "checkpoint", text: "writes a checkpoint", colour: "--s-checkpoint", height: 0.75 },
  { state: "start", text: "starts", colour: "--s-start", height: 0.5 },
  { state: "wait", text: "waits", colour: "--s-wait", height: 0.4 },
  { state: "idle", text: "idle", colour: "--s-idle", height: 0.4 },
  { state: "down", text: "down", colour: "--s-down", height: 1, hatched: true },
];

const BY_STATE = new Map(STATES.map((one) => [one.state, one]));

/** A state that this page does not know is drawn as idle, and named as it is. */
export function lookOf(state: SpanState): StateLook {
  return BY_STATE.get(state) ?? { state, text: state, colour: "--s-idle", height: 0.4 };
}

/** Of these states nobody has any work. */
export const WASTED: readonly SpanState[] = ["idle", "wait", "down"];
