"""Whether an actor keeps its contract: that of every learner, and what it says of its weights."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from gyre.rollouts.protocol.endpoint import write_endpoint
from gyre.testing.contracts.broken import broken, promise
from gyre.testing.contracts.class_under_test import VertexUnderTest
from gyre.testing.contracts.example_groups import MakeGroups, groups_of
from gyre.testing.contracts.learner import LearnerCheck, state_of, take_step
from gyre.workloads.gang.weight_copy import FetchedCopy
from gyre.workloads.protocols import Actor, KeepsStates, PublishesInBackground, PublishesModel
from gyre.workloads.vertex.call_info import CallInfo

EXPORTED = ("version", "step", "checksum", "size_bytes")
PUBLISHED = ("version", "checksum", "size_bytes", "source", "path", "model")


FETCH_WITHIN_S = 20.0
"""For a source on this machine to begin to answer: it does in milliseconds, unless the machine is very busy."""


def check_actor(
    cls: type,
    *,
    config: Mapping[str, Any] | None = None,
    groups: MakeGroups | None = None,
    directory: Path | None = None,
    publishes: bool | None = None,
) -> None:
    """Raises ContractBroken at the first promise of `Actor` that the class does not keep.

    `groups(first, count)` gives scored groups to train on; by default they are over the task that `config` names, with
    answers at random. `publishes`: whether it is for the default rollout plane, which needs `publish_model`; None where
    that is left to whether it has the method. `directory` is the job's; a temporary one by default.
    """
    with tempfile.TemporaryDirectory(prefix="gyre-contract-") as temporary:
        check = LearnerCheck(
            cls,
            "actor",
            config,
            directory or Path(temporary),
            groups or groups_of(config),
            _warm_started,
        )
        check.check(_check_export)
        _check_warm_start(check)
        with check.vertex() as vertex:
            if publishes or (publishes is None and vertex.has("publish_model")):
                vertex.require(PublishesModel)
                _check_publish(check, vertex)


def _warm_started(vertex: VertexUnderTest) -> None:
    vertex.require(Actor)
    if vertex.incarnation == 1:  # what comes later restores a checkpoint
        told = vertex.call("warm_start")
        promise(isinstance(told, dict), "warm_start()", "return a dict", told)


def _check_warm_start(check: LearnerCheck) -> None:
    with check.vertex() as vertex:
        first, before = vertex.call("warm_start"), state_of(vertex)
        again = vertex.call("warm_start")
        promise(again == first, "warm_start(), repeated,", f"return {first!r} again", again)
        promise(state_of(vertex) == before, "warm_start(), repeated,", "change nothing", state_of(vertex))
        take_step(vertex, check.step_groups(1), 1)
        after = state_of(vertex)
        vertex.call("warm_start")
        promise(state_of(vertex) == after, "warm_start() after a step", "change nothing", state_of(vertex))
        if vertex.call("state").get("memory"):
            _check_memory(vertex, after)


def _check_export(vertex: VertexUnderTest) -> None:
    state = state_of(vertex)
    exported = vertex.call("export_weights", version=7)
    kept = isinstance(exported, tuple) and len(exported) == 2 and isinstance(exported[0], dict)
    promise(kept, "export_weights(version=7)", "return (manifest, buffer)", type(exported).__name__)
    manifest, buffer = exported
    missing = [key for key in EXPORTED if key not in manifest]
    promise(
        not missing,
        "export_weights(version=7)",
        f"name {', '.join(EXPORTED)} in the manifest",
        f"missing {missing}",
    )
    promise(
        isinstance(buffer, bytes),
        "export_weights(version=7)",
        "give the buffer as bytes",
        type(buffer).__name__,
    )
    promise(manifest["version"] == 7, "export_weights(version=7)", "have that version", manifest["version"])
    promise(manifest["step"] == state["step"], "export_weights(version=7)", f"say {state}", manifest["step"])
    try:
        msgpack.packb((manifest, buffer))
    except (TypeError, ValueError, OverflowError) as error:
        raise broken("export_weights(version=7)", "have plain data in its manifest", str(error)) from error
    other, its_buffer = vertex.call("export_weights", version=8)
    promise(
        other["checksum"] == manifest["checksum"],
        "export_weights(version=8)",
        "have the checksum of the same weights as version 7",
        other["checksum"],
    )
    promise(
        len(its_buffer) == len(buffer), "export_weights(version=8)", "have the same weights", len(its_buffer)
    )
    promise(state_of(vertex) == state, "export_weights(…)", "change nothing", state_of(vertex))


def _check_memory(vertex: VertexUnderTest, at: dict[str, Any]) -> None:
    vertex.require(KeepsStates)
    found = vertex.call("restore_from_memory", newer_than=at["step"], at_most=at["step"] + 1)
    promise(found is None, "restore_from_memory(newer_than=the last step)", "return None", found)
    promise(
        state_of(vertex) == at, "restore_from_memory(…) that returns None", "change nothing", state_of(vertex)
    )
    found = vertex.call("restore_from_memory", newer_than=-1, at_most=at["step"])
    promise(
        found is None or found == state_of(vertex)["step"],
        "restore_from_memory(…)",
        "return the step of the state that it took back",
        found,
    )
    vertex.call("forget_memory")
    vertex.call("forget_memory")


def _check_publish(check: LearnerCheck, vertex: VertexUnderTest) -> None:
    """As an instance fetches it: by the real receiver, which compares every byte with the manifest."""
    write_endpoint(check.directory, {"url": "ws://127.0.0.1:9", "token": "contract"})
    take_step(vertex, check.step_groups(1), 1)
    state = state_of(vertex)
    told = vertex.call("publish_model", version=1)
    kept = isinstance(told, dict) and all(key in told for key in PUBLISHED)
    promise(kept, "publish_model(version=1)", f"return {', '.join(PUBLISHED)}", told)
    promise(told["version"] == 1, "publish_model(version=1)", "have that version", told["version"])
    again = vertex.call("publish_model", version=1)
    promise(
        again["checksum"] == told["checksum"],
        "publish_model(version=1), repeated,",
        f"have the checksum {told['checksum']} again",
        again["checksum"],
    )
    if vertex.has("model_published"):
        vertex.require(PublishesInBackground)
        begun = vertex.call("publish_model", version=1, info=CallInfo(background=True))
        late = begun or vertex.call("model_published", version=1, timeout_s=FETCH_WITHIN_S)
        promise(
            late["checksum"] == told["checksum"],
            "publish_model(version=1, background=True)",
            f"have the checksum {told['checksum']} again",
            late["checksum"],
        )
    promise(state_of(vertex) == state, "publish_model(…)", "change nothing", state_of(vertex))
    try:
        copy = FetchedCopy(
            check.directory,
            "contract",
            version=1,
            checksum=told["checksum"],
            sources=[(told["source"], "")],
            root=check.directory / "fetched",
            give_up_s=FETCH_WITHIN_S,
        )
    except Exception as error:  # whatever a receiver raises
        told_of = f"{type(error).__name__}: {error}"
        raise broken("publish_model(version=1)", "make it fetchable from its source", told_of) from error
    try:
        files = {file.name for file in copy.path.iterdir()}
        promise("config.json" in files, "publish_model(version=1)", "put a model folder there", sorted(files))
        promise(bool(copy.tensors()), "publish_model(version=1)", "put the model's tensors there", "none")
    finally:
        copy.close()
