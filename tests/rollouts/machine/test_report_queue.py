"""Reports that are taken in together do what they do one by one, and one that cannot be harms no other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gyre.rollouts.plane import report_queue
from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.report_queue import ReportQueue
from gyre.rollouts.protocol.codec import encode, unpack
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import Hello, Request
from gyre.rollouts.protocol.progress import End, GenerationProgress, Report
from gyre.rollouts.samples import Group, pack_groups
from tests.rollouts.frames import empty_progress

INSTANCES = [f"r{number}" for number in range(12)]
LIMIT = 40
VERSION = 2


class Letters:
    """A text for tokens: a letter each."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [chr(ord("a") + one % 26) for one in ids]

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces(ids))


def opened(groups: int = 16, stops: Sequence[str] = ()) -> OpenGroups:
    """Open groups whose samples are all given out; the same each time. `stops` are texts that end them."""
    open_groups = OpenGroups(epoch=1, words=Letters())
    open_groups.newest_version = VERSION
    open_groups.promote(VERSION)
    for name in INSTANCES:
        open_groups.join(
            Hello(
                protocol=1,
                instance=name,
                incarnation="1",
                model="unset",
                engine="none",
                max_running=6,
                kv_tokens=1 << 20,
            )
        )
        open_groups.serve(name, VERSION)
    open_groups.open(
        Request(
            purpose="train",
            groups=pack_groups([Group(number, np.arange(3, dtype=np.int32)) for number in range(groups)]),
            n=4,
            sampling={"max_new_tokens": LIMIT},
            seed=5,
            min_version=0,
        ),
        stops,
    )
    open_groups.assign()
    return open_groups


def report_of(open_groups: OpenGroups, name: str, seq: int, draw: random.Random) -> GenerationProgress:
    """Something of what the instance has, mostly as it should be."""
    held = sorted(open_groups.held_by(name), key=lambda state: state.row)
    some = [state for state in held if draw.random() < 0.7]
    rows = [state.row for state in some]
    leases = [state.lease for state in some]
    starts = [state.length for state in some]
    counts = [draw.randrange(1, 4) for _ in some]
    versions = [draw.choice((1, VERSION)) for _ in some]
    if some and draw.random() < 0.3:
        at = draw.randrange(len(some))
        match draw.randrange(7):
            case 0:
                leases[at] += 1  # of nobody: superseded
            case 1:
                starts[at] = max(0, starts[at] - 1)  # sent again
            case 2:
                starts[at] += 1  # a gap
            case 3:
                counts[at] = LIMIT + 1
            case 4:
                versions[at] = VERSION + 1
            case 5:
                rows[-1] = 1 << 20
            case _:
                rows.reverse()
    total = sum(counts)
    tokens = np.array([draw.randrange(1000) for _ in range(total)], np.int32)
    logprobs = -tokens.astype(np.float32)
    if total and draw.random() < 0.03:
        logprobs[0] = np.nan
    return GenerationProgress(
        seq,
        np.array(rows, np.uint32),
        np.array(leases, np.uint64),
        np.array(starts, np.uint32),
        np.array(counts, np.uint32),
        np.array(versions, np.int32),
        tokens,
        logprobs,
        running=len(held),
        used_tokens=total,
        rate_tokens_s=10.0 * len(held),
    )


def seen(open_groups: OpenGroups) -> Any:
    """all that open groups say of its samples and its account."""
    return (
        open_groups.account.counters(),
        {
            state.key: (state.tokens()[0].tolist(), state.tokens()[1].tolist(), state.runs, state.lease)
            for state in open_groups.samples()
        },
        {name: one.generated_tokens for name, one in open_groups.instances.items()},
        {name: open_groups.instances[name].rate_tokens_s for name in INSTANCES},
        {name: open_groups.instances[name].outstanding_tokens for name in INSTANCES},
        open_groups.missing_tokens(),
    )


def restored(open_groups: OpenGroups) -> Any:
    batch = open_groups.take_batch()
    again = OpenGroups(epoch=2)
    again.newest_version = VERSION
    again.restore(batch.counters, batch.opened, batch.encoded())
    assert again.missing_tokens() == 0
    return batch.reports, {state.key: (state.tokens()[0].tolist(), state.runs) for state in again.samples()}


@pytest.mark.parametrize("seed", range(25))
def test_together_they_do_what_they_do_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    one_by_one, together = opened(), opened()
    for turn in range(1, 9):
        reports = []
        refused: dict[str, Any] = {}
        for name in draw.sample(INSTANCES, draw.randrange(1, len(INSTANCES) + 1)):
            report = unpack(encode(report_of(one_by_one, name, turn, draw)))
            assert isinstance(report, Report)
            if report.columns[0]:
                reports.append((name, report))
        taken_in = ReportQueue(together)
        for name, report in reports:
            taken_in.add(name, report)
            try:
                one_by_one.progress(name, report.unfold())
            except FrameError as error:
                refused[name] = error.details["reason"]
        taken_in.take_in()
        assert {name: error.details["reason"] for name, error in taken_in.refused} == refused
        assert seen(together) == seen(one_by_one)
    assert restored(together) == restored(one_by_one)


