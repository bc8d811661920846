"""Make `docs/grafana.json`, a Grafana dashboard over the metrics that a master has at `/metrics`.

    python tools/grafana_dashboard.py docs/grafana.json

The panels are written here in a few words each, because Grafana's own JSON is a thousand lines that nobody reads. A
test holds the file against this program, and every metric that it asks for against those that a master exports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 8, 7
COLUMNS = 3

PANELS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "Does it learn",
        (
            ("Reward", 'gyre_step_reward_mean{job=~"$job"}', "short"),
            ("Held-out accuracy", 'gyre_heldout_accuracy_ratio{job=~"$job"}', "percentunit"),
            ("Warnings", 'gyre_learning_warning{job=~"$job"} > 0', "short"),
            ("Answer length", 'gyre_step_completion_tokens_mean{job=~"$job"}', "short"),
            ("Cut off", 'gyre_step_cut_off_ratio{job=~"$job"}', "percentunit"),
            ("Entropy", 'gyre_step_entropy{job=~"$job"}', "short"),
            ("KL to the engine's policy", 'gyre_step_old_kl{job=~"$job"}', "short"),
            ("Gradient norm", 'gyre_step_grad_norm{job=~"$job"}', "short"),
            ("Flat groups", 'gyre_step_flat_groups_ratio{job=~"$job"}', "percentunit"),
        ),
    ),
    (
        "What is slow",
        (
            ("Tokens per second", 'gyre_step_tokens_per_s{job=~"$job"}', "short"),
            ("Seconds of a step", 'gyre_step_seconds{job=~"$job"}', "s"),
            ("Staleness", 'gyre_step_staleness_mean{job=~"$job"}', "short"),
            ("Who waits for whom", 'gyre_wait_ratio{job=~"$job"}', "percentunit"),
            ("How roles spend their time", 'gyre_time_ratio{job=~"$job"}', "percentunit"),
            ("Optimizer step", 'gyre_optimizer_step{job=~"$job"}', "short"),
        ),
    ),
    (
        "Is it well",
        (
            ("Phase", 'gyre_job_phase{job=~"$job"} == 1', "short"),
            ("Vertices", 'sum by (role, phase) (gyre_vertices{job=~"$job"})', "short"),
            ("Incidents", 'sum by (cause) (gyre_incidents{job=~"$job"})', "short"),
            ("Restarts", 'increase(gyre_vertex_restarts_total{job=~"$job"}[10m])', "short"),
            ("Masters so far", 'gyre_master_epoch{job=~"$job"}', "short"),
            ("Checkpoint at step", 'gyre_checkpoint_step{job=~"$job"}', "short"),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for row, (title, asked) in enumerate(PANELS):
        panels.append(
            {
                "id": 100 + row,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": COLUMNS * WIDTH, "x": 0, "y": top},
                "panels": [],
            }
        )
        top += 1
        for index, (name, expression, unit) in enumerate(asked):
            panels.append(
                _panel(
                    len(panels) + 1,
                    name,
                    expression,
                    unit,
                    x=index % COLUMNS * WIDTH,
                    y=top + index // COLUMNS * HEIGHT,
                )
            )
        top += -(-len(asked) // COLUMNS) * HEIGHT
    return {
        "title": "Gyre",
        "uid": "gyre",
        "tags": ["gyre"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                {
                    "name": "job",
                    "type": "query",
                    "label": "Job",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": {"query": "label_values(gyre_job_phase, job)", "refId": "jobs"},
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                },
            ]
        },
        "panels": panels,
    }


def _panel(number: int, title: str, expression: str, unit: str, *, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": x, "y": y},
        "targets": [{"refId": "A", "datasource": source, "expr": expression}],
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text())
