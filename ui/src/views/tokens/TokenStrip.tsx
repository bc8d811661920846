/** The whole sample on one strip: the values along it, its joints, the chosen token. A click goes there. */
import { useCallback } from "react";
import { Canvas, type Draw } from "../../parts/Canvas";
import { colour } from "../../theme";
import type { SampleTokens } from "../../rest";
import { jointsOf, type Scale } from "./scales";

interface Props {
  readonly sample: SampleTokens;
  readonly scale: Scale;
  readonly chosen: number;
  readonly onChoose: (at: number) => void;
}

export function TokenStrip({ sample, scale, chosen, onChoose }: Props) {
  const count = Math.max(1, sample.token_ids.length);
  const draw = useCallback<Draw>((context, width, height) => {
    const x = (at: number): number => (at / count) * width;
    if (scale.values) drawValues(context, scale.values, width, height);
    else drawKinds(context, scale, x, height);
    context.strokeStyle = colour("--text");
    context.setLineDash([3, 3]);
    for (const joint of jointsOf(sample)) line(context, x(joint.at), height);
    context.setLineDash([]);
    context.strokeStyle = colour("--c2");
    context.lineWidth = 2;
    line(context, x(chosen + 0.5), height);
    context.lineWidth = 1;
  }, [sample, scale, chosen, count]);
  return (
    <Canvas
      draw={draw}
      className="token-strip"
      role="img"
      aria-label={`${scale.title} along ${count} tokens; token ${chosen + 1} is chosen`}
      onClick={(event) => {
        const box = event.currentTarget.getBoundingClientRect();
        onChoose(Math.max(0, Math.min(count - 1, Math.floor(((event.clientX - box.left) / box.width) * count))));
      }}
    />
  );
}

function line(context: CanvasRenderingContext2D, x: number, height: number): void {
  context.beginPath();
  context.moveTo(x, 0);
  context.lineTo(x, height);
  context.stroke();
}

/** Of each column of pixels the value that is farthest from nought, so that no surprise is lost. */
function drawValues(context: CanvasRenderingContext2D, values: readonly (number | null)[], width: number, height: number): void {
  let low = 0;
  let high = 0;
  for (const value of values) {
    if (value !== null && value < low) low = value;
    if (value !== null && value > high) high = value;
  }
  const span = high - low || 1;
  const zero = (high / span) * height;
  const columns = Math.max(1, Math.floor(width));
  const [up, down] = [colour("--c1"), colour("--c2")];
  for (let column = 0; column < columns; column++) {
    const from = Math.floor((column / columns) * values.length);
    const to = Math.max(from + 1, Math.floor(((column + 1) / columns) * values.length));
    let far = 0;
    for (let at = from; at < to; at++) {
      const value = values[at];
      if (value != null && Math.abs(value) > Math.abs(far)) far = value;
    }
    context.fillStyle = far >= 0 ? up : down;
    const size = (Math.abs(far) / span) * height;
    context.fillRect(column, far >= 0 ? zero - size : zero, 1, Math.max(far === 0 ? 0 : 1, size));
  }
}

function drawKinds(context: CanvasRenderingContext2D, scale: Scale, x: (at: number) => number, height: number): void {
  let from = 0;
  for (let at = 1; at <= scale.classes.length; at++) {
    if (at < scale.classes.length && scale.classes[at] === scale.classes[from]) continue;
    const kind = Number((scale.classes[from] ?? "").slice(1));
    context.fillStyle = colour(`--c${(kind % 6) + 1}`);
    context.fillRect(x(from), height * 0.3, x(at) - x(from), height * 0.4);
    from = at;
  }
}