@pytest.mark.parametrize("seed", range(5))
def test_samples_end_by_their_texts_alike_together_and_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    one_by_one, together = opened(stops=("a", "xy")), opened(stops=("a", "xy"))
    for turn in range(1, 7):
        reports = ReportQueue(together)
        for name in filter(one_by_one.held_by, INSTANCES):
            report = honest(one_by_one, name, turn, draw)
            reports.add(name, report)
            one_by_one.progress(name, report.unfold())
        reports.take_in()
        assert not reports.refused
        assert seen(together) == seen(one_by_one)
    ended = [sample for sample in together.samples() if sample.finish]
    assert len(ended) == len(together.cancelled) > 10
    for sample in together.samples():
        text = Letters().text(sample.tokens()[0].tolist())
        assert ("a" in text or "xy" in text) == (sample in ended)
        assert not {"a", "xy"} & {text[:-1][at : at + size] for at in range(len(text)) for size in (1, 2)}
    assert together.account.discarded["after_stop"] > 10
    assert restored(together) == restored(one_by_one)


def test_the_seeds_above_try_whatever_can_be_wrong() -> None:
    found = set()
    for seed in range(25):
        draw = random.Random(seed)
        open_groups = opened()
        for turn in range(1, 9):
            for name in INSTANCES:
                try:
                    open_groups.progress(
                        name, unpack(encode(report_of(open_groups, name, turn, draw))).unfold()
                    )  # type: ignore[union-attr]
                except FrameError as error:
                    found.add(error.details["reason"])
        found |= {reason for reason, tokens in open_groups.account.discarded.items() if tokens}
    assert found >= {
        "gap",
        "too_long",
        "unknown_version",
        "unknown_row",
        "invalid",
        "not_finite",
        "superseded",
    }


def honest(open_groups: OpenGroups, name: str, seq: int, draw: random.Random) -> Report:
    """One to five tokens for each sample that the instance has."""
    held = sorted(open_groups.held_by(name), key=lambda state: state.row)
    counts = [draw.randrange(1, 6) for _ in held]
    total = sum(counts)
    report = unpack(
        encode(
            GenerationProgress(
                seq,
                np.array([state.row for state in held], np.uint32),
                np.array([state.lease for state in held], np.uint64),
                np.array([state.length for state in held], np.uint32),
                np.array(counts, np.uint32),
                np.full(len(held), VERSION, np.int32),
                np.array([draw.randrange(1000) for _ in range(total)], np.int32),
                np.full(total, -1.0, np.float32),
            )
        )
    )
    assert isinstance(report, Report)
    return report


def plain(open_groups: OpenGroups, name: str, seq: int) -> Report:
    """One token for each sample that the instance has."""
    held = sorted(open_groups.held_by(name), key=lambda state: state.row)
    report = unpack(
        encode(
            GenerationProgress(
                seq,
                np.array([state.row for state in held], np.uint32),
                np.array([state.lease for state in held], np.uint64),
                np.array([state.length for state in held], np.uint32),
                np.ones(len(held), np.uint32),
                np.full(len(held), VERSION, np.int32),
                np.arange(len(held), dtype=np.int32),
                np.zeros(len(held), np.float32),
            )
        )
    )
    assert isinstance(report, Report)
    return report


def test_what_is_sound_is_taken_in_by_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    open_groups = opened()
    passes: list[Any] = []
    many = open_groups.progress_of_many

    def counted(names: Any, *rest: Any) -> bool:
        passes.append(names)
        return many(names, *rest)

    monkeypatch.setattr(open_groups, "progress_of_many", counted)
    monkeypatch.setattr(open_groups, "progress", None)
    taken_in = ReportQueue(open_groups)
    for name in INSTANCES:
        taken_in.add(name, plain(open_groups, name, 1))
    assert not passes
    taken_in.take_in()
    assert passes == [INSTANCES]
    assert open_groups.account.generated == open_groups.in_flight_tokens == 64


def test_no_more_waits_than_a_freed_slot_may_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_queue, "MOST_ROWS", 20)
    open_groups = opened()
    taken_in = ReportQueue(open_groups)
    for name in INSTANCES:
        taken_in.add(name, plain(open_groups, name, 1))
        assert sum(map(taken_in.has, INSTANCES)) * 5 < 20 + 5
    assert open_groups.account.generated > 32


def test_one_instance_s_report_can_be_taken_in_before_the_others() -> None:
    open_groups = opened()
    taken_in = ReportQueue(open_groups)
    for name in INSTANCES[:3]:
        taken_in.add(name, plain(open_groups, name, 1))
    taken_in.take_in_of("r1")
    assert not taken_in.refused
    assert not taken_in.has("r1")
    assert all(state.length == 1 for state in open_groups.held_by("r1"))
    assert all(state.length == 0 for state in open_groups.held_by("r0"))
    first = next(iter(open_groups.held_by("r1")))
    ended = empty_progress(2)
    ended.ends.append(End(first.row, first.lease, "stop", "", ()))
    open_groups.progress("r1", ended)
    taken_in.take_in()
    assert all(state.length == 1 for state in open_groups.held_by("r0"))
    assert open_groups.missing_tokens() == 0
