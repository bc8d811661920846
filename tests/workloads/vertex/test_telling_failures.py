"""Whatever a user's code raises or returns, its end is told: a job whose trainer ends in silence never ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gyre
from gyre.api import RLJobBuilder
from gyre.errors import (
    NOT_FINITE,
    OUT_OF_MEMORY,
    ConfigError,
    GraphError,
    GyreError,
    StoreError,
    Unreachable,
    UserCodeError,
    VertexDied,
    is_configuration,
)
from gyre.models.errors import ModelFolderError
from gyre.workloads import BaseTrainer
from gyre.workloads.base import WorkloadContext
from gyre.workloads.learner.errors import NotFinite
from gyre.workloads.runtime import TrainerRuntime
from gyre.workloads.vertex.messages import Binding, failure_of
from gyre_dlrover.api.runtime import current_worker
from tests.waits import GENEROUS_S


class Shy(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no comment")


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no comment")


class Raises(BaseTrainer):
    def fit(self) -> Any:
        raise Shy


class Returns(BaseTrainer):
    def fit(self) -> Any:
        return {"it": Unspeakable()}


class ReturnsItself(BaseTrainer):
    def fit(self) -> Any:
        found: dict[str, Any] = {}
        found["self"] = found
        return found


def raised(error: BaseException, where: str) -> BaseException:
    """The error, raised in a file of that name, below a line of this one, which is the user's."""
    code = compile("def fail(error):\n    raise error\n", where, "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    try:
        names["fail"](error.with_traceback(None))
    except BaseException as caught:
        return caught
    raise AssertionError("it did not raise")


@pytest.mark.parametrize(
    "error", [StoreError("no store"), VertexDied("a-0"), Unreachable("no master"), GyreError("late")]
)
def test_what_gyre_raises_of_its_own_is_never_the_users_code(error: GyreError) -> None:
    """Also where a user's line asked for it, in a class of the user's own."""
    inside = str(Path(gyre.__file__).with_name("store") / "database.py")
    assert not failure_of(raised(error, inside), module="mine").user_code
    assert failure_of(raised(error, "/home/me/mine.py"), module="mine").user_code, "the user's own raise is"
    assert failure_of(raised(ValueError("no"), inside), module="mine").user_code, "and so is a bad argument"


def test_an_exception_without_a_text_is_told() -> None:
    failure = failure_of(Shy(), module="mine")
    assert failure.error == "Shy: (its text cannot be told: str() raised RuntimeError)"
    assert failure.user_code
    assert "Shy" in failure.traceback


@pytest.mark.parametrize(
    ("kind", "end"),
    [(Raises, "TrainerFailed"), (Returns, "TrainerFinished"), (ReturnsItself, "TrainerFinished")],
)
def test_every_end_of_fit_is_reported(kind: type[BaseTrainer], end: str) -> None:
    spec = RLJobBuilder().trainer(kind).build().spec
    binding = Binding(
        job_id="j-1",
        job_name="j",
        role="trainer",
        rank=0,
        world_size=1,
        local_rank=0,
        incarnation=1,
        module=__name__,
        name=kind.__name__,
        file=None,
        config={},
        env={},
        python_path=[],
        directory="",
        log_path="",
        orphan_timeout_s=1.0,
        master_addr=None,
        master_port=None,
        spec=spec.model_dump(mode="json"),
        store_url="",
    )
    told: list[str] = []
    context = WorkloadContext(
        job="j",
        role="trainer",
        rank=0,
        world_size=1,
        directory=Path(),
        report=lambda what, body: told.append(what) if json.dumps(body) else None,
    )
    runtime = TrainerRuntime(binding, kind(), context, transport=object())  # type: ignore[arg-type]
    runtime.start(paused=False)
    assert runtime.join(GENEROUS_S)
    assert told == [end]


class OutOfMemoryError(RuntimeError):
    """As torch's is called."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OutOfMemoryError("tried to allocate 2 GiB"), OUT_OF_MEMORY),
        (MemoryError(), OUT_OF_MEMORY),
        (RuntimeError("CUDA error: out of memory"), OUT_OF_MEMORY),
        (
            RuntimeError("unhandled cuda error\nLast error:\nFailed to CUDA calloc async 24 bytes"),
            OUT_OF_MEMORY,
        ),
        (NotFinite("the gradient has norm nan."), NOT_FINITE),
        (ValueError("out of memory, says the user"), ""),
        (RuntimeError("no"), ""),
    ],
)
def test_a_failure_has_the_code_of_what_happened(error: Exception, code: str) -> None:
    assert failure_of(error).code == code


def test_a_failure_has_the_users_line_and_method() -> None:
    def raises() -> None:
        raise ValueError("no boxed answer")

    with pytest.raises(ValueError, match="boxed") as raised:
        raises()
    failure = failure_of(raised.value, module="mine", method="mine:Score.score")
    assert failure.error == "ValueError: no boxed answer"
    assert failure.place.startswith("test_telling_failures.py:")
    assert failure.method == "mine:Score.score"


def test_what_another_process_raised_is_in_the_sentence_with_its_line() -> None:
    told = (
        'Traceback (most recent call last):\n  File "/home/me/rew.py", line 7, in f\n    raise ValueError("no")\n'
        '  File "/usr/lib/python3/site-packages/x.py", line 9, in g\nValueError: no\n'
    )
    error = UserCodeError("the reward function 'rew.py:f' failed on a sample.", details={"traceback": told})
    failure = failure_of(error)
    assert failure.error == "ValueError: no: the reward function 'rew.py:f' failed on a sample."
    assert (failure.place, failure.user_code) == ("rew.py:7", True)
    complete = UserCodeError("rew.py:f raised ValueError: no.", details={"traceback": told})
    assert failure_of(complete).error == "rew.py:f raised ValueError: no."


@pytest.mark.parametrize("error", [ConfigError("config.x: no."), GraphError("no."), ModelFolderError("no.")])
@pytest.mark.parametrize("module", ["gyre.workloads.torch", "mine"])
def test_a_configuration_error_is_nobodys_code_wherever_it_is_raised(error: ConfigError, module: str) -> None:
    failure = failure_of(error, module=module)
    assert not failure.user_code
    assert is_configuration(failure.code)
    assert failure.error == str(error)


def test_a_mistake_in_the_syntax_is_told_with_its_line() -> None:
    with pytest.raises(SyntaxError) as raised:
        compile("a = 1\nb = = 2\n", "/home/me/job.py", "exec")
    failure = failure_of(raised.value, module="mine")
    assert (failure.place, failure.user_code) == ("job.py:2", True)


def test_what_a_package_of_gyres_own_raises_is_not_the_users() -> None:
    with pytest.raises(GyreError) as raised:
        current_worker()  # outside of a job's workers
    failure = failure_of(raised.value, module="gyre_dlrover.worker")
    assert (failure.place, failure.user_code) == ("", False)
