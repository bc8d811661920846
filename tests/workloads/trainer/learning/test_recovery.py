"""Where a gang's state comes from: memory, then disk, then an instance; told, and never some ranks from one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gyre.rollouts.trainer.sample_ledger import Restore
from gyre.workloads.gang.gang import GangLost
from gyre.workloads.gang.weight_copy import WeightCopy, copy_of
from gyre.workloads.learner.errors import CheckpointMismatch
from gyre.workloads.owner import NOBODY
from gyre.workloads.trainer.learning.checkpoints import MARKER
from gyre.workloads.trainer.learning.recovery import Recovery
from gyre.workloads.vertex.messages import Failure
from tests.workloads.reported import Reported

STEP = 9


class Groups:
    """The part of `GroupState` that a recovery needs."""

    def __init__(self) -> None:
        self.step = STEP
        self.digests = {step: f"digest {step}" for step in range(1, STEP + 1)}
        self.restores: dict[str, Restore] = {}
        self.log: list[Restore] = []

    def record_restore_begun(self, role: str, gang: int, source: str, checkpoint_step: int) -> Restore:
        return self.write(Restore(1, role, gang, source, checkpoint_step))

    def record_restored(self, restore: Restore, step: int, seconds: float | None) -> Restore:
        return self.write(replace(restore, step=step, seconds=seconds))

    def write(self, restore: Restore) -> Restore:
        self.log.append(restore)
        self.restores[restore.role] = restore
        return restore

    def forget_digests(self, step: int) -> None:
        self.digests = {at: digest for at, digest in self.digests.items() if at < step}

    def trained_by(self, step: int) -> list[list[int]]:
        return [[0, 2 * step]]


class Answers:
    """A call on its way."""

    def __init__(self, values: list[Any], lost: GangLost | None = None) -> None:
        self.values, self.lost = values, lost

    def results(self, *, timeout_s: float) -> list[Any]:
        if self.lost is not None:
            raise self.lost
        return self.values

    def first(self, *, timeout_s: float) -> Any:
        return self.results(timeout_s=timeout_s)[0]


class Ranks:
    """A gang of two. `kept` is the step that both have in memory, None where they have none in common."""

    role = "actor"
    members = (("actor-0", 2), ("actor-1", 2))
    owner = NOBODY

    def __init__(self, *, kept: int | None = None, disk: bool = True) -> None:
        self.kept = kept
        self.disk = disk
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refused: list[str] = []
        self.code = CheckpointMismatch.code
        self.ended = True
        self.on_call: Callable[[str], None] = lambda method: None

    def _called(self, method: str, **given: Any) -> None:
        self.on_call(method)
        self.calls.append((method, given))

    def restore_from_memory(self, *, newer_than: int, at_most: int) -> Answers:
        self._called("restore_from_memory")
        fits = self.kept is not None and newer_than < self.kept <= at_most
        return Answers([self.kept if fits else None] * 2)

    def restore(self, path: Path) -> Answers:
        self._called("restore")
        failure = None
        if not self.disk:
            failure = Failure("it is gone", "", user_code=False)
        elif str(path) in self.refused:
            failure = Failure("a byte is wrong", "", user_code=False, code=self.code)
        if failure is None:
            return Answers([None, None])
        return Answers([], GangLost((("actor-0", 1), "restore", failure), ended=self.disk and self.ended))

    def fetch_weights(self, **given: Any) -> Answers:
        self._called("fetch_weights", **given)
        return Answers([("10.0.0.1:7", "/dev/shm/first")])

    def restore_weights(self, **given: Any) -> Answers:
        self._called("restore_weights", **given)
        return Answers([None, None])

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]


class Case:
    """`copy` is what instances have; the checkpoint of step 6 is on the disk unless it is `lost`."""

    def __init__(
        self,
        tmp_path: Path,
        ranks: Ranks,
        *,
        lost: bool = False,
        copy: WeightCopy | None = None,
        takes_weights: bool = True,
    ) -> None:
        self.groups = Groups()
        self.ranks = ranks
        self.reported = Reported()
        self.reports = self.reported.events
        self.copy = copy
        self.problems: list[str] = []
        self.older: tuple[int, Path] | None = None
        self.checkpoint = tmp_path / "step_00000006"
        if not lost:
            self.checkpoint.mkdir()
            (self.checkpoint / MARKER).write_text('{"step": 6, "files": {}}')
        self.recovery = Recovery(
            self.groups,  # type: ignore[arg-type]
            timeout_s=1.0,
            takes_weights=takes_weights,
            copies=self,
            checkpoints=self,
            reports=self.reported,
            copy_within_s=0.0,
        )

    def newest(self) -> WeightCopy | None:
        return self.copy

    def go_back(self, problem: str) -> tuple[int, Path] | None:
        self.problems.append(problem)
        return self.older

    def restore(self, *, keeps_memory: bool = True, has_copies: bool = True, at_most: int = STEP + 1) -> int:
        states = [{"step": 0, **({"memory": True} if keeps_memory else {})}] * 2
        return self.recovery.restore(
            self.ranks,  # type: ignore[arg-type]
            states,
            self.checkpoint,
            6,
            at_most=at_most,
            actor=self.ranks if has_copies else None,  # type: ignore[arg-type]
        )

    @property
    def told(self) -> tuple[str, int]:
        (report,) = self.reports
        assert report["kind"] == "GangRestored"
        return report["source"], report["step"]


def copy(version: int, newest: int | None = None) -> WeightCopy:
    return WeightCopy(version, "c", ("10.0.0.2:9",), version if newest is None else newest)


@pytest.mark.parametrize("kept", [6, 7, STEP, STEP + 1])
def test_memory_is_first_from_the_checkpoints_step_up_to_one_that_the_ledger_has_not_yet(
    tmp_path: Path, kept: int
) -> None:
    case = Case(tmp_path, Ranks(kept=kept))
    assert case.restore() == kept
    assert case.ranks.methods == ["restore_from_memory"]
    assert case.told == ("memory", kept)


@pytest.mark.parametrize("kept", [None, 5, STEP + 2])
def test_the_disk_is_next(tmp_path: Path, kept: int | None) -> None:
    case = Case(tmp_path, Ranks(kept=kept), copy=copy(STEP))
    assert case.restore() == 6
    assert case.ranks.methods == ["restore_from_memory", "restore"]
    assert case.told == ("disk", 6)


def test_ranks_that_keep_none_are_not_asked(tmp_path: Path) -> None:
    """A user's own workload has no such method."""
    case = Case(tmp_path, Ranks(kept=STEP))
    assert case.restore(keeps_memory=False) == 6
    assert case.ranks.methods == ["restore"]


