/** Where the page begins. */
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { App } from "./shell/App";
import { loadViews } from "./shell/useView";
import { parseRoute } from "./route";
import { applyTheme } from "./theme";
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/shell.css";
import "./styles/parts.css";

applyTheme();
loadViews(parseRoute(window.location.hash).view);
const root = document.getElementById("root");
if (root) createRoot(root).render(<StrictMode><App /></StrictMode>);
