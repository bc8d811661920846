/** The x of all charts of the view: step or time, and the stretch that is looked at. */
export interface Axis {
  readonly name: string;
  /** x is a time, in seconds since 1970. */
  readonly time: boolean;
  readonly x: readonly number[];
  readonly range: readonly [number, number] | undefined;
  readonly format: (x: number) => string;
  readonly onRange: (from: number | null, to: number | null) => void;
}
