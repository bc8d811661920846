/** A small curve without axes; what it says stands beside it in words. */
import { useMemo } from "react";
import { thinned } from "../data/thinning";
import { heightOf } from "./axes";

const WIDTH = 300;
const HEIGHT = 40;

export function Sparkline({ values, label }: { values: readonly (number | null)[]; label: string }) {
  const path = useMemo(() => pathOf(values), [values]);
  if (!path) return null;
  return (
    <svg className="spark" viewBox={`0 -2 ${WIDTH} ${HEIGHT + 4}`} preserveAspectRatio="none" role="img" aria-label={label}>
      <path d={path} />
    </svg>
  );
}

export function pathOf(values: readonly (number | null)[]): string {
  const xs = values.map((_, at) => at);
  const { x, y } = thinned(xs, values, WIDTH * 2);
  const there = y.filter((one): one is number => one !== null);
  if (there.length < 2) return "";
  const [low, high] = heightOf(Math.min(...there), Math.max(...there));
  const span = high - low;
  const last = xs.length - 1;
  let pen = "M";
  let path = "";
  y.forEach((value, at) => {
    if (value === null) {
      pen = "M";
      return;
    }
    path += `${pen}${(((x[at] ?? 0) / last) * WIDTH).toFixed(1)} ${(HEIGHT - ((value - low) / span) * HEIGHT).toFixed(1)}`;
    pen = "L";
  });
  return path;
}
