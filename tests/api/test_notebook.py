"""Jobs, plans and handles in a notebook: HTML that is well formed, escaped, and needs nothing from elsewhere."""

from __future__ import annotations

from xml.etree import ElementTree

from gyre.api.demo import demo_job
from gyre.api.handle import JobHandle
from gyre.api.home import Home
from gyre.api.notebook import curves_html, table_html
from tests.api.conftest import Seed


def parsed(html: str) -> ElementTree.Element:
    assert "http" not in html
    assert "<script" not in html
    return ElementTree.fromstring(f"<all>{html}</all>")


def test_texts_of_users_are_escaped() -> None:
    found = parsed(table_html("<img src=x>", [("a", "<script>alert(1)</script>"), ("empty", "")]))
    assert [cell.text for cell in found.iter("td")] == ["<script>alert(1)</script>"]


def test_a_curve_for_each_number_that_the_steps_have() -> None:
    steps = [{"step": number, "reward_mean": number / 1000, "entropy": 1.0} for number in range(1, 1001)]
    found = parsed(curves_html(steps))
    labels = [figure.find("figcaption").text for figure in found.iter("figure")]  # type: ignore[union-attr]
    assert labels == ["reward 1", "entropy 1"]
    points = next(found.iter("polyline")).get("points")
    assert points is not None
    assert len(points.split()) <= 300
    assert curves_html([]) == ""


def test_a_job_and_its_plan() -> None:
    job = demo_job()
    assert "grpo" in "".join(parsed(job._repr_html_()).itertext())
    assert "rollout.generate" in "".join(parsed(job.plan()._repr_html_()).itertext())


def test_a_handle_says_how_the_job_is_and_never_raises(home: Home, seed: Seed) -> None:
    handle = JobHandle("golden-1", seed("learning"))
    assert "golden-1" in "".join(parsed(handle._repr_html_()).itertext())
    handle.close()
    gone = JobHandle("nobody-1", home.database_url())
    assert "nobody-1" in gone._repr_html_()
    gone.close()
