"""How large passes are: learned once, kept in the ledger, and each step as it was made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import OUT_OF_MEMORY
from gyre.rollouts.trainer.sample_ledger import SampleLedger
from gyre.store import LedgerStore, open_store
from gyre.workloads.memory.choice import smaller
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.learning.pass_sizes import PassSizes
from gyre.workloads.vertex.messages import Failure
from tests.workloads.reported import Reported

TOO_LARGE = (("actor-0", 1), "accumulate", Failure("no memory left", "", user_code=False, code=OUT_OF_MEMORY))

Told = list[dict[str, Any]]


class Trainer:
    """The sizes as the trainer of this term has them; ranks with `pass_tokens` of 4096, unless they have others, which
    keep activations by their own choice where they are `sparing`."""

    def __init__(
        self, store: LedgerStore, term: int, whole: int = 4096, most: int = 2, sparing: bool = False
    ) -> None:
        self.reported = Reported()
        self.told: Told = self.reported.events
        self.whole = {"pass_tokens": whole, **({"recompute": False} if sparing else {})}
        self.sizes = PassSizes(
            GroupState(SampleLedger(store, term), per_step=2),
            most,
            self.reported,
        )

    def begin(self, step: int) -> int:
        """The size that ranks begin the step with."""
        return self.begin_with(step)["pass_tokens"]

    def begin_with(self, step: int) -> dict[str, int]:
        while True:
            size = smaller(self.whole, self.sizes.halved("actor", step))
            if self.sizes.begun("actor", step, [{"step": step, **size}]):
                return size


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerStore]:
    with open_store(f"sqlite:///{tmp_path / 'gyre.db'}") as opened:
        yield opened.ledger("j1")


def test_what_one_trainer_learned_the_next_begins_with(store: LedgerStore) -> None:
    """Also where the first died before its ranks had begun with it, and told nobody."""
    first = Trainer(store, 1)
    assert first.begin(1) == 4096
    first.sizes.failed(TOO_LARGE, 3)
    second = Trainer(store, 2)
    assert second.begin(3) == 2048
    assert [(one["pass_tokens"], one["number"], one["error"]) for one in second.told] == [
        (2048, 1, "no memory left")
    ]
    assert second.begin(4) == 2048
    assert (first.told, len(second.told)) == ([], 1)


def test_a_later_trainer_tells_again_under_the_same_numbers(store: LedgerStore) -> None:
    first = Trainer(store, 1)
    for _ in range(3):  # the third is one too many
        first.sizes.failed(TOO_LARGE, 3)
        first.begin(3)
    second = Trainer(store, 2)
    assert second.begin(5) == 1024
    assert second.told == first.told
    assert [one["number"] for one in first.told] == [1, 2]


def test_a_step_is_trained_again_in_passes_of_the_size_it_was_made_in(store: LedgerStore) -> None:
    first = Trainer(store, 1)
    first.sizes.failed(TOO_LARGE, 3)
    first.begin(3)
    first.sizes.failed(TOO_LARGE, 5)
    first.begin(5)
    sizes = Trainer(store, 2).sizes
    assert [sizes.halved("actor", step) for step in range(1, 7)] == [0, 0, 1, 1, 2, 2]
    assert sizes.halved("critic", 6) == 0
    third = Trainer(store, 3, most=3)
    third.sizes.failed(TOO_LARGE, 4)  # which was made in these, and does not fit any more
    assert [third.sizes.halved("actor", step) for step in range(1, 7)] == [0, 0, 1, 2, 2, 2]


def test_of_whole_passes_of_another_size_nothing_is_known_until_they_have_the_old_one_again(
    store: LedgerStore,
) -> None:
    """The user continues the job with others; or a gang of more ranks has other room, and then as many as before."""
    first = Trainer(store, 1)
    first.sizes.failed(TOO_LARGE, 3)
    assert first.begin(3) == 2048
    resumed = Trainer(store, 2, whole=3000)
    assert resumed.begin(5) == 3000
    third = Trainer(store, 3, whole=3000)
    assert third.begin(6) == 3000
    third.sizes.failed(TOO_LARGE, 6)
    fourth = Trainer(store, 4, whole=3000)
    assert fourth.begin(6) == 1500
    fifth = Trainer(store, 5)
    assert [fifth.begin(7), fifth.begin(8)] == [2048, 2048]
    assert [one["number"] for one in fifth.told] == [one["number"] for one in first.told + fourth.told[-1:]]
    assert Trainer(store, 6, whole=3000).begin(9) == 1500


def test_other_failures_teach_nothing(store: LedgerStore) -> None:
    first = Trainer(store, 1)
    member, method, failure = TOO_LARGE
    first.sizes.failed((member, method, Failure(failure.error, "", user_code=True)), 3)
    assert (first.begin(3), first.told) == (4096, [])


def test_activations_are_spared_first_and_that_is_not_forgotten(store: LedgerStore) -> None:
    """It takes none of the halvings that the job permits. Whoever comes later begins so, and makes a step of before as
    it was made."""
    first = Trainer(store, 1, most=1, sparing=True)
    assert first.begin_with(1) == {"pass_tokens": 4096, "recompute": False}
    first.sizes.failed(TOO_LARGE, 3)
    assert first.begin_with(3) == {"pass_tokens": 4096, "recompute": True}
    second = Trainer(store, 2, most=1, sparing=True)
    assert second.sizes.halved("actor", 2) == 0
    assert second.begin_with(4) == {"pass_tokens": 4096, "recompute": True}
    second.sizes.failed(TOO_LARGE, 5)
    assert second.begin_with(5) == {"pass_tokens": 2048, "recompute": True}
    second.sizes.failed(TOO_LARGE, 6)
    assert second.begin_with(6) == {"pass_tokens": 2048, "recompute": True}, "no more than it may be"
    told = [(one["pass_tokens"], one["recompute"], one["number"]) for one in first.told + second.told[-1:]]
    assert told == [(4096, True, 1), (2048, True, 2)]
    assert Trainer(store, 3, most=1, sparing=True).begin_with(7) == {"pass_tokens": 2048, "recompute": True}


def test_where_no_halving_is_permitted_activations_are_spared_all_the_same(store: LedgerStore) -> None:
    for sparing, size in ((False, {"pass_tokens": 4096}), (True, {"pass_tokens": 4096, "recompute": True})):
        trainer = Trainer(store, 1 + sparing, most=0, sparing=sparing)
        trainer.begin(3)
        trainer.sizes.failed(TOO_LARGE, 3)
        assert trainer.begin_with(3) == size


def test_a_job_that_goes_on_with_recompute_of_its_own_begins_with_whole_passes(store: LedgerStore) -> None:
    """And where it is `auto` again, with what was learned of that."""
    first = Trainer(store, 1, sparing=True)
    first.begin(1)
    first.sizes.failed(TOO_LARGE, 3)
    first.begin(3)
    assert Trainer(store, 2).begin_with(5) == {"pass_tokens": 4096}
    assert Trainer(store, 3, sparing=True).begin_with(6) == {"pass_tokens": 4096, "recompute": True}