def test_weights_of_an_instance_are_last_and_leave_no_digest_to_compare_with(tmp_path: Path) -> None:
    case = Case(tmp_path, Ranks(), lost=True, copy=copy(8))
    assert case.restore() == 8
    assert case.ranks.methods == ["restore_from_memory", "fetch_weights", "restore_weights"]
    _, told = case.ranks.calls[-1]
    assert told["sources"] == [("10.0.0.1:7", "/dev/shm/first"), ("10.0.0.2:9", "")]
    assert (told["version"], told["checksum"], told["trained"]) == (8, "c", [[0, 16]])
    assert case.told == ("instance", 8)
    assert sorted(case.groups.digests) == list(range(1, 8))


@pytest.mark.parametrize("lost", [False, True])
def test_the_checkpoint_before_it_is_next_where_ranks_refuse_the_last_or_it_is_gone(
    tmp_path: Path, lost: bool
) -> None:
    """Before the weights of an instance, which know nothing of the optimizer."""
    case = Case(tmp_path, Ranks(), lost=lost, copy=copy(STEP))
    case.ranks.refused = [str(case.checkpoint)]
    case.older = (4, tmp_path / "step_00000004")
    assert case.restore() == 4
    assert case.told == ("disk", 4)
    assert case.groups.restores["actor"].checkpoint_step == 4
    (problem,) = case.problems
    assert ("is gone" if lost else "a byte is wrong") in problem
    assert case.ranks.methods[1:] == ["restore"] * (1 if lost else 2)


