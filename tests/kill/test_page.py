"""An open page outlives the master: it says that nobody answers, and goes on when the next master is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kill.conftest import Run
from tests.ui.conftest import Reader
from tests.ui.conftest import browser as browser
from tests.ui.views import OF_A_RUNNING_JOB, go_to

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow]

Start = Callable[..., Run]


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(60_000)
    yield context.new_page()
    context.close()


def test_an_open_page_shows_each_view_of_a_job_that_runs_and_goes_on_when_its_master_is_killed(
    start: Start, page: Any
) -> None:
    """A restarted master takes its earlier port again, so the address that is open is the address of the next one."""
    run = start()
    view = run.faults.reach_step(4)
    job = view["job"]["name"]
    reader = Reader(page, f"{view['master']['url']}/")
    reader.open(f"jobs/{job}/now")
    for name, shown in OF_A_RUNNING_JOB.items():
        if name != "incidents":  # nothing has happened yet
            go_to(page, name)
            page.locator(shown).first.wait_for()
            reader.settle()
    assert reader.errors == []
    (victim,) = run.faults.kill("master")
    run.faults.replaced(victim)
    run.faults.reach_step(7)
    go_to(page, "incidents")  # the same document, not loaded anew
    page.get_by_text("master: process died").first.wait_for()
    page.wait_for_function("() => !document.querySelector('.away')")
    run.end()
