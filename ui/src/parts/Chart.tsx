/**
 * One chart of uPlot: lines over a common x, with or without a band. Charts of one `group` share their cursor; a drag
 * chooses a stretch of x, a double click all of it. uPlot draws again when the size, the theme or the data changes.
 */
import { useEffect, useRef } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { tick } from "../format";
import { colour, useTheme } from "../theme";
import { heightOf, labelsOf, moments, type Moment } from "./axes";
import { useRootSize } from "./rootSize";
import "./chart.css";

export interface Line {
  readonly label: string;
  readonly values: readonly (number | null)[];
  /** A colour of the palette: `--c1`. */
  readonly colour: string;
  readonly dashed?: boolean;
  readonly dotted?: boolean;
  readonly points?: boolean;
  /** The line goes on over points that only other lines have. */
  readonly bridged?: boolean;
}

export interface Band {
  readonly low: readonly (number | null)[];
  readonly high: readonly (number | null)[];
  readonly colour: string;
}

interface Props {
  readonly x: readonly number[];
  readonly lines: readonly Line[];
  readonly band?: Band | undefined;
  readonly label: string;
  readonly group: string;
  readonly formatX: (x: number) => string;
  readonly formatY: (y: number) => string;
  readonly tickY?: (y: number, step: number) => string;
  /** What x is: "step". */
  readonly nameX: string;
  /** x is a time, in seconds since 1970. */
  readonly time?: boolean | undefined;
  /** What the numbers are known to, in their unit: smaller differences are rounding. */
  readonly known?: number | undefined;
  readonly range?: readonly [number, number] | undefined;
  readonly onRange?: (from: number | null, to: number | null) => void;
  readonly height?: number;
  /** False where the page names the lines elsewhere. */
  readonly legend?: boolean;
  /** Logarithmic axes, which leave out what is not above nought. */
  readonly logX?: boolean;
  readonly logY?: boolean;
}

const AXIS_WIDTH = 60;

export function Chart({ x, lines, band, label, group, formatX, formatY, tickY = tick, nameX, time = false, known, range, onRange, height = 150, legend = true, logX = false, logY = false }: Props) {
  const host = useRef<HTMLDivElement>(null);
  const readout = useRef<HTMLParagraphElement>(null);
  const theme = useTheme();
  const tall = (height * useRootSize()) / 16;
  const plot = useRef<uPlot | null>(null);
  const callbacks = useRef<Callbacks>({ formatX, tickY, known, onRange, onCursor: () => undefined });
  callbacks.current = {
    formatX,
    tickY,
    known,
    onRange,
    onCursor: (at) => {
      if (readout.current) readout.current.textContent = at === null ? "" : [`${nameX} ${formatX(x[at] ?? 0)}`, ...lines.map((line) => `${lines.length > 1 ? `${line.label} ` : ""}${formatOf(line.values[at], formatY)}`)].join("  ");
    },
  };
  const shape = lines.map((line) => `${line.label}|${line.colour}|${line.dashed ?? ""}|${line.dotted ?? ""}|${line.points ?? ""}`).join(";") + (band ? "+band" : "") + (logX ? "+logX" : "") + (logY ? "+logY" : "") + (time ? "+time" : "");

  useEffect(() => {
    const element = host.current;
    if (!element) return;
    const made = new uPlot(optionsOf(lines, band, group, element.clientWidth || 300, tall, callbacks, logX, logY, time), dataOf(x, lines, band, logY), element);
    plot.current = made;
    const observer = new ResizeObserver(() => {
      if (element.clientWidth > 0) made.setSize({ width: element.clientWidth, height: tall });
    });
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
    // Data comes in below, without a new chart.
  }, [shape, theme, group, tall]);

  useEffect(() => {
    const one = plot.current;
    if (!one) return;
    one.batch(() => {
      one.setData(dataOf(x, lines, band, logY), false);
      const first = x[0] ?? (logX ? 1 : 0);
      const last = x.at(-1) ?? 1;
      one.setScale("x", { min: range?.[0] ?? first, max: range?.[1] ?? Math.max(last, first + 1e-9) });
    });
  }, [x, lines, band, range?.[0], range?.[1], shape, theme, tall]);

  return (
    <div className="chart">
      <div ref={host} role="img" aria-label={label} />
      {legend && lines.length > 1 && (
        <ul className="legend">
          {lines.map((line) => <li key={line.label}><span className={line.dashed ? "stroke dashed" : "stroke"} style={{ borderColor: `var(${line.colour})` }} />{line.label}</li>)}
        </ul>
      )}
      <p ref={readout} className="readout" aria-hidden="true" />
    </div>
  );
}

function formatOf(value: number | null | undefined, format: (value: number) => string): string {
  return value == null ? "–" : format(value);
}

