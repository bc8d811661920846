"""A job's view as Prometheus metrics. Names have units; labels are few and bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gyre.failover import JobPhase, VertexPhase
from gyre.failover.evaluation import SHOWN
from gyre.master.master_api import plane_of, sessions_of
from gyre.observe.efficiency import EFFICIENCY, efficiency_of
from gyre.rollouts.samples import MORE
from gyre.workloads.trainer.learning.learning_watch import CODES
from gyre.workloads.trainer.learning.metric_names import METRICS
from gyre.workloads.trainer.learning.step_metrics import is_number

Labels = tuple[str, ...]


class _ViewCollector:
    def __init__(self, view: dict[str, Any], now: float) -> None:
        self._view = view
        self._now = now
        self._name = view["job"]["name"]

    def collect(self) -> Iterator[Metric]:
        yield from self._of_vertices()
        yield from self._of_sessions()
        yield from self._of_progress()
        yield from self._of_steps()
        yield from self._of_evaluations()
        yield from self._of_time()

    def _gauge(
        self,
        key: str,
        text: str,
        labels: Labels,
        values: Mapping[Any, float],
        kind: Any = GaugeMetricFamily,
    ) -> Metric:
        """`labels` and those of each value are without the job's name, which every metric has."""
        family: Metric = kind(key, text, labels=["job", *labels])
        for of, value in values.items():
            family.add_metric([self._name, *of], float(value))  # type: ignore[attr-defined]
        return family

    def _of_vertices(self) -> Iterator[Metric]:
        view = self._view
        phases = {(one.value,): view["job"]["phase"] == one.value for one in JobPhase}
        yield self._gauge("gyre_job_phase", "1 for the phase that the job is in", ("phase",), phases)
        counts = Counter((vertex["role"], vertex["phase"]) for vertex in view["vertices"])
        roles = {vertex["role"] for vertex in view["vertices"]}
        stages = {(role, stage.value): counts[(role, stage.value)] for role in roles for stage in VertexPhase}
        yield self._gauge("gyre_vertices", "Vertices by role and phase", ("role", "phase"), stages)
        restarts: Counter[Labels] = Counter()
        for vertex in view["vertices"]:
            restarts[(vertex["role"],)] += vertex["restarts"]
        yield self._gauge(
            "gyre_vertex_restarts", "Restarts of vertices", ("role",), restarts, CounterMetricFamily
        )
        door = plane_of(view).get("door")
        taken = door.get("key_bytes") if isinstance(door, dict) else None
        if isinstance(taken, dict):
            text = "Bytes that a key's requests take in the rollout manager, open ones and kept ones"
            yield self._gauge("gyre_door_key_bytes", text, ("key",), _numbers(taken))
        kinds = Counter((incident["cause"], incident["scope"]) for incident in view["incidents"])
        yield self._gauge("gyre_incidents", "Incidents kept, by cause and scope", ("cause", "scope"), kinds)

    def _of_sessions(self) -> Iterator[Metric]:
        """Of a job with agents: where its sessions are, and what came of them since the rollout manager started."""
        told = sessions_of(self._view)
        if told is None:
            return
        where = {(state,): told.get(state) for state in ("waiting", "at_engine", "with_agent")}
        text = "Sessions that wait for an agent, are at an engine or with an agent"
        yield self._gauge(
            "gyre_sessions", text, ("state",), {of: n for of, n in where.items() if is_number(n)}
        )
        since = told.get("since_start")
        counts = since if isinstance(since, dict) else {}
        for key, text, label, found in (
            ("gyre_sessions_ended", "Sessions that ended, by outcome", "outcome", counts.get("outcomes")),
            ("gyre_session_branches", "Turns that began a branch, by why", "why", told.get("branches")),
        ):
            values = _numbers(found) if isinstance(found, dict) else {}
            yield self._gauge(key, text, (label,), values, CounterMetricFamily)
        for key, text, value in (
            ("gyre_session_turns", "Turns that were answered", counts.get("turns")),
            (
                "gyre_sessions_drawn_again",
                "Attempts that were begun in the place of others",
                counts.get("drawn_again"),
            ),
        ):
            if is_number(value):
                yield self._gauge(key, text, (), {(): value}, CounterMetricFamily)
        yield from self._of_lengths(told.get("oversampled"))

    def _of_lengths(self, told: Any) -> Iterator[Metric]:
        """Of groups that begin with more sessions than are trained: how long those that are trained are, and all. None
        where no group did."""
        if not isinstance(told, dict) or not told.get("groups"):
            return
        groups = "groups that began with more sessions than are trained"
        for key, of, text, kind in (
            ("gyre_oversampled_sessions", "sessions", f"Sessions of {groups}", CounterMetricFamily),
            (
                "gyre_session_tokens",
                "tokens",
                f"Mean drawn tokens of a session, of {groups}",
                GaugeMetricFamily,
            ),
            ("gyre_session_seconds", "seconds", f"Mean seconds of a session, of {groups}", GaugeMetricFamily),
        ):
            found = {(of_which,): told.get(of_which, {}).get(of) for of_which in ("trained", "drawn")}
            values = {label: value for label, value in found.items() if is_number(value)}
            yield self._gauge(key, text, ("of",), values, kind)

    def _of_progress(self) -> Iterator[Metric]:
        view, job, progress = self._view, self._view["job"], self._view["progress"]
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
                yield self._gauge(key, text, (), {(): value})
        for key, number in efficiency_of(view, self._now).items():
            if key != "tokens_per_s":  # gyre_generated_tokens_per_second has it
                yield self._gauge(f"gyre_{key}", EFFICIENCY[key], (), {(): number})

    def _of_steps(self) -> Iterator[Metric]:
        last = self._view["training"]["last"]
        for key, metric in METRICS.items():
            if is_number(last.get(key)):
                text = f"Of the last step: {metric.meaning}{_in(metric.unit)}"
                yield self._gauge(f"gyre_step_{key}", text, (), {(): last[key]})
        parts = {
            (key.removeprefix(MORE),): value
            for key, value in last.items()
            if key.startswith(MORE) and is_number(value)
        }
        text = f"Of the last step: {_COMPONENT}"
        yield self._gauge("gyre_reward_component", text, ("component",), parts)

    def _of_evaluations(self) -> Iterator[Metric]:
        newest = {name: rows[-1] for name, rows in self._view["evaluations"].items()}
        parts = {
            (name, key.removeprefix(MORE)): value
            for name, row in newest.items()
            for key, value in row["components"].items()
        }
        text = f"Of a set's last evaluation: {_COMPONENT}"
        yield self._gauge("gyre_heldout_reward_component", text, ("set", "component"), parts)
        for key, shown in SHOWN.items():
            found = {(name,): row[key] for name, row in newest.items() if is_number(row.get(key))}
            text = f"Of a set's last evaluation: {shown.meaning}{_in(shown.unit)}"
            if found:
                yield self._gauge(f"gyre_heldout_{key}", text, ("set",), found)

    def _of_time(self) -> Iterator[Metric]:
        """A `fit()` of the user's own may call anything `waits` or `times`."""
        progress, held = self._view["progress"], {one["code"] for one in self._view["warnings"]}
        codes = {(code,): code in held for code in CODES}
        yield self._gauge("gyre_learning_warning", "1 while the metrics say so", ("code",), codes)
        text = "Share of recent time that a role waited for another"
        yield self._gauge("gyre_wait_ratio", text, ("who",), _numbers(progress.get("waits")))
        spent = progress.get("times")
        shares = {
            (role, *what): share
            for role, of in (spent.items() if isinstance(spent, dict) else ())
            for what, share in _numbers(of).items()
        }
        text = "Share of recent time that a role spent so; a role's add up to 1"
        yield self._gauge("gyre_time_ratio", text, ("role", "doing"), shares)


_COMPONENT = "mean of a number that the reward function returned beside the reward"


def _numbers(told: Any) -> dict[Labels, float]:
    """The numbers of what may be a mapping, by their names as labels."""
    items = told.items() if isinstance(told, dict) else ()
    return {(str(name),): value for name, value in items if isinstance(value, int | float)}


def _in(unit: str) -> str:
    return f", in {unit}" if unit else ""


def prometheus_text(view: dict[str, Any], *, now: float) -> bytes:
    """`now` in seconds since 1970: until then the job has cost what is told."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ViewCollector(view, now))
    return generate_latest(registry)
