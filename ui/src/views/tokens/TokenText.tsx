/**
 * The tokens as text that can be read, searched and copied. They are in pieces, and the browser lays out only those in
 * sight, so that 100,000 tokens scroll; a piece is drawn again only if the chosen token enters or leaves it.
 */
import { memo, useMemo, type ReactNode } from "react";
import type { SampleTokens } from "../../rest";
import { marksOf } from "./conversation";
import { jointsOf, seesLoss, type Joint, type Scale } from "./scales";

/** A piece ends with a line of the text after `LEAST` tokens, or anywhere after `MOST`. */
const LEAST = 150;
const MOST = 800;

function chunksOf(sample: SampleTokens): [number, number][] {
  const count = sample.token_ids.length;
  const chunks: [number, number][] = [];
  let from = 0;
  for (let at = 1; at <= count; at++) {
    const ends = at === count || at - from >= MOST || (at - from >= LEAST && sample.pieces?.[at - 1]?.endsWith("\n"));
    if (!ends) continue;
    chunks.push([from, at]);
    from = at;
  }
  return chunks;
}

interface Props {
  readonly sample: SampleTokens;
  readonly scale: Scale;
  readonly chosen: number;
  readonly onChoose: (at: number) => void;
}

export function TokenText({ sample, scale, chosen, onChoose }: Props) {
  const joints = [...marksOf(sample), ...jointsOf(sample)];
  const chunks = useMemo(() => chunksOf(sample), [sample]);
  const choose = (event: React.MouseEvent): void => {
    const at = (event.target as HTMLElement).dataset["at"];
    if (at !== undefined) onChoose(Number(at));
  };
  return (
    <div className="token-text" onClick={choose}>
      {chunks.map(([from, to]) => (
        <Chunk key={from} sample={sample} scale={scale} from={from} to={to} chosen={chosen >= from && chosen < to ? chosen : -1} joints={joints.filter((one) => one.at >= from && one.at < to)} />
      ))}
    </div>
  );
}

interface ChunkProps {
  readonly sample: SampleTokens;
  readonly scale: Scale;
  readonly from: number;
  readonly to: number;
  readonly chosen: number;
  readonly joints: readonly Joint[];
}

const Chunk = memo(function Chunk({ sample, scale, from, to, chosen, joints }: ChunkProps) {
  const parts: ReactNode[] = [];
  for (let at = from; at < to; at++) {
    for (const joint of joints) if (joint.at === at) parts.push(<span key={`joint-${at}-${joint.text}`} className="joint">{joint.text}</span>);
    const seen = seesLoss(sample, at);
    const classes = ["t", seen ? scale.classes[at] : "masked", at === chosen ? "chosen" : ""].filter(Boolean).join(" ");
    parts.push(<span key={at} id={`t${at}`} data-at={at} className={classes}>{pieceOf(sample, at)}</span>);
  }
  return <span className="chunk">{parts}</span>;
}, (old, now) => old.sample === now.sample && old.scale === now.scale && old.chosen === now.chosen);

export function pieceOf(sample: SampleTokens, at: number): string {
  const piece = sample.pieces?.[at];
  return piece === undefined ? `⟨${sample.token_ids[at]}⟩ ` : piece === "" ? "∅" : piece.replaceAll("\n", "↵\n");
}
