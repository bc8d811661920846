"""The sample ledger: what each next writer is given, who may write, and an account that is exact."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gyre.errors import ConfigError, Fenced, StoreLost
from gyre.rollouts.samples import Group, Sample, VersionRun, pack_groups
from gyre.rollouts.trainer.sample_ledger import RecordedBatch, SampleLedger, account_of, rollout_ledger
from gyre.store import open_store
from tests.examples import examples

BATCH = 4


def group(group_id, version=0):
    sample = Sample(
        np.array([group_id, version], np.int32),
        np.zeros(2, np.float32),
        (VersionRun(version, 0, 1), VersionRun(version + 1, 1, 2)),
        reward=group_id / 3,
    )
    return Group(group_id, np.array([group_id], np.int32), {"answer": str(group_id)}, [sample])


def batch(step):
    return list(range((step - 1) * BATCH, step * BATCH))


@pytest.fixture
def store(tmp_path):
    with open_store(f"sqlite:///{tmp_path / 'gyre.db'}") as opened:
        yield opened.ledger("j1")


@pytest.fixture
def ledger(store):
    made = SampleLedger(store, 1)
    made.open()
    return made


def draw_and_finish(ledger, step, version=0):
    ledger.record_drawn(batch(step), step * BATCH)
    ledger.record_scored([group(group_id, version) for group_id in batch(step)])


def train(ledger, step):
    ledger.record_trained(
        step=step, version=step, digest=f"d{step}", group_ids=batch(step), metrics={"tokens": step}, now=1.0
    )


def test_the_first_writer_finds_nothing(store):
    found = SampleLedger(store, 1).open()
    assert (found.cursor, found.groups, found.step, found.checkpoint_step) == (0, {}, 0, None)


def test_prompts_of_other_data_are_refused_and_those_of_the_same_are_not(store, ledger):
    ledger.check_data("the data set a1")
    SampleLedger(store, 1).check_data("the data set a1")
    with pytest.raises(ConfigError, match=r"from the data set a1; now they would come from the data set b2"):
        ledger.check_data("the data set b2")


def test_after_a_draw_the_next_writer_knows_how_far_it_went_and_has_no_samples(store, ledger):
    ledger.record_drawn([0, 1, 2], 3)
    found = SampleLedger(store, 2).open()
    assert (found.cursor, found.groups, found.step) == (3, {}, 0)


def test_after_the_samples_are_written_the_next_writer_has_them_bit_by_bit(store, ledger):
    draw_and_finish(ledger, 1)
    found = SampleLedger(store, 2).open()
    assert list(found.groups) == [0, 1, 2, 3]
    assert pack_groups(list(found.groups.values())) == pack_groups([group(at) for at in range(4)])


def test_the_samples_of_what_is_discarded_are_kept_nowhere(store, ledger):
    """A run that replaces groups would else hold all of them, in the database and in each new trainer's memory."""
    draw_and_finish(ledger, 1)
    told = {"reason": "stale", "tokens": 2, "evidence": "", "now": 1.0}
    ledger.record_replaced(0, replaced_by=4, cursor=5, **told)
    ledger.record_redrawn(1, version=3, **told)
    kept = {row.group_id: len(row.payload or b"") for row in store.load().groups}
    assert [number for number, size in kept.items() if size] == [2, 3]
    found = SampleLedger(store, 2).open()
    assert list(found.groups) == [2, 3]
    assert found.queued == {1: 3, 4: None}
    ledger = SampleLedger(store, 3)
    ledger.open()
    ledger.record_scored([group(1, version=3)])
    assert SampleLedger(store, 4).open().groups[1].versions == (3, 4)


def test_what_was_written_is_there_for_whoever_reads_the_moment_it_is_written(store, ledger, tmp_path):
    """Written before trained: the call has returned, so another connection sees it."""
    draw_and_finish(ledger, 1)
    with open_store(f"sqlite:///{tmp_path / 'gyre.db'}", read_only=True) as other:
        assert {row.status for row in other.ledger("j1").load().groups} == {"done"}


