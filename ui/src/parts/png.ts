/** A chart as a picture: what is drawn, below its title, above the names of its lines. In the theme that is shown. */
import { colour } from "../theme";
import type { Line } from "./Chart";

const PADDING = 12;
const LINE = 18;

/** Saves the first canvas within `host` as `name`.png, in the screen's own pixels. */
export function savePng(host: HTMLElement, title: string, lines: readonly Line[], name: string): void {
  const chart = host.querySelector("canvas");
  const picture = document.createElement("canvas");
  const pen = picture.getContext("2d");
  if (!chart || !pen) return;
  const scale = chart.width / Math.max(1, chart.clientWidth);
  const width = chart.clientWidth + 2 * PADDING;
  const font = getComputedStyle(document.body).fontFamily;
  picture.width = width * scale;
  picture.height = (chart.clientHeight + (lines.length + 1) * LINE + 3 * PADDING) * scale;
  pen.scale(scale, scale);
  pen.fillStyle = colour("--bg");
  pen.fillRect(0, 0, picture.width, picture.height);
  pen.fillStyle = colour("--text");
  pen.font = `600 13px ${font}`;
  pen.fillText(title, PADDING, PADDING + 12, width - 2 * PADDING);
  const below = PADDING + LINE + 4;
  pen.drawImage(chart, PADDING, below, chart.clientWidth, chart.clientHeight);
  pen.font = `12px ${font}`;
  lines.forEach((line, at) => {
    const y = below + chart.clientHeight + PADDING + at * LINE;
    pen.strokeStyle = colour(line.colour);
    pen.lineWidth = 2;
    pen.setLineDash(line.dashed && line.dotted ? [7, 3, 1, 3] : line.dashed ? [5, 4] : line.dotted ? [2, 4] : []);
    pen.beginPath();
    pen.moveTo(PADDING, y + 6);
    pen.lineTo(PADDING + 24, y + 6);
    pen.stroke();
    pen.fillText(line.label, PADDING + 32, y + 10, width - 2 * PADDING - 32);
  });
  picture.toBlob((blob) => blob && save(blob, `${name}.png`), "image/png");
}

function save(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  // The browser has taken the address by the next turn; it is held until the download has begun.
  window.setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
