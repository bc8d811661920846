"""The sink `otlp`: each step of a job that runs, as a trace of OpenTelemetry, to a collector.

Invariants:
- *as `gyre trace --otlp` says it*: the same spans with the same ids, so that telling twice is telling once;
- *when it is known*: who did what comes into the store some seconds after it was done, and a step is sent after that.
"""

from __future__ import annotations

import os
import time
from typing import Any

from gyre.clock import SleepingClock
from gyre.errors import ConfigError
from gyre.observe.otlp import is_placed, otlp_of
from gyre.observe.otlp_export import send
from gyre.observe.sinks.sink import SinkEvaluation, SinkJob, SinkWarning
from gyre.observe.timeline import Timeline
from gyre.observe.trace import begin_of

PAGE = 50
"""Steps between two flushes: each is a look at the store, and a sink shows that it lives between them."""
SETTLES_IN_S = 12.0
"""After two ticks of the numbers the last part of a step is there."""
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class OtlpSink:
    def __init__(
        self,
        job: SinkJob,
        *,
        clock: SleepingClock = time,
    ) -> None:
        self._to = job.to or os.environ.get(ENDPOINT, "")
        if not self._to:
            raise ConfigError(
                "The sink otlp has no collector.", hint=f"Give one with `to`, or set {ENDPOINT}."
            )
        self._job = job
        self._clock = clock
        self._steps: list[dict[str, Any]] = []

    def step(self, step: int, at: float, numbers: dict[str, float]) -> None:
        self._steps.append({**numbers, "step": step, "at": at})

    def evaluation(self, evaluation: SinkEvaluation) -> None:
        """It is an event of the step in whose time it was, and so are warnings and incidents."""

    def warning(self, warning: SinkWarning) -> None:
        """As with evaluations."""

    def flush(self) -> None:
        steps = [step for step in self._steps if is_placed(step)]
        if steps:
            waits_s = float(steps[-1]["at"]) + SETTLES_IN_S - self._clock.time()
            self._clock.sleep(min(max(0.0, waits_s), SETTLES_IN_S))
        for step in steps:
            timeline = self._timeline(begin_of(step), float(step["at"]))
            send(otlp_of(timeline, [step], job_id=self._job.job_id, name=self._job.name), self._to)
        self._steps = []

    def _timeline(self, since: float, until: float) -> Timeline:
        if self._job.timeline is None:
            return Timeline(since, until, since, until, [], [], False)
        return self._job.timeline(since, until)

    def close(self) -> None:
        """All was sent when `flush` returned."""
