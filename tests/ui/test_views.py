"""Every view in a real browser: it shows its data, fits its screen, and all can read it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ui.conftest import AXE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

VIEWS = {
    "now": "main .sentence",
    "curves": "main .chart canvas",
    "timeline": "main .timeline-frame canvas",
    "samples": "main .sample-list .line",
    "samples?at=2": "main .side-by-side li",
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
WIDTHS = {360: 740, 1280: 900, 3840: 2100}


def where(reader: Any, job: str, view: str) -> str:
    """The address of a view; a sample's is looked up in the list of samples."""
    if view != "tokens":
        return f"jobs/{job}/{view}"
    page = reader.open(f"jobs/{job}/samples?at=1")
    page.locator(".side-by-side li a").first.wait_for()
    link = page.locator(".side-by-side li a").first.get_attribute("href")
    return str(link).removeprefix("#/")


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_shows_its_data_and_nothing_goes_wrong(reader: Any, job: str, view: str) -> None:
    page = reader.open(where(reader, job, view))
    page.locator(VIEWS[view]).first.wait_for()
    assert page.locator("main h1").count() == 1
    assert reader.errors == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_fits_its_screen(open_reader: Any, job: str, view: str, width: int) -> None:
    reader = open_reader(width, WIDTHS[width])
    page = reader.open(where(reader, job, view))
    page.locator(VIEWS[view]).first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_no_barrier(open_reader: Any, job: str, view: str, theme: str) -> None:
    """axe finds nothing: names, roles, order of headings, contrast in both themes."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: make ui")
    reader = open_reader(theme=theme)
    page = reader.open(where(reader, job, view))
    page.locator(VIEWS[view]).first.wait_for()
    assert barriers(page) == []


def barriers(page: Any) -> list[str]:
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
    if not AXE.exists():
        pytest.skip("axe-core is not installed: make ui")
    for theme in THEMES:
        page = open_reader(theme=theme).open("jobs?all=1")
        page.locator("main td a").first.wait_for()
        assert barriers(page) == []
