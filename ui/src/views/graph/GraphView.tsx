/** What flows where, and how each role is. A click, or Enter, on an operator gives its role's story. */
import { useMemo } from "react";
import { useJob, useJobView } from "../../data/job";
import { useLive } from "../../data/live";
import { clock, plural, words } from "../../format";
import { Refused } from "../../parts/Refused";
import type { Graph, GraphEdge, JobView } from "../../rest";
import { hrefOf, setParams, useRoute } from "../../route";
import { VertexTable } from "../fleet/VertexTable";
import "../fleet/fleet.css";
import GraphCanvas, { EDGE_KINDS } from "./GraphCanvas";

const INCIDENTS = 10;

export default function GraphView() {
  const { data: graph, error } = useJob<Graph>("/graph?placement=false", Infinity);
  const { data: view } = useJobView();
  const { params } = useRoute();
  const role = params["role"] ?? "";
  if (!graph || !view) return <><h1>Graph</h1>{error ? <Refused error={error} /> : <p className="empty">Loading …</p>}</>;
  return (
    <>
      <div className="head">
        <h1>Graph</h1>
        <span className="muted">recipe {graph.recipe || "of the job's own"}; {plural(graph.operators.length, "operator")}</span>
      </div>
      <ul className="legend">
        {Object.entries(EDGE_KINDS).map(([kind, text]) => <li key={kind}><span className={`flow-swatch ${kind}`} />{text}</li>)}
      </ul>
      <GraphCanvas graph={graph} vertices={view.vertices} chosen={role} onChoose={(one) => setParams({ role: one })} />
      {role ? <RoleStory graph={graph} view={view} role={role} /> : <p className="muted">Choose an operator to see its role's vertices, edges and incidents.</p>}
    </>
  );
}

function RoleStory({ graph, view, role }: { graph: Graph; view: JobView; role: string }) {
  const { job } = useLive();
  const vertices = useMemo(() => view.vertices.filter((one) => one.role === role), [view, role]);
  const incidents = view.incidents.filter((one) => one.vertex.replace(/-\d+$/, "") === role).slice(-INCIDENTS).reverse();
  const of = (ref: string): boolean => ref.split(".")[0] === role;
  const edges = [...graph.edges, ...graph.role_edges].filter((edge) => of(edge.source) || of(edge.target));
  const about = graph.roles.find((one) => one.name === role);
  return (
    <section aria-labelledby="role" className="stack">
      <div className="head">
        <h2 id="role">{role}</h2>
        {about && <span className="muted mono">{about.entrypoint}</span>}
        {about?.gang && <span className="muted">a gang: its ranks restart together</span>}
        {about?.elastic && <span className="muted">elastic, {about.elastic.min} to {about.elastic.max}</span>}
        <a href={hrefOf(job, "logs", { role })}>Logs</a>
      </div>
      <VertexTable vertices={vertices} ended={view.job.ended_at !== null} />
      {edges.length > 0 && (
        <ul>
          {edges.map((edge, at) => <li key={at}>{edge.source} → {edge.target}: {sayEdge(edge)}</li>)}
        </ul>
      )}
      {incidents.length > 0 && (
        <ul>
          {incidents.map((one) => <li key={one.id}><span className="mono">{clock(one.at)}</span> <a href={hrefOf(job, "incidents", { id: one.id })}>{one.vertex}: {words(one.cause)}</a>, {one.decision}</li>)}
        </ul>
      )}
    </section>
  );
}

function sayEdge(edge: GraphEdge): string {
  const parts = [EDGE_KINDS[edge.kind]];
  if (edge.kind !== "collective") parts.push(`${edge.produce} made, ${edge.consume} taken at a time`);
  if (edge.delay > 0) parts.push(`up to ${edge.delay} ahead`);
  if (edge.capacity !== null) parts.push(`holds up to ${edge.capacity}`);
  return parts.join(", ");
}
