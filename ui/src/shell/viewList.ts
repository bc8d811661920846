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
];