interface Callbacks {
  readonly formatX: (x: number) => string;
  readonly tickY: (y: number, step: number) => string;
  readonly known: number | undefined;
  readonly onRange: Props["onRange"];
  /** The place of the point under the cursor; null: none is. */
  readonly onCursor: (at: number | null) => void;
}

function optionsOf(lines: readonly Line[], band: Band | undefined, group: string, width: number, height: number, callbacks: { readonly current: Callbacks }, logX: boolean, logY: boolean, time: boolean): uPlot.Options {
  const root = Number.parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;
  const font = `${11 * root}px ${getComputedStyle(document.body).fontFamily}`;
  const axis: uPlot.Axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font };
  const series: uPlot.Series[] = [
    {},
    ...lines.map((line): uPlot.Series => ({
      label: line.label,
      stroke: colour(line.colour),
      width: 1.5 * root,
      ...(line.dashed ? { dash: [5, 4] } : line.dotted ? { dash: [1, 4], cap: "round" as const } : {}),
      points: { show: line.points ?? false, size: 6 },
      spanGaps: line.points || line.bridged || false,
    })),
  ];
  if (band) {
    const edge: uPlot.Series = { stroke: "transparent", width: 0, points: { show: false } };
    series.push({ ...edge, label: "high" }, { ...edge, label: "low" });
  }
  return {
    width,
    height,
    series,
    ...(band ? { bands: [{ series: [series.length - 2, series.length - 1], fill: `${colour(band.colour)}2b` }] } : {}),
    scales: { x: { time: false, ...(logX ? { distr: 3 as const } : {}) }, y: logY ? { distr: 3 as const, range: logRangeOf } : { range: (_, low, high) => heightOf(low, high, callbacks.current.known) } },
    axes: [
      { ...axis, size: 24 * root, space: 48 * root, ...(logX ? { filter: (_: uPlot, splits: number[]) => splits.map(decade) } : {}), ...(time ? { splits: (self: uPlot, _: number, low: number, high: number) => ticksOf(self, low, high, root).map((one) => one.at), values: (self: uPlot) => ticksOf(self, self.scales["x"]?.min ?? 0, self.scales["x"]?.max ?? 0, root).map((one) => one.label) } : { values: (_: uPlot, splits: (number | null)[]) => splits.map((one) => (one === null ? "" : callbacks.current.formatX(one))) }) },
      { ...axis, size: AXIS_WIDTH * root, space: 28 * root, ...(logY ? { filter: (_: uPlot, splits: number[]) => splits.map(decade) } : {}), values: (_, splits) => (logY ? splits.map((one) => (one === null ? "" : tick(one, one))) : labelsOf(splits, (one) => callbacks.current.tickY(one, Math.abs((splits[1] ?? 1) - (splits[0] ?? 0))))) },
    ],
    legend: { show: false },
    cursor: { sync: { key: group }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
    hooks: {
      setCursor: [(self) => callbacks.current.onCursor(self.cursor.idx ?? null)],
      setSelect: [
        (self) => {
          if (self.select.width < 4) return;
          callbacks.current.onRange?.(self.posToVal(self.select.left, "x"), self.posToVal(self.select.left + self.select.width, "x"));
          self.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        },
      ],
      ready: [(self) => self.over.addEventListener("dblclick", () => callbacks.current.onRange?.(null, null))],
    },
  };
}

/** In pixels at a root size of 16: a label and the room beside it, of a clock and of a date with it. */
const CLOCK_WIDTH = 60;
const DATE_WIDTH = 84;
const CLOCK_LENGTH = 8;

function ticksOf(self: uPlot, low: number, high: number, root: number): Moment[] {
  const width = self.bbox.width / devicePixelRatio / root;
  const found = moments(low, high, width / CLOCK_WIDTH);
  return found.some((one) => one.label.length > CLOCK_LENGTH) ? moments(low, high, width / DATE_WIDTH) : found;
}

/** Whole decades around the values; a decade where there are none. */
function logRangeOf(_: uPlot, low: number | null, high: number | null): uPlot.Range.MinMax {
  if (low === null || high === null || low <= 0) return [0.1, 1];
  return [10 ** Math.floor(Math.log10(low)), 10 ** Math.max(Math.ceil(Math.log10(high)), Math.floor(Math.log10(low)) + 1)];
}

/** Of the ticks of a logarithmic axis the whole powers of ten, and 2 and 5 of each, have a number. */
function decade(value: number): number | null {
  const lead = value / 10 ** Math.floor(Math.log10(value) + 1e-9);
  return [1, 2, 5].some((one) => Math.abs(lead - one) < 1e-6) ? value : null;
}

function dataOf(x: readonly number[], lines: readonly Line[], band: Band | undefined, logY: boolean): uPlot.AlignedData {
  const columns = lines.map((line) => (logY ? line.values.map((value) => (value !== null && value > 0 ? value : null)) : [...line.values]));
  if (band) columns.push([...band.high], [...band.low]);
  return [[...x], ...columns];
}
