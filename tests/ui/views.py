"""The page's views, and of each what is there once it shows data."""

from __future__ import annotations

OF_ANY_JOB = {
    "now": "main .sentence",
    "curves": "main .chart canvas",
    "timeline": "main .timeline-frame canvas",
    "samples": "main .sample-list .line",
    "samples?at=2": "main .side-by-side li",
    "replay": "main .react-flow__node",
    "incidents": "main .card",
    "graph?role=rollout": "main .react-flow__node",
    "account": "main .total",
    "logs": "main .logs .line",
}

OF_A_RUNNING_JOB = OF_ANY_JOB | {"fleet": "main .fleet-line strong", "weights": "main table td"}
