"""The built-in sinks. Their packages are imported when one is made, in its own process.

Invariants:
- *told twice is written once* (where the other side can tell): a step that is told again, after a death before the
  cursor was kept, has the same number; the file is read for the job's lines first, TensorBoard learns from which step
  on it counts anew, Weights & Biases and MLflow go on with the run of the same id;
- *one place, several jobs*: jobs that write to the same place hide nothing of each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gyre.config.plugins import SINK
from gyre.extras import needed
from gyre.observe.sinks.sink import (
    Sink,
    SinkEnd,
    SinkEvaluation,
    SinkIncident,
    SinkJob,
    SinkWarning,
)


def make_sink(kind: str, job: SinkJob, options: dict[str, Any], python_path: list[str]) -> Sink:
    """The sink of this kind. Raises ConfigError where its package, or the class of the user's own, is not there."""
    made: Callable[..., Sink] | None = _BUILT_IN.get(kind)
    return (made or SINK.load(kind, python_path))(job, **options)


_WHOSE = "gyre-job"
"""The file that says whose a folder is."""


class FileSink:
    """JSON lines: `{"what": "step", "job": "sums-1a2b3c4d", "step": 1, …}`, and so evaluations, warnings, incidents and
    the end. Several jobs may write to one file at the same time, and lines of others' are left alone."""

    def __init__(self, job: SinkJob) -> None:
        self._job = job.job_id
        self._path = Path(job.to) if job.to else job.directory / "numbers.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._untold: list[str] = []
        with self._alone():
            self._told = self._lines_there()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else writes in this block, in which a last line that is not whole is a dead process's."""
        with contextlib.suppress(OSError):  # a file system without locks, where one job at a time may write
            fcntl.flock(self._file, fcntl.LOCK_EX)  # who holds it writes a few lines
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lines_there(self) -> set[str]:
        """This job's lines in the file already, by their keys; a last line that a death cut short is removed."""
        raw = self._path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            os.ftruncate(self._file, len(whole))
        found = set()
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):  # somebody else's, and no JSON
                told = json.loads(line)
                if isinstance(told, dict) and told.get("job") == self._job:
                    found.add(_key(told))
        return found

    def step(self, step: int, at: float, numbers: dict[str, float]) -> None:
        self._write({"what": "step", **numbers, "step": step, "at": at})

    def evaluation(self, evaluation: SinkEvaluation) -> None:
        self._write(
            {
                "what": "evaluation",
                "set": evaluation.set,
                "version": evaluation.version,
                "step": evaluation.step,
                "at": evaluation.at,
                **evaluation.numbers,
            }
        )

    def warning(self, warning: SinkWarning) -> None:
        self._write(
            {
                "what": "warning",
                "code": warning.code,
                "message": warning.message,
                "step": warning.step,
                "at": warning.at,
                "holds": warning.holds,
            }
        )

    def incident(self, incident: SinkIncident) -> None:
        self._write({"what": "incident", **asdict(incident)})

    def ended(self, end: SinkEnd) -> None:
        self._write({"what": "end", **asdict(end)})

    def _write(self, line: dict[str, Any]) -> None:
        if _key(line) not in self._told:
            whole = {"what": line["what"], "job": self._job, **line}
            self._untold.append(json.dumps(whole, allow_nan=False) + "\n")

    def flush(self) -> None:
        raw = "".join(self._untold).encode()
        with self._alone():
            while raw:
                raw = raw[os.write(self._file, raw) :]
        self._untold = []
        os.fsync(self._file)

    def close(self) -> None:
        self.flush()
        os.close(self._file)


_KEYS = {
    "step": ("step",),
    "evaluation": ("set", "version"),
    "warning": ("step", "code", "holds"),
    "incident": ("seq", "id"),
    "end": ("seq",),
}
"""By what a line is, the keys that distinguish it from others of its kind."""


