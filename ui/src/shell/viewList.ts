/** The views of a job, in the order in which people open them. Each is a part of its own, loaded when first shown. */
import { lazy, type ComponentType } from "react";

export interface ViewEntry {
  readonly id: string;
  readonly title: string;
  readonly group: "Every day" | "Looking back" | "The parts";
  readonly Component: ComponentType;
}

export const VIEWS: readonly ViewEntry[] = [
  { id: "now", title: "Now", group: "Every day", Component: lazy(() => import("../views/now/NowView")) },
  { id: "curves", title: "Curves", group: "Every day", Component: lazy(() => import("../views/curves/CurvesView")) },
  { id: "timeline", title: "Timeline", group: "Every day", Component: lazy(() => import("../views/timeline/TimelineView")) },
  { id: "samples", title: "Samples", group: "Every day", Component: lazy(() => import("../views/samples/SamplesView")) },
  { id: "tokens", title: "Tokens", group: "Every day", Component: lazy(() => import("../views/tokens/TokensView")) },
  { id: "replay", title: "Replay", group: "Looking back", Component: lazy(() => import("../views/replay/ReplayView")) },
  { id: "compare", title: "Compare", group: "Looking back", Component: lazy(() => import("../views/compare/CompareView")) },
  { id: "incidents", title: "Incidents", group: "Looking back", Component: lazy(() => import("../views/incidents/IncidentsView")) },
  { id: "fleet", title: "Fleet", group: "The parts", Component: lazy(() => import("../views/fleet/FleetView")) },
  { id: "graph", title: "Graph", group: "The parts", Component: lazy(() => import("../views/graph/GraphView")) },
  { id: "weights", title: "Weights", group: "The parts", Component: lazy(() => import("../views/weights/WeightsView")) },
  { id: "account", title: "Account", group: "The parts", Component: lazy(() => import("../views/account/AccountView")) },
  { id: "logs", title: "Logs", group: "The parts", Component: lazy(() => import("../views/logs/LogsView")) },
];
