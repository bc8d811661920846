/** A canvas as sharp as the screen and as wide as its place; it is drawn again when size, theme or drawing change. */
import { useEffect, useRef, type CanvasHTMLAttributes } from "react";
import { useTheme } from "../theme";

export type Draw = (context: CanvasRenderingContext2D, width: number, height: number) => void;

interface Props extends CanvasHTMLAttributes<HTMLCanvasElement> {
  readonly draw: Draw;
  readonly canvasRef?: React.RefObject<HTMLCanvasElement | null>;
}

export function Canvas({ draw, canvasRef, ...rest }: Props) {
  const own = useRef<HTMLCanvasElement>(null);
  const ref = canvasRef ?? own;
  const theme = useTheme();
  useEffect(() => {
    const canvas = ref.current;
    const context = canvas?.getContext("2d");
    if (!canvas || !context) return;
    let frame = 0;
    const paint = (): void => {
      frame = 0;
      const scale = window.devicePixelRatio || 1;
      const [width, height] = [canvas.clientWidth, canvas.clientHeight];
      if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
        canvas.width = Math.round(width * scale);
        canvas.height = Math.round(height * scale);
      }
      context.setTransform(scale, 0, 0, scale, 0, 0);
      context.clearRect(0, 0, width, height);
      draw(context, width, height);
    };
    const soon = (): void => {
      frame ||= requestAnimationFrame(paint);
    };
    soon();
    const observer = new ResizeObserver(soon);
    observer.observe(canvas);
    return () => {
      observer.disconnect();
      cancelAnimationFrame(frame);
    };
  }, [draw, theme, ref]);
  return <canvas ref={ref} {...rest} />;
}