def _key(line: dict[str, Any]) -> str:
    what = line.get("what")
    return json.dumps([what, *(line.get(name) for name in _KEYS.get(str(what), ()))])


def _own_folder(place: Path, job: SinkJob) -> Path:
    """The folder of the job's name, or of its id where another job has that one: TensorBoard shows one run a folder."""
    named = place / job.name
    named.mkdir(parents=True, exist_ok=True)
    mark = named / _WHOSE
    with contextlib.suppress(FileExistsError), mark.open("x", encoding="utf-8") as file:
        if any(path != mark for path in named.iterdir()):
            job_id = ""  # somebody has written there before jobs left their marks
        else:
            job_id = job.job_id
        file.write(job_id)
    return named if mark.read_text(encoding="utf-8") == job.job_id else place / job.job_id


class TensorBoardSink:
    """Scalars by step, in a folder that `tensorboard --logdir` reads. Evaluations and warnings are a run of their own
    below it, the evaluations at their versions: what counts no more from a step on must not take them with it."""

    def __init__(self, job: SinkJob) -> None:
        writers = needed("tensorboard.summary.writer.event_file_writer", "the sink tensorboard")
        self._events = needed("tensorboard.compat.proto.event_pb2", "the sink tensorboard")
        self._summaries = needed("tensorboard.compat.proto.summary_pb2", "the sink tensorboard")
        folder = _own_folder(Path(job.to), job) if job.to else job.directory
        self._steps = writers.EventFileWriter(str(folder))
        self._others = writers.EventFileWriter(str(folder / "held_out"))
        self._restarted = False

    def step(self, step: int, at: float, numbers: dict[str, float]) -> None:
        if not self._restarted:
            # What an earlier process of this sink wrote from this step on, whose end may be lost, counts no more.
            self._restarted = True
            log = self._events.SessionLog(status=self._events.SessionLog.START)
            self._steps.add_event(self._events.Event(wall_time=at, step=step, session_log=log))
        self._add(
            self._steps,
            step,
            at,
            {f"step/{name}": value for name, value in numbers.items() if name != "step"},
        )

    def evaluation(self, evaluation: SinkEvaluation) -> None:
        self._add(
            self._others,
            max(0, evaluation.version),
            evaluation.at,
            {f"evaluation/{evaluation.set}/{name}": value for name, value in evaluation.numbers.items()},
        )

    def warning(self, warning: SinkWarning) -> None:
        self._add(self._others, warning.step, warning.at, {f"warning/{warning.code}": float(warning.holds)})

    def _add(self, writer: Any, step: int, at: float, numbers: dict[str, float]) -> None:
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()
        ]
        summary = self._summaries.Summary(value=values)
        writer.add_event(self._events.Event(wall_time=at, step=step, summary=summary))

    def flush(self) -> None:
        self._steps.flush()
        self._others.flush()

    def close(self) -> None:
        self._steps.close()
        self._others.close()


WANDB_WRITES_EACH_S = 0.5
_WANDB_INTERVAL = "x_transaction_log_flush_interval"
"""A setting of later versions. Their default keeps a quarter of a minute in memory; earlier ones cannot be told."""


