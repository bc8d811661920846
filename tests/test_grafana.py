"""The Grafana dashboard: made by its program, and every metric that it asks for is one that a master exports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gyre.master.metrics import prometheus_text
from gyre.workloads.trainer.learning.metric_names import METRICS
from tests.doubles.standing_job import StandingJob
from tools import grafana_dashboard

FILE = Path(__file__).parents[1] / "docs" / "grafana.json"


def test_the_file_is_what_its_program_makes() -> None:
    assert FILE.read_text() == grafana_dashboard.text()


@pytest.fixture(scope="module")
def exported() -> set[str]:
    with StandingJob() as job:
        view = job.view()
    view["training"]["last"] = dict.fromkeys(METRICS, 1.0)
    view["progress"] |= {
        "accuracy": 0.5,
        "waits": {"actor waits for rollout": 0.5},
        "times": {"actor": {"training": 0.5}},
    }
    view["incidents"] = [{"cause": "process_died", "scope": "vertex"}]
    return {
        line.split("{")[0].split(" ")[0]
        for line in prometheus_text(view, now=0.0).decode().splitlines()
        if not line.startswith("#")
    }


def test_every_metric_that_it_asks_for_exists(exported: set[str]) -> None:
    asked = {
        name
        for panel in json.loads(FILE.read_text())["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"gyre_\w+", target["expr"])
    }
    assert asked
    assert asked <= exported, asked - exported


def test_no_panel_lies_on_another() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in json.loads(FILE.read_text())["panels"]:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not mine & cells, panel["title"]
        cells |= mine
