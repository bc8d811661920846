"""What becomes of the ends of a Ray call: results, deaths, and values that cannot be sent. No cluster is needed."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from ray.exceptions import ActorUnavailableError, ObjectLostError, RaySystemError, RayTaskError

from gyre.errors import VertexDied
from gyre.workloads.vertex.transport import RayTransport, actor_name
from tests.waits import GENEROUS_S


class Reference:
    """Stands for what `.remote()` returns."""

    def __init__(self, *, value=None, error=None):
        self._future: Future = Future()
        if error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(value)

    def future(self):
        return self._future


def ended(reference, monkeypatch):
    transport = RayTransport("j1", 3)
    monkeypatch.setattr(transport, "_handle", lambda vertex, incarnation: object())
    return transport._send("echo-0", 2, lambda handle: reference)


def test_a_result_is_the_hosts_outcome(monkeypatch):
    assert ended(Reference(value=("ok", 1)), monkeypatch).result(GENEROUS_S) == ("ok", 1)


def test_an_actor_that_does_not_answer_is_lost(monkeypatch):
    future = ended(Reference(error=ActorUnavailableError("away", None)), monkeypatch)
    with pytest.raises(VertexDied, match=r"echo-0 \(incarnation 2\) was lost"):
        future.result(GENEROUS_S)


def test_a_value_that_cannot_be_sent_is_told_and_the_vertex_is_not_taken_for_dead(monkeypatch):
    error = RayTaskError("call", "Traceback", TypeError("cannot pickle '_thread.lock'"), "p", 1, "127.0.0.1")
    status, failure = ended(Reference(error=error), monkeypatch).result(GENEROUS_S)
    assert status == "error"
    assert failure.user_code
    assert "cannot pickle" in failure.error


def test_an_actor_whose_name_is_free_is_lost(monkeypatch):
    transport = RayTransport("j1", 3)

    def gone(vertex, incarnation):
        raise ValueError("Failed to look up actor")

    monkeypatch.setattr(transport, "_handle", gone)
    with pytest.raises(VertexDied):
        transport.submit("echo-0", 2, "who").result(GENEROUS_S)


def test_a_replacement_has_another_name():
    assert actor_name("j1", "echo-0", 1) != actor_name("j1", "echo-0", 2)


def test_an_answer_that_cannot_be_read_is_told_and_the_vertex_is_not_taken_for_dead(monkeypatch):
    """Ray puts what unpickling raises into a RaySystemError."""
    error = RaySystemError(ValueError("a sample of 3 tokens came with 2 log-probs"), "Traceback …")
    status, failure = ended(Reference(error=error), monkeypatch).result(GENEROUS_S)
    assert status == "error"
    assert failure.user_code
    assert "2 log-probs" in failure.error


@pytest.mark.parametrize("error", [ObjectLostError("ab", None, ""), RaySystemError("the raylet is away")])
def test_a_fault_of_rays_is_no_death_and_nobodys_code(monkeypatch, error):
    status, failure = ended(Reference(error=error), monkeypatch).result(GENEROUS_S)
    assert (status, failure.user_code) == ("error", False)
    assert type(error).__name__ in failure.error