class WandbSink:
    """A run of Weights & Biases of the job's id, gone on with by each process; offline with `options: {mode: offline}`,
    or where WANDB_MODE says so."""

    def __init__(self, job: SinkJob, **options: Any) -> None:
        # The helper process of whoever started the cluster: it would hold the run after this process was killed.
        os.environ.pop("WANDB_SERVICE", None)
        wandb = needed("wandb", "the sink wandb")
        given = {
            "project": "gyre",
            "name": job.name,
            "id": job.job_id,
            "resume": "allow",
            "config": job.spec,
            "dir": job.to or str(job.directory),
            **options,
        }
        self._written_within_s = 0.0
        if hasattr(wandb.Settings(), _WANDB_INTERVAL):
            settings = given.get("settings") or {}
            if isinstance(settings, dict):
                given["settings"] = {_WANDB_INTERVAL: WANDB_WRITES_EACH_S, **settings}
                self._written_within_s = 2 * float(given["settings"][_WANDB_INTERVAL])
        self._run = wandb.init(**given)
        self._run.define_metric("step/*", step_metric="step/step")
        self._run.define_metric("evaluation/*", step_metric="evaluation/version")

    def step(self, step: int, at: float, numbers: dict[str, float]) -> None:
        self._run.log(
            {**{f"step/{name}": value for name, value in numbers.items()}, "step/step": step, "at": at}
        )

    def evaluation(self, evaluation: SinkEvaluation) -> None:
        told = {f"evaluation/{evaluation.set}/{name}": value for name, value in evaluation.numbers.items()}
        self._run.log({**told, "evaluation/version": evaluation.version, "at": evaluation.at})

    def warning(self, warning: SinkWarning) -> None:
        self._run.log({f"warning/{warning.code}": float(warning.holds), "step/step": warning.step})
        if warning.holds:
            self._run.alert(title=warning.code, text=warning.message)

    def incident(self, incident: SinkIncident) -> None:
        if incident.is_new:
            text = f"{incident.vertex or 'the job'}: {incident.decision} {incident.error}"
            self._run.alert(title=incident.cause, text=text.strip())

    def ended(self, end: SinkEnd) -> None:
        if end.phase == "failed":
            self._run.alert(title="the job failed", text=end.message or end.reason)

    def flush(self) -> None:
        """Its own process writes what was logged each so often, and loses the rest when it dies with this one."""
        time.sleep(self._written_within_s)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """A run of MLflow with the job's name, found again by its tag. Without `to` it is kept in a file of the job's."""

    def __init__(self, job: SinkJob, **options: Any) -> None:
        mlflow = needed("mlflow", "the sink mlflow")
        client = mlflow.MlflowClient(tracking_uri=job.to or f"sqlite:///{job.directory / 'mlflow.db'}")
        experiment_name = str(options.pop("experiment", "gyre"))
        found = client.get_experiment_by_name(experiment_name)
        experiment = found.experiment_id if found else client.create_experiment(experiment_name)
        runs = client.search_runs([experiment], filter_string=f"tags.`gyre.job_id` = '{job.job_id}'")
        tags = {"gyre.job_id": job.job_id, **options.pop("tags", {})}
        self._run = (
            runs[0] if runs else client.create_run(experiment, run_name=job.name, tags=tags, **options)
        )
        self._client = client
        self._metric = needed("mlflow.entities", "the sink mlflow").Metric

    def step(self, step: int, at: float, numbers: dict[str, float]) -> None:
        self._log(step, at, {f"step/{name}": value for name, value in numbers.items() if name != "step"})

    def evaluation(self, evaluation: SinkEvaluation) -> None:
        told = {f"evaluation/{evaluation.set}/{name}": value for name, value in evaluation.numbers.items()}
        self._log(max(0, evaluation.version), evaluation.at, told)

    def warning(self, warning: SinkWarning) -> None:
        self._log(warning.step, warning.at, {f"warning/{warning.code}": float(warning.holds)})

    def _log(self, step: int, at: float, numbers: dict[str, float]) -> None:
        metrics = [self._metric(name, value, int(at * 1000), step) for name, value in numbers.items()]
        self._client.log_batch(self._run.info.run_id, metrics=metrics)

    def flush(self) -> None:
        """Each batch is written when it is logged."""

    def close(self) -> None:
        self._client.set_terminated(self._run.info.run_id)


def _otlp(job: SinkJob, **options: Any) -> Sink:
    from gyre.observe.sinks.otlp_sink import OtlpSink  # with the store, which planning a job does without

    return OtlpSink(job, **options)


_BUILT_IN: dict[str, Callable[..., Sink]] = {
    "file": FileSink,
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "otlp": _otlp,
}
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""By the kind, the package that it needs."""
