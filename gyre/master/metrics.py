"""A job's view as Prometheus metrics. Names have units; labels are few and bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gyre.failover import JobPhase, VertexPhase
from gyre.master.master_api import plane_of, sessions_of
from gyre.observe.efficiency import EFFICIENCY, efficiency_of
from gyre.rollouts.samples import MORE
from gyre.workloads.trainer.learning.learning_watch import CODES
from gyre.workloads.trainer.learning.metric_names import METRICS
from gyre.workloads.trainer.learning.step_metrics import is_number


class _ViewCollector:
    def __init__(self, view: dict[str, Any], now: float) -> None:
        self._view = view
        self._now = now

    def collect(self) -> Iterator[Metric]:
        view = self._view
        job, progress = view["job"], view["progress"]
        name = job["name"]

        phase = GaugeMetricFamily(
            "gyre_job_phase", "1 for the phase that the job is in", labels=["job", "phase"]
        )
        for known in JobPhase:
            phase.add_metric([name, known.value], float(job["phase"] == known.value))
        yield phase

        vertices = GaugeMetricFamily(
            "gyre_vertices", "Vertices by role and phase", labels=["job", "role", "phase"]
        )
        counts = Counter((vertex["role"], vertex["phase"]) for vertex in view["vertices"])
        for role in {vertex["role"] for vertex in view["vertices"]}:
            for stage in VertexPhase:
                vertices.add_metric([name, role, stage.value], float(counts[(role, stage.value)]))
        yield vertices

        restarts = CounterMetricFamily("gyre_vertex_restarts", "Restarts of vertices", labels=["job", "role"])
        by_role: Counter[str] = Counter()
        for vertex in view["vertices"]:
            by_role[vertex["role"]] += vertex["restarts"]
        for role, count in by_role.items():
            restarts.add_metric([name, role], float(count))
        yield restarts

        yield from _door(name, view)
        yield from _sessions(name, view)

        incidents = GaugeMetricFamily(
            "gyre_incidents", "Incidents kept, by cause and scope", labels=["job", "cause", "scope"]
        )
        kinds = Counter((incident["cause"], incident["scope"]) for incident in view["incidents"])
        for (cause, scope), count in kinds.items():
            incidents.add_metric([name, cause, scope], float(count))
        yield incidents

        for key, text, value in (
            ("gyre_master_epoch", "Masters that have owned the job", view["master"]["epoch"]),
            ("gyre_optimizer_step", "Optimizer steps in the ledger", job["step"]),
            ("gyre_policy_version", "Newest published policy version", job["version"]),
            ("gyre_checkpoint_step", "Step of the newest checkpoint", job["checkpoint_step"]),
            ("gyre_events_committed", "Events in the journal", view["seq"]),
            ("gyre_reward_mean", "Mean reward of the last step", progress.get("reward")),
            ("gyre_heldout_accuracy_ratio", "Held-out accuracy", progress.get("accuracy")),
            ("gyre_generated_tokens_per_second", "Generated tokens", progress.get("tokens_per_s")),
        ):
            if isinstance(value, int | float):
                gauge = GaugeMetricFamily(key, text, labels=["job"])
                gauge.add_metric([name], float(value))
                yield gauge

        for key, number in efficiency_of(view, self._now).items():
            if key != "tokens_per_s":  # gyre_generated_tokens_per_second has it
                gauge = GaugeMetricFamily(f"gyre_{key}", EFFICIENCY[key], labels=["job"])
                gauge.add_metric([name], number)
                yield gauge

        last = view["training"]["last"]
        for key, metric in METRICS.items():
            if is_number(last.get(key)):
                unit = f", in {metric.unit}" if metric.unit else ""
                gauge = GaugeMetricFamily(
                    f"gyre_step_{key}", f"Of the last step: {metric.meaning}{unit}", labels=["job"]
                )
                gauge.add_metric([name], float(last[key]))
                yield gauge

        components = GaugeMetricFamily(
            "gyre_reward_component",
            "Of the last step: mean of a number that the reward function returned beside the reward",
            labels=["job", "component"],
        )
        for key, value in last.items():
            if key.startswith(MORE) and is_number(value):
                components.add_metric([name, key.removeprefix(MORE)], float(value))
        yield components
        held_out = GaugeMetricFamily(
            "gyre_heldout_reward_component",
            "Of a set's last evaluation: mean of a number that the reward function returned beside the reward",
            labels=["job", "set", "component"],
        )
        for of, rows in view["evaluations"].items():
            for key, value in rows[-1]["components"].items():
                held_out.add_metric([name, of, key.removeprefix(MORE)], float(value))
        yield held_out

        warnings = GaugeMetricFamily(
            "gyre_learning_warning", "1 while the metrics say so", labels=["job", "code"]
        )
        held = {one["code"] for one in view["warnings"]}
        for code in CODES:
            warnings.add_metric([name, code], float(code in held))
        yield warnings

        waits = GaugeMetricFamily(
            "gyre_wait_ratio", "Share of recent time that a role waited for another", labels=["job", "who"]
        )
        told = progress.get("waits")
        for who, share in told.items() if isinstance(told, dict) else ():
            if isinstance(share, int | float):  # a `fit()` of the user's own may call anything `waits`
                waits.add_metric([name, who], float(share))
        yield waits

        times = GaugeMetricFamily(
            "gyre_time_ratio",
            "Share of recent time that a role spent so; a role's add up to 1",
            labels=["job", "role", "doing"],
        )
        spent = progress.get("times")
        for role, shares in spent.items() if isinstance(spent, dict) else ():
            for what, share in shares.items() if isinstance(shares, dict) else ():
                if isinstance(share, int | float):
                    times.add_metric([name, role, what], float(share))
        yield times


def _door(name: str, view: dict[str, Any]) -> Iterator[Metric]:
    """Of a fleet: what the requests of each key take in its manager."""
    door = plane_of(view).get("door")
    taken = door.get("key_bytes") if isinstance(door, dict) else None
    if isinstance(taken, dict):
        gauge = GaugeMetricFamily(
            "gyre_door_key_bytes",
            "Bytes that a key's requests take in the rollout manager, open ones and kept ones",
            labels=["job", "key"],
        )
        for key, count in taken.items():
            if isinstance(count, int | float):
                gauge.add_metric([name, str(key)], float(count))
        yield gauge


def _sessions(name: str, view: dict[str, Any]) -> Iterator[Metric]:
    """Of a job with agents: where its sessions are, and what came of them since the rollout manager started."""
    told = sessions_of(view)
    if told is None:
        return
    there = GaugeMetricFamily(
        "gyre_sessions",
        "Sessions that wait for an agent, are at an engine or with an agent",
        labels=["job", "state"],
    )
    for state in ("waiting", "at_engine", "with_agent"):
        if is_number(count := told.get(state)):
            there.add_metric([name, state], float(count))
    yield there
    since = told.get("since_start")
    counts = since if isinstance(since, dict) else {}
    for key, text, label, found in (
        ("gyre_sessions_ended", "Sessions that ended, by outcome", "outcome", counts.get("outcomes")),
        ("gyre_session_branches", "Turns that began a branch, by why", "why", told.get("branches")),
    ):
        counter = CounterMetricFamily(key, text, labels=["job", label])
        for value, count in found.items() if isinstance(found, dict) else ():
            if is_number(count):
                counter.add_metric([name, str(value)], float(count))
        yield counter
    for key, text, value in (
        ("gyre_session_turns", "Turns that were answered", counts.get("turns")),
        (
            "gyre_sessions_drawn_again",
            "Attempts that were begun in the place of others",
            counts.get("drawn_again"),
        ),
    ):
        if is_number(value):
            counter = CounterMetricFamily(key, text, labels=["job"])
            counter.add_metric([name], float(value))
            yield counter


def prometheus_text(view: dict[str, Any], *, now: float) -> bytes:
    """`now` in seconds since 1970: until then the job has cost what is told."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ViewCollector(view, now))
    return generate_latest(registry)
