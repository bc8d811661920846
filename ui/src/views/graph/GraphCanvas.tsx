/** The graph of operators, drawn by React Flow, with how each role is at the moment that `vertices` are of. */
import { useEffect, useMemo, useRef, useState } from "react";
import { BaseEdge, EdgeLabelRenderer, Handle, MarkerType, Position, ReactFlow, type Edge, type EdgeProps, type Node, type NodeProps } from "@xyflow/react";
import "@xyflow/react/dist/base.css";
import { Badge } from "../../parts/Badge";
import type { EdgeKind, Graph, GraphEdge, VertexSchema } from "../../rest";
import { NODE_HEIGHT, NODE_WIDTH, pathThrough, placed, refsOf, type Point } from "./layout";
import { roleStates, type RoleState } from "./phases";
import "./graph.css";

type OperatorNode = Node<{ role: string; method: string; state: RoleState | undefined; chosen: boolean }, "operator">;
type FlowEdge = Edge<{ edge: GraphEdge; points: readonly Point[] }, "flow">;

export const EDGE_KINDS: Readonly<Record<EdgeKind, string>> = { samples: "samples", weights: "weights", collective: "together", control: "control" };

interface Props {
  readonly graph: Graph;
  readonly vertices: readonly VertexSchema[];
  readonly chosen: string;
  readonly onChoose: (role: string) => void;
}

const LEAST_SCALE = 0.8;
const MOST_SCALE = 1.5;
const MOST_HEIGHT = 720;
const MARGIN = 20;

const NODE_TYPES = { operator: Operator };
const EDGE_TYPES = { flow: Flow };

export default function GraphCanvas({ graph, vertices, chosen, onChoose }: Props) {
  const host = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const element = host.current;
    if (!element) return;
    const observer = new ResizeObserver(() => setWidth(element.clientWidth));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  // Along the line where that stays legible, else from top to bottom.
  const places = useMemo(() => {
    const along = placed(graph, "LR");
    return along.width * LEAST_SCALE <= width ? along : placed(graph, "TB");
  }, [graph, width]);
  const scale = Math.min(MOST_SCALE, (width - 2 * MARGIN) / places.width);
  const states = useMemo(() => roleStates(vertices), [vertices]);
  const nodes = useMemo(
    () =>
      refsOf(graph).map((ref): OperatorNode => {
        const [role = ref, method = ""] = ref.split(".", 2);
        const state = states.get(role);
        return { id: ref, type: "operator", position: places.at.get(ref) ?? { x: 0, y: 0 }, width: NODE_WIDTH, height: NODE_HEIGHT, data: { role, method, state, chosen: role === chosen }, ariaLabel: `${ref}: ${state ? `${state.running} of ${state.total} run` : "nobody"}` };
      }),
    [graph, places, states, chosen],
  );
  const edges = useMemo(
    () => places.edges.map(({ id, edge, points }): FlowEdge => ({ id, type: "flow", source: edge.source, target: edge.target, data: { edge, points }, markerEnd: { type: MarkerType.ArrowClosed, color: `var(--edge-${edge.kind})` }, focusable: false })),
    [places],
  );
  return (
    <div ref={host} className="graph-canvas" style={{ height: Math.min(MOST_HEIGHT, places.height * Math.max(scale, LEAST_SCALE) + 2 * MARGIN) }}>
      {width > 0 && <ReactFlow key={`${places.width}/${Math.round(width / 40)}`} nodes={nodes} edges={edges} nodeTypes={NODE_TYPES} edgeTypes={EDGE_TYPES} fitView fitViewOptions={{ padding: `${MARGIN}px`, maxZoom: MOST_SCALE }} minZoom={0.1} nodesDraggable={false} nodesConnectable={false} elementsSelectable preventScrolling={false} onNodeClick={(_, node) => onChoose(node.data.role)} onSelectionChange={({ nodes: [one] }) => one && onChoose(one.data.role)} />}
    </div>
  );
}

function Operator({ data }: NodeProps<OperatorNode>) {
  const { state } = data;
  return (
    <div className={data.chosen ? "operator chosen" : "operator"}>
      <Handle type="target" position={Position.Left} isConnectable={false} />
      <div><strong>{data.role}</strong>{data.method && <span className="muted">.{data.method}</span>}</div>
      {state ? <Badge tone={state.tone}>{state.running} of {state.total} run</Badge> : <span className="muted small">nobody</span>}
      <div className="muted small one-line">{state?.why || state?.busy || ""}</div>
      <Handle type="source" position={Position.Right} isConnectable={false} />
    </div>
  );
}

function Flow({ id, data, markerEnd }: EdgeProps<FlowEdge>) {
  if (!data) return null;
  const { edge, points } = data;
  const middle = points[Math.floor(points.length / 2)] ?? { x: 0, y: 0 };
  return (
    <>
      <BaseEdge id={id} path={pathThrough(points)} className={`flow ${edge.kind}`} {...(markerEnd ? { markerEnd } : {})} />
      {edge.delay > 0 && (
        <EdgeLabelRenderer>
          <div className="flow-label" style={{ transform: `translate(-50%, -50%) translate(${middle.x}px, ${middle.y}px)` }}>{edge.delay} ahead</div>
        </EdgeLabelRenderer>
      )}
    </>
  );
}
