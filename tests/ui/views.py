"""The page's views, and of each what is there once it shows data."""

from __future__ import annotations

from typing import Any

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


def go_to(page: Any, view: str) -> None:
    """As a person does: by the list of views, and what is chosen in one by a click there. A job's page is open."""
    name, _, chosen = view.partition("?")
    page.locator(f"nav a[href$='/{name}']").click()
    page.locator("nav a[aria-current=page]", has_text=name.capitalize()).wait_for()
    key, _, value = chosen.partition("=")
    if key == "at":
        page.locator(".sample-list .line").nth(int(value)).click()
    elif key == "role":
        page.locator(".react-flow__node", has_text=value).first.click()
    page.wait_for_function("what => location.hash.endsWith(what)", arg=chosen or f"/{name}")