def test_after_a_step_the_next_writer_is_given_it_again_until_a_checkpoint_covers_it(store, ledger):
    for step in (1, 2):
        draw_and_finish(ledger, step)
        train(ledger, step)
    found = SampleLedger(store, 2).open()
    assert (found.step, found.digests) == (2, {1: "d1", 2: "d2"})
    assert list(found.groups) == batch(1) + batch(2)
    assert found.metrics[2] == {"tokens": 2}

    SampleLedger(store, 2).record_checkpoint(step=1, path=Path("/c/1"), now=2.0)
    found = SampleLedger(store, 3).open()
    assert (found.checkpoint_step, found.checkpoint_path) == (1, Path("/c/1"))
    assert list(found.groups) == batch(2)
    assert found.step == 2


def test_samples_beyond_the_checkpoint_are_kept_when_it_is_written(store, ledger):
    for step in (1, 2):
        draw_and_finish(ledger, step)
    train(ledger, 1)
    ledger.record_checkpoint(step=1, path=Path("/c/1"), now=2.0)
    assert list(SampleLedger(store, 2).open().groups) == batch(2)


def test_samples_outlast_one_checkpoint_more_for_the_newest_may_be_damaged(store, ledger):
    for step in (1, 2, 3):
        draw_and_finish(ledger, step)
        ledger.record_batch(RecordedBatch(step, 0, (tuple(batch(step)), ()), last=True))
        train(ledger, step)
        ledger.record_checkpoint(step=step, path=Path(f"/c/{step}"), now=2.0, older=step - 1 or None)
    assert SampleLedger(store, 2).open().groups == {}, "they are not loaded without need"
    groups, batches = ledger.trained_since(2, 3)
    assert list(groups) == batch(3)
    assert all(found.samples for found in groups.values())
    assert batches == {3: [RecordedBatch(3, 0, (tuple(batch(3)), ()), last=True)]}
    assert ledger.trained_since(1, 3) is None, "step 2 is covered by both that are kept"


def test_the_versions_of_the_tokens_are_in_the_rows(store, ledger):
    draw_and_finish(ledger, 1, version=7)
    assert {(row.version_min, row.version_max) for row in store.load().groups} == {(7, 8)}


@pytest.mark.parametrize(
    "write",
    [
        lambda ledger: ledger.record_drawn([4], 5),
        lambda ledger: ledger.record_scored([group(0)]),
        lambda ledger: train(ledger, 1),
        lambda ledger: ledger.record_checkpoint(step=1, path=Path("/c/1"), now=2.0),
        lambda ledger: ledger.open(),
    ],
    ids=["drawn", "done", "trained", "checkpoint", "open"],
)
def test_a_writer_of_an_older_term_is_fenced_and_changes_nothing(store, ledger, write):
    draw_and_finish(ledger, 1)
    SampleLedger(store, 2).open()
    before = store.load()
    with pytest.raises(Fenced):
        write(ledger)
    assert store.load() == before


def test_reading_the_account_needs_no_term(store, ledger):
    SampleLedger(store, 2).open()
    assert ledger.account().drawn == 0


def test_the_account_counts_every_prompt_once(store, ledger):
    draw_and_finish(ledger, 1)
    train(ledger, 1)
    draw_and_finish(ledger, 2)
    ledger.record_drawn([8, 9], 10)
    account = ledger.account()
    assert (account.drawn, account.trained, account.waiting) == (10, 4, 6)
    assert (account.lost, account.trained_twice) == ((), ())


def test_the_account_names_what_is_lost_and_what_is_trained_twice(store, ledger):
    ledger.record_drawn([0, 1, 4], 6)
    ledger.record_trained(step=1, version=1, digest="d", group_ids=[0, 1], metrics={}, now=1.0)
    ledger.record_trained(step=2, version=2, digest="d", group_ids=[1, 4], metrics={}, now=1.0)
    account = account_of(store)
    assert account.lost == (2, 3, 5)
    assert account.trained_twice == (1,)


