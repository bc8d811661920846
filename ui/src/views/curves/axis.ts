/** The x of all charts of the view: step or time, and the stretch that is looked at. */
export interface Axis {
  readonly name: string;
  readonly x: readonly number[];
  readonly range: readonly [number, number] | undefined;
  readonly format: (x: number) => string;
  readonly onRange: (from: number | null, to: number | null) => void;
}
