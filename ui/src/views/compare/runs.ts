import type { JobView, Json, Step } from "../../rest";

/** One job of a comparison, and how it is drawn. */
export interface Run {
  readonly name: string;
  readonly colour: string;
  readonly dashed: boolean;
  readonly steps: readonly Step[];
  readonly view: JobView | undefined;
  readonly spec: Record<string, Json> | undefined;
}
