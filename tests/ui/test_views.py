"""Every view in a real browser: it shows its data, fits its screen, and all can read it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ui.conftest import AXE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

VIEWS = {
    "now": "main .sentence",
    "curves": "main .chart canvas",
    "timeline": "main .timeline-frame canvas",
    "samples": "main .sample-list .line",
    "samples?at=2": "main .side-by-side li",
    "samples?held=held_out": "main .held-out .sides pre",
    "tokens": "main .token-text .t",
    "replay": "main .react-flow__node",
    "compare": "main .chart canvas",
    "incidents": "main .card",
    "fleet": "main .vertex-line strong",
    "graph?role=rollout": "main .react-flow__node",
    "weights": "main table td",
    "account": "main .total",
    "logs": "main .logs .line",
}
"""By view, what it has once its data is there."""

THEMES = ("light", "dark")
PHONE, DESK, WALL = (360, 740), (1280, 900), (3840, 2100)


def where(reader: Any, job: str, view: str) -> str:
    """The address of a view; a sample's is looked up in the list of samples."""
    if view != "tokens":
        return f"jobs/{job}/{view}"
    page = reader.open(f"jobs/{job}/samples?at=1")
    page.locator(".side-by-side li a").first.wait_for()
    link = page.locator(".side-by-side li a").first.get_attribute("href")
    return str(link).removeprefix("#/")


@pytest.mark.parametrize(
    ("theme", "opened", "then"), [("light", DESK, WALL), ("dark", PHONE, DESK)], ids=THEMES
)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_shows_its_data_fits_its_screen_and_has_no_barrier(
    open_reader: Any, job: str, view: str, theme: str, opened: tuple[int, int], then: tuple[int, int]
) -> None:
    """On a desk in the light theme, and drawn out over a wall; on a phone in the dark one, and then on a desk: each
    theme has one look by axe at the width of a desk (names, roles, order of headings, contrast)."""
    reader = open_reader(*opened, theme=theme)
    page = reader.open(where(reader, job, view))
    page.locator(VIEWS[view]).first.wait_for()
    assert page.locator("main h1").count() == 1
    assert sticks_out(page) <= 0
    if opened == DESK:
        assert barriers(page) == []
    page.set_viewport_size({"width": then[0], "height": then[1]})
    page.wait_for_function("width => innerWidth === width", arg=then[0])
    page.locator(VIEWS[view]).first.wait_for()
    assert sticks_out(page) <= 0
    if then == DESK:
        assert barriers(page) == []
    assert reader.errors == []


def sticks_out(page: Any) -> int:
    """By how many pixels the page is wider than its screen, once two frames were drawn."""
    page.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def barriers(page: Any) -> list[str]:
    """What axe finds."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: make ui")
    page.evaluate(AXE.read_text())
    found = page.evaluate(
        "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']})"
    )
    return [
        f"{one['id']}: {node['html'][:160]} {node['failureSummary'][:300]}"
        for one in found["violations"]
        for node in one["nodes"][:3]
    ]


def test_the_list_of_jobs_has_no_barrier(open_reader: Any) -> None:
    for theme in THEMES:
        page = open_reader(theme=theme).open("jobs?all=1")
        page.locator("main td a").first.wait_for()
        assert barriers(page) == []