class Ledger(RuleBasedStateMachine):
    """Any order of a trainer's writes, with a new writer at any moment."""

    def __init__(self):
        super().__init__()
        import shutil
        import tempfile

        self.folder = Path(tempfile.mkdtemp(prefix="gyre-ledger-"))
        self.remove = lambda: shutil.rmtree(self.folder)
        self.opened = None

    @initialize()
    def begin(self):
        global _EMPTY
        if _EMPTY is None:
            with open_store(f"sqlite:///{self.folder / 'gyre.db'}"):
                pass
            _EMPTY = (self.folder / "gyre.db").read_bytes()
        (self.folder / "gyre.db").write_bytes(_EMPTY)
        self.opened = open_store(f"sqlite:///{self.folder / 'gyre.db'}")
        self.store = self.opened.ledger("j1")
        self.term = 1
        self.ledger = SampleLedger(self.store, 1)
        self.ledger.open()
        self.cursor, self.step, self.checkpoint = 0, 0, None
        self.done: set[int] = set()

    @rule(count=st.integers(1, 5))
    def draw(self, count):
        new = list(range(self.cursor, self.cursor + count))
        self.cursor += count
        self.ledger.record_drawn(new, self.cursor)

    @precondition(lambda self: self.opened and len(self.done) < self.cursor)
    @rule(data=st.data())
    def finish(self, data):
        left = [at for at in range(self.cursor) if at not in self.done]
        some = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        self.ledger.record_scored([group(at) for at in some])
        self.done |= set(some)

    @precondition(lambda self: self.opened and self.done.issuperset(batch(self.step + 1)))
    @rule()
    def train(self):
        self.step += 1
        train(self.ledger, self.step)

    @precondition(lambda self: self.opened and self.step != self.checkpoint)
    @rule()
    def write_checkpoint(self):
        self.checkpoint = self.step
        self.ledger.record_checkpoint(step=self.step, path=self.folder / str(self.step), now=3.0)

    @rule()
    def die(self):
        old, self.term = self.ledger, self.term + 1
        self.ledger = SampleLedger(self.store, self.term)
        found = self.ledger.open()
        assert (found.cursor, found.step, found.checkpoint_step) == (self.cursor, self.step, self.checkpoint)
        covered = (self.checkpoint or 0) * BATCH if self.checkpoint is not None else 0
        assert set(found.groups) == {at for at in self.done if at >= covered}
        with pytest.raises(Fenced):
            old.record_drawn([0], 1)

    @invariant()
    def account_is_exact(self):
        if self.opened:
            account = self.ledger.account()
            trained = self.step * BATCH
            assert (account.drawn, account.trained, account.waiting) == (
                self.cursor,
                trained,
                self.cursor - trained,
            )
            assert (account.lost, account.trained_twice) == ((), ())

    def teardown(self):
        if self.opened:
            self.opened.close()
        self.remove()


_EMPTY: bytes | None = None
TestLedger = Ledger.TestCase
TestLedger.settings = settings(deadline=None, max_examples=examples(12), stateful_step_count=20)


# -- a store that is lost --------------------------------------------------------------------------------


def _move(source, target):
    target.mkdir(exist_ok=True)
    for file in sorted(source.glob("gyre.db*"), reverse=True):
        os.rename(file, target / file.name)


@pytest.mark.parametrize(("hold_s", "written"), [(20.0, True), (0.1, False)])
def test_a_ledger_waits_for_a_lost_store_as_long_as_its_job_does(tmp_path, store, hold_s, written):
    url, away = f"sqlite:///{tmp_path / 'gyre.db'}", tmp_path / "away"
    with SampleLedger.at(url, "j1", 1, hold_s=hold_s) as ledger:
        ledger.open()
        _move(tmp_path, away)
        if written:
            timer = threading.Timer(0.3, _move, (away, tmp_path))
            timer.start()
            ledger.record_drawn(batch(1), BATCH)
            timer.join()
        else:
            with pytest.raises(StoreLost):
                ledger.record_drawn(batch(1), BATCH)
            _move(away, tmp_path)
    assert account_of(store).drawn == (BATCH if written else 0)


def test_the_managers_rows_wait_as_long(tmp_path, store):
    with rollout_ledger(f"sqlite:///{tmp_path / 'gyre.db'}", "j1", hold_s=7.0) as rows:
        assert rows._database._hold_s == 7.0