@pytest.mark.parametrize(
    ("ended", "code"), [(False, CheckpointMismatch.code), (True, "")], ids=["a-rank-hangs", "another-error"]
)
def test_what_is_no_damage_to_all_is_left_to_the_master(tmp_path: Path, ended: bool, code: str) -> None:
    case = Case(tmp_path, Ranks())
    case.ranks.refused, case.ranks.ended, case.ranks.code = [str(case.checkpoint)], ended, code
    case.older = (4, tmp_path / "step_00000004")
    with pytest.raises(GangLost):
        case.restore()
    assert case.problems == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"takes_weights": False, "copy": copy(STEP)}, ""),
        ({"copy": None}, "no instance has a policy version"),
        ({"copy": copy(5)}, "cannot go on from"),
        ({"copy": copy(8, newest=STEP)}, "version 9 was published, and instances have 8 only"),
    ],
)
def test_a_lost_checkpoint_fails_as_one_where_weights_cannot_or_must_not_do(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    case = Case(tmp_path, Ranks(disk=False), lost=True, **changes)
    with pytest.raises(GangLost) as lost:
        case.restore()
    assert case.ranks.methods[-1] == "restore"
    assert case.reports == []
    assert lost.value.blamed is not None
    error = lost.value.blamed[2].error
    assert error.startswith("it is gone")
    assert why in error


@pytest.mark.parametrize(
    ("kept", "sources"), [(7, ["memory"]), (None, ["memory", "instance"])], ids=["memory", "instance"]
)
def test_the_ledger_knows_before_the_ranks_do_and_before_anybody_is_told(
    tmp_path: Path, kept: int | None, sources: list[str]
) -> None:
    case = Case(tmp_path, Ranks(kept=kept), lost=True, copy=copy(8))
    known: list[tuple[str, str]] = []

    def called(method: str) -> None:
        known.append((method, case.groups.restores["actor"].source))
        assert case.groups.restores["actor"].step is None, "under way"

    case.ranks.on_call = called
    at = case.restore()
    assert known[0] == ("restore_from_memory", "memory")
    assert known[-1][1] == sources[-1]
    assert [one.source for one in case.groups.log] == [*sources, sources[-1]]
    last = case.groups.log[-1]
    assert (last.step, last.gang) == (at, 2)
    (report,) = case.reports
    assert (report["number"], report["gang"], report["seconds"]) == (1, 2, last.seconds)


@pytest.mark.parametrize(
    ("left", "at", "told"),
    [
        (Restore(3, "actor", 2, "instance", 6), 8, (3, "instance", 8, None)),
        (Restore(3, "actor", 2, "instance", 6), None, None),
        (Restore(3, "actor", 1, "instance", 6), 8, None),
        (Restore(3, "actor", 2, "disk", 6, 6, 0.5), 9, (3, "disk", 6, 0.5)),
        (Restore(3, "actor", 1, "disk", 6, 6, 0.5), None, (3, "disk", 6, 0.5)),
        (Restore(3, "critic", 2, "disk", 6, 6, 0.5), 9, None),
    ],
    ids=["it-ended", "it-did-not", "other-ranks", "told-again", "of-ranks-that-are-gone", "another-role"],
)
def test_what_an_earlier_trainer_may_not_have_told_is_told(
    tmp_path: Path, left: Restore, at: int | None, told: tuple[Any, ...] | None
) -> None:
    case = Case(tmp_path, Ranks())
    case.groups.restores[left.role] = left
    for _ in range(2):  # a gang that is formed again has nothing new to tell
        case.recovery.report_earlier(case.ranks, at)  # type: ignore[arg-type]
    found = [(r["number"], r["source"], r["step"], r["seconds"]) for r in case.reports]
    assert found == ([told] if told else [])


def test_what_is_trained_beside_a_critic_is_in_no_instance(tmp_path: Path) -> None:
    case = Case(tmp_path, Ranks(disk=False), lost=True, copy=copy(STEP))
    with pytest.raises(GangLost):
        case.restore(has_copies=False)


def test_the_manager_is_asked_who_acknowledged_what() -> None:
    def one(version: int, checksum: str, source: str = "h:1", state: str = "idle") -> dict[str, Any]:
        return {"version": version, "checksum": checksum, "source": source, "state": state}

    status = {
        "version": 4,
        "instances": [
            one(2, "two"),
            one(3, "three", "h:3"),
            one(3, "three", "h:4", "working"),
            one(4, "four", "h:5", "cut"),
            one(4, "four", ""),
            one(-1, "", "h:6"),
        ],
    }
    assert copy_of(status) == WeightCopy(3, "three", ("h:3", "h:4"), 4)
    assert copy_of({"version": -1, "instances": []}) is None
