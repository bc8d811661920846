/** Every vertex of the job, however many: by role and rank. */
import { useState } from "react";
import { useLive } from "../../data/live";
import { ago, plural, whole, words } from "../../format";
import { Badge } from "../../parts/Badge";
import { SourceNumbers } from "../../parts/SourceNumbers";
import { useRootSize } from "../../parts/rootSize";
import { VirtualList } from "../../parts/VirtualList";
import type { Tone, VertexSchema } from "../../rest";
import { go, hrefOf } from "../../route";

export function toneOfVertex(vertex: VertexSchema): Tone {
  if (vertex.phase === "running") return "good";
  return vertex.phase === "stopped" ? "over" : "attention";
}

interface Props {
  readonly vertices: readonly VertexSchema[];
  readonly ended: boolean;
  /** When that was, in seconds since 1970; undefined: the present. */
  readonly now?: number | undefined;
}

export function VertexTable({ vertices, ended, now = Date.now() / 1000 }: Props) {
  const { job } = useLive();
  const [chosen, setChosen] = useState<number | null>(null);
  const lineHeight = 2 * useRootSize();
  const name = chosen === null ? undefined : vertices[chosen]?.id;
  return (
    <>
      <div className="fleet-wide">
        <div className="vertex-line fleet-head" aria-hidden="true">
          <span>vertex</span><span>phase</span><span>since</span><span>does</span><span className="n">starts</span><span>machine</span><span>message</span>
        </div>
        <VirtualList
          className={vertices.length > 12 ? "fleet-list tall" : "fleet-list"}
          count={vertices.length}
          lineHeight={lineHeight}
          label="Vertices"
          chosen={chosen}
          onChoose={setChosen}
          onOpen={(at) => go(hrefOf(job, "logs", { role: vertices[at]?.role, rank: vertices[at]?.rank }))}
          line={(at) => {
            const one = vertices[at];
            if (!one) return null;
            return (
              <div className="vertex-line">
                <span><strong>{one.id}</strong></span>
                <span><Badge tone={toneOfVertex(one)}>{words(one.phase)}</Badge></span>
                <span className="muted">{ended ? "" : ago(one.since, now)}</span>
                <span>{one.busy}</span>
                <span className="n">{whole(one.incarnation)}</span>
                <span>{one.node}</span>
                <span className="muted">{saidOf(one, now)}</span>
              </div>
            );
          }}
        />
      </div>
      {name && <SourceNumbers source={`vertex/${name}`} title={name} />}
    </>
  );
}

function saidOf(one: VertexSchema, now: number): string {
  const said = one.silent
    ? `${one.silent}: last heard ${ago(one.silent_since, now)}`
    : one.message || one.no_room || words(one.reason);
  const alarms = one.false_alarms ? plural(one.false_alarms, "false alarm") : "";
  return [said, alarms].filter(Boolean).join("; ");
}
