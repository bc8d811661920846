"""What actor and critic promise as learners: steps that bear repetition, refusals that change nothing, checkpoints.

The digest of `state()` stands for the weights, so whatever must change nothing is seen by it, and whatever must come
out equal is compared by it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.rollouts.samples import Group
from gyre.testing.contracts.broken import promise, refused
from gyre.testing.contracts.class_under_test import VertexUnderTest, vertex_of
from gyre.testing.contracts.example_groups import MakeGroups, ids_of
from gyre.workloads.vertex.call_info import CallInfo

PER_STEP = 4
"""Groups of a step. They are trained as micro-batches of three and one."""


def state_of(vertex: VertexUnderTest) -> dict[str, Any]:
    state = vertex.call("state")
    kept = (
        isinstance(state, dict)
        and isinstance(state.get("step"), int)
        and isinstance(state.get("digest"), str)
    )
    promise(kept, "state()", 'return {"step": a whole number, "digest": a text}', state)
    return {"step": state["step"], "digest": state["digest"]}


def accumulate(vertex: VertexUnderTest, groups: list[Group], step: int, index: int) -> Any:
    return vertex.call("accumulate", groups, info=CallInfo(step=step, index=index))


def apply(vertex: VertexUnderTest, groups: list[Group], step: int, indices: int) -> Any:
    return vertex.call("apply", info=CallInfo(step=step, indices=indices, group_ids=ids_of(groups)))


def take_step(vertex: VertexUnderTest, groups: list[Group], step: int) -> Any:
    """The step as the trainer makes it; its metrics."""
    vertex.call("begin", step)
    accumulate(vertex, groups[:3], step, 0)
    accumulate(vertex, groups[3:], step, 1)
    return apply(vertex, groups, step, 2)


@dataclass(frozen=True)
class LearnerCheck:
    """`ready` is called on each new incarnation after `setup()`, with whatever comes before step 1."""

    cls: type
    role: str
    config: Mapping[str, Any] | None
    directory: Path
    groups: MakeGroups
    ready: Callable[[VertexUnderTest], None]

    def step_groups(self, step: int) -> list[Group]:
        return self.groups((step - 1) * PER_STEP, PER_STEP)

    @contextlib.contextmanager
    def vertex(self, incarnation: int = 1) -> Iterator[VertexUnderTest]:
        with vertex_of(
            self.cls, self.role, config=self.config, directory=self.directory, incarnation=incarnation
        ) as vertex:
            self.ready(vertex)
            yield vertex

    def check(self, also: Callable[[VertexUnderTest], None] = lambda vertex: None) -> None:
        """`also` is called on the vertex before step 1, after it, and on a restored one; it changes nothing."""
        folder = self.directory / "checkpoint"
        with self.vertex() as vertex:
            self._before_a_step(vertex)
            also(vertex)
            plain = self._first_step(vertex)
            self._repeated(vertex)
            self._refusals(vertex)
            also(vertex)
            at = state_of(vertex)
            self._checkpoint(vertex, folder)
            promise(state_of(vertex) == at, "checkpoint(path)", "change nothing", state_of(vertex))
            take_step(vertex, self.step_groups(2), 2)
            after = state_of(vertex)
        self._restored(folder, at, plain, after, also)
        with self.vertex() as vertex:
            self._cut_otherwise(vertex, at)

    # -- a step -------------------------------------------------------------------------------------

    def _before_a_step(self, vertex: VertexUnderTest) -> None:
        first = state_of(vertex)
        promise(first["step"] == 0, "state()", "say step 0 before the first step", first)
        promise(
            state_of(vertex) == first, "state()", "change nothing and say the same again", state_of(vertex)
        )
        with refused("begin(2)", "for the next step is 1"):
            vertex.call("begin", 2)
        with refused("accumulate(…, step=2)", "for the next step is 1"):
            accumulate(vertex, self.step_groups(2), 2, 0)
        promise(
            state_of(vertex) == first, "A call for a step beyond the next", "change nothing", state_of(vertex)
        )

    def _first_step(self, vertex: VertexUnderTest) -> dict[str, Any]:
        """With something accumulated before that `begin` must forget. Returns the metrics."""
        before, groups = state_of(vertex), self.step_groups(1)
        vertex.call("begin", 1)
        accumulate(vertex, self.groups(1000, 2), 1, 0)
        vertex.call("begin", 1)
        first = accumulate(vertex, groups[:3], 1, 0)
        again = accumulate(vertex, groups[:3], 1, 0)
        promise(again == first, "accumulate(…, step=1, index=0), repeated,", f"return {first!r} again", again)
        accumulate(vertex, groups[3:], 1, 1)
        accumulate(vertex, [], 1, 2)  # a rank's share may be empty
        for call, ids, indices in (
            ("apply(indices=2) of three micro-batches", groups, 2),
            ("apply(…) without a group that was accumulated", groups[:-1], 3),
            ("apply(…) with a group that was not accumulated", [*groups, *self.groups(999, 1)], 3),
        ):
            with refused(call, "for that is not what was accumulated"):
                apply(vertex, ids, 1, indices)
            promise(state_of(vertex) == before, call, "leave weights and step as they were", state_of(vertex))
        metrics = apply(vertex, groups, 1, 3)
        promise(isinstance(metrics, dict), "apply(…)", "return the metrics as a dict", metrics)
        after = state_of(vertex)
        promise(after["step"] == 1, "apply(step=1)", "leave state() at step 1", after)
        promise(
            after["digest"] != before["digest"],
            "state()",
            "have another digest when the weights are others (or do the groups of this check give no gradient?)",
            after,
        )
        again = apply(vertex, groups, 1, 3)
        promise(again == metrics, "apply(step=1), repeated,", f"return {metrics!r} again", again)
        replay = vertex.call("apply", info=CallInfo(step=1, indices=0, group_ids=[]))
        promise(
            replay == metrics, "apply(step=1, indices=0, group_ids=[])", "return the step's metrics", replay
        )
        promise(state_of(vertex) == after, "apply(step=1), repeated,", "change nothing", state_of(vertex))
        return dict(metrics)

    def _repeated(self, vertex: VertexUnderTest) -> None:
        """Calls for the step that was applied."""
        before = state_of(vertex)
        vertex.call("begin", 1)
        accumulate(vertex, self.step_groups(1)[:3], 1, 0)
        promise(
            state_of(vertex) == before,
            "A call for a step that was applied",
            "change nothing",
            state_of(vertex),
        )

    def _refusals(self, vertex: VertexUnderTest) -> None:
        before, old, new = state_of(vertex), self.step_groups(1), self.step_groups(2)
        vertex.call("begin", 2)
        with refused("accumulate(…) of a group that was trained", "or it would be trained twice"):
            accumulate(vertex, old[:1], 2, 0)
        vertex.call("begin", 2)
        with refused("apply(…) of a group that was trained", "or it would be trained twice"):
            accumulate(vertex, new, 2, 0)
            apply(vertex, [*new, old[0]], 2, 1)
        vertex.call("begin", 2)
        with refused(
            "accumulate(…) of a group that another micro-batch holds", "or it would be trained twice"
        ):
            accumulate(vertex, new[:1], 2, 0)
            accumulate(vertex, new[:1], 2, 1)
            apply(vertex, new[:1], 2, 2)
        vertex.call("begin", 2)
        promise(state_of(vertex) == before, "A call that was refused", "change nothing", state_of(vertex))

    def _cut_otherwise(self, vertex: VertexUnderTest, expected: dict[str, Any]) -> None:
        """The step of a new vertex, without the repetitions: were they counted, the digests would differ."""
        groups = self.step_groups(1)
        vertex.call("begin", 1)
        for index, part in enumerate((groups[:3], groups[3:], [])):
            accumulate(vertex, part, 1, index)
        apply(vertex, groups, 1, 3)
        promise(
            state_of(vertex) == expected,
            "A step with calls that came twice",
            f"end as one whose calls came once, {state_of(vertex)}",
            expected,
        )

    # -- checkpoints --------------------------------------------------------------------------------

    def _checkpoint(self, vertex: VertexUnderTest, folder: Path) -> None:
        folder.mkdir(parents=True)
        in_background = "background" in inspect.signature(vertex.workload.checkpoint).parameters
        for _ in range(2):  # the second time over the first
            written = vertex.call("checkpoint", folder, info=CallInfo(background=True))
            promise(written in (None, False, True), "checkpoint(path)", "return True, False or None", written)
            if written:
                promise(
                    in_background,
                    "checkpoint(path)",
                    "be written when it returns, without background",
                    written,
                )
                told = vertex.call("checkpoint_written", wait=True)
                promise(told is True, "checkpoint_written(wait=True)", "return True", told)

    def _restored(
        self,
        folder: Path,
        at: dict[str, Any],
        metrics: dict[str, Any],
        after: dict[str, Any],
        also: Callable[[VertexUnderTest], None],
    ) -> None:
        with self.vertex(incarnation=2) as vertex:
            with contextlib.suppress(Exception):  # perhaps it is refused; then nothing is to be dropped
                accumulate(vertex, self.groups(1000, 2), 1, 0)
            vertex.call("restore", folder)
            promise(state_of(vertex) == at, "restore(path)", f"bring back {at}", state_of(vertex))
            also(vertex)
            again = vertex.call("apply", info=CallInfo(step=1, indices=0, group_ids=[]))
            promise(
                again == metrics, "apply(…) of the restored step", f"return its metrics {metrics!r}", again
            )
            with refused(
                "accumulate(…) of a group that was trained before a restore", "for it is in the checkpoint"
            ):
                accumulate(vertex, self.step_groups(1)[:1], 2, 0)
            take_step(vertex, self.step_groups(2), 2)
            promise(
                state_of(vertex) == after,
                "The step after restore(path)",
                f"give the same bits, {after}",
                state_of(vertex),
            )
            vertex.call("restore", folder)  # the trainer goes back by a step
            promise(
                state_of(vertex) == at, "restore(path), after a step,", f"bring back {at}", state_of(vertex)
            )
            take_step(vertex, self.step_groups(2), 2)
            promise(
                state_of(vertex) == after,
                "The step after restore(path)",
                f"give the same bits, {after}",
                state_of(vertex),
            )
            with refused("restore(path) of a folder that is not there", "for nothing can be taken back"):
                vertex.call("restore", folder.with_name("nothing"))
            step = state_of(vertex)["step"]
            promise(
                step in (-1, 2),
                "restore(path) that failed",
                "leave the state as it was, or say step -1",
                step,
            )
