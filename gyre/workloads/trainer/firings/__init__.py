"""The firings of the graph: which start now, who runs them, and how their results are taken in."""
