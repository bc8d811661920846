/** Where the operators stand and how the edges run between them. Pure; dagre does the work. */
import { graphlib, layout } from "@dagrejs/dagre";
import type { Graph, GraphEdge } from "../../rest";

export const NODE_WIDTH = 168;
export const NODE_HEIGHT = 76;

export interface Point {
  readonly x: number;
  readonly y: number;
}

export interface PlacedEdge {
  readonly id: string;
  readonly edge: GraphEdge;
  readonly points: readonly Point[];
}

export interface Placed {
  readonly width: number;
  readonly height: number;
  readonly at: ReadonlyMap<string, Point>;
  readonly edges: readonly PlacedEdge[];
}

/** Of every operator its left upper corner, and of every edge the points that it runs through. Operators are those of
 *  the graph, and roles that only edges between roles name. */
export function placed(graph: Graph, direction: "LR" | "TB"): Placed {
  const dagre = new graphlib.Graph({ multigraph: true });
  dagre.setGraph({ rankdir: direction, nodesep: 28, ranksep: 44, edgesep: 20, marginx: 4, marginy: 4 });
  dagre.setDefaultEdgeLabel(() => ({}));
  for (const ref of refsOf(graph)) dagre.setNode(ref, { width: NODE_WIDTH, height: NODE_HEIGHT });
  const edges = [...graph.edges, ...graph.role_edges];
  edges.forEach((edge, at) => dagre.setEdge(edge.source, edge.target, edge.delay > 0 ? { width: 52, height: 18, labelpos: "c" } : {}, String(at)));
  layout(dagre);
  const at = new Map<string, Point>();
  for (const ref of dagre.nodes()) {
    const node = dagre.node(ref) as unknown as Point;
    at.set(ref, { x: node.x - NODE_WIDTH / 2, y: node.y - NODE_HEIGHT / 2 });
  }
  const size = dagre.graph() as unknown as { width: number; height: number };
  return {
    width: size.width,
    height: size.height,
    at,
    edges: edges.map((edge, number) => {
      const found = dagre.edge({ v: edge.source, w: edge.target, name: String(number) }) as unknown as { points?: Point[] } | undefined;
      return { id: `${number}`, edge, points: found?.points ?? [] };
    }),
  };
}

export function refsOf(graph: Graph): string[] {
  return [...new Set([...graph.operators.map((one) => one.ref), ...graph.role_edges.flatMap((edge) => [edge.source, edge.target])])];
}

/** A smooth path through the points. */
export function pathThrough(points: readonly Point[]): string {
  const [first, ...rest] = points;
  if (!first) return "";
  let path = `M${first.x},${first.y}`;
  rest.forEach((point, at) => {
    const next = rest[at + 1];
    if (!next) path += ` L${point.x},${point.y}`;
    else path += ` Q${point.x},${point.y} ${(point.x + next.x) / 2},${(point.y + next.y) / 2}`;
  });
  return path;
}
