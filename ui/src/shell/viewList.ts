/** The views of a job, in the order in which people open them. Each is a part of its own, loaded when first shown. */
import type { ComponentType } from "react";

export interface ViewEntry {
  readonly id: string;
  readonly title: string;
  readonly group: "Every day" | "Looking back" | "The parts";
  readonly load: () => Promise<{ default: ComponentType }>;
}

export const VIEWS: readonly ViewEntry[] = [
  { id: "now", title: "Now", group: "Every day", load: () => import("../views/now/NowView") },
  { id: "curves", title: "Curves", group: "Every day", load: () => import("../views/curves/CurvesView") },
  { id: "timeline", title: "Timeline", group: "Every day", load: () => import("../views/timeline/TimelineView") },
  { id: "samples", title: "Samples", group: "Every day", load: () => import("../views/samples/SamplesView") },
  { id: "tokens", title: "Tokens", group: "Every day", load: () => import("../views/tokens/TokensView") },
  { id: "replay", title: "Replay", group: "Looking back", load: () => import("../views/replay/ReplayView") },
  { id: "compare", title: "Compare", group: "Looking back", load: () => import("../views/compare/CompareView") },
  { id: "incidents", title: "Incidents", group: "Looking back", load: () => import("../views/incidents/IncidentsView") },
  { id: "fleet", title: "Fleet", group: "The parts", load: () => import("../views/fleet/FleetView") },
  { id: "graph", title: "Graph", group: "The parts", load: () => import("../views/graph/GraphView") },
  { id: "weights", title: "Weights", group: "The parts", load: () => import("../views/weights/WeightsView") },
  { id: "account", title: "Account", group: "The parts", load: () => import("../views/account/AccountView") },
  { id: "logs", title: "Logs", group: "The parts", load: () => import("../views/logs/LogsView") },
];
