"""Groups on their way to the trainer: however large they are, they arrive complete."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.rollouts.plane import delivery as delivery_module
from gyre.rollouts.plane.delivery import Delivery
from gyre.rollouts.protocol import connection as connection_module
from gyre.rollouts.protocol.endpoint import FixedEndpoint
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.samples import Group, unpack_groups
from gyre.rollouts.trainer.plane_client import LONGEST_SAMPLE_TOKENS, RolloutClient
from tests.rollouts.machine.small_groups import asked, groups_with, report
from tests.rollouts.owners import Heard, NowhereKnown
from tests.rollouts.plane import TOKEN, live_plane, small_folder, until


class Trainer:
    """Reads at once, and has what it was sent."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.delivery.attached()
        self._came: list[int] = []

    @property
    def came(self) -> list[int]:
        while (frame := self.delivery.next_frame()) is not None:
            self._came += [group.id for group in unpack_groups(frame.groups)]
        return self._came


def test_a_group_is_sent_once_and_again_to_whoever_asks_for_it_again() -> None:
    open_groups = groups_with("a")
    requests = open_groups.open(asked(3))
    open_groups.assign()
    samples = list(open_groups.samples())
    report(open_groups, "a", dict.fromkeys(samples, 2), dict.fromkeys(samples, "stop"))
    delivery = Delivery(open_groups.requests)
    trainer = Trainer(delivery)
    delivery.complete(requests)
    delivery.complete(requests[:1])
    assert trainer.came == [0, 1, 2]
    delivery.again("train", [1])
    assert trainer.came == [0, 1, 2, 1]
    delivery.taken("train", [1])
    delivery.again("train", [1])
    assert trainer.came == [0, 1, 2, 1], "the trainer has it in its own ledger"
    later = Trainer(delivery)
    delivery.again("train", [0, 1])
    assert later.came == [0, 2], "what it has not is sent, whatever the one before it was sent"


async def test_a_group_larger_than_a_frame_arrives_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "MAX_FRAME_BYTES", 40_000)  # of what the trainer takes
    monkeypatch.setattr(delivery_module, "PORTION_BYTES", 16_000)
    monkeypatch.setattr(delivery_module, "WINDOW_BYTES", 20_000)
    heard = Heard()
    came = heard.came
    async with live_plane(tmp_path) as plane:
        client = RolloutClient(FixedEndpoint(plane.url, TOKEN), heard, term=1)
        try:
            folder = small_folder(tmp_path / "v0", 0)
            client.publish(0, folder.checksum, folder.path)
            agent = await plane.working("a", max_running=64)
            groups = [
                Group(index, np.array([7, 8 + index], np.int32), {"answer": index}) for index in range(3)
            ]
            lengths = {0: 30, 1: 900, 2: 30}  # the one in the middle takes 10 * 900 * 8 bytes
            for group in groups:
                client.request(
                    "train", [group], n=10, sampling={"max_new_tokens": 1000}, seed=1, min_version=0
                )
            samples = await agent.work(30)
            for sample in samples:
                group_id = plane.manager.groups.sample(sample.work.key).request.group.id  # type: ignore[union-attr]
                row = sample.work.row
                await agent.report({row: lengths[group_id]}, {row: "stop"})
            await until(lambda: came.keys() == {0, 1, 2})
            await asyncio.sleep(0.1)  # and none of them again, in parts of other parts
        finally:
            await asyncio.to_thread(client.close)
    for index, group in came.items():
        assert [sample.token_ids.tolist() for sample in group.samples] == [
            list(range(1, lengths[index] + 1))
        ] * 10
        assert group.prompt_ids.tolist() == [7, 8 + index]
        assert group.meta == {"answer": index}


@pytest.mark.parametrize(
    ("sampling", "meta", "sentence"),
    [
        ({"max_new_tokens": LONGEST_SAMPLE_TOKENS + 1}, {}, "max_new_tokens is"),
        (
            {"max_new_tokens": 8},
            {"max_new_tokens": 0},
            "group 0: max_new_tokens is 0, expected a positive integer",
        ),
        ({"max_new_tokens": 8, "temprature": 1.0}, {}, "temprature: .* did you mean 'temperature'"),
    ],
)
def test_a_sample_that_nobody_can_make_cannot_be_asked_for(
    sampling: dict[str, float], meta: dict[str, int], sentence: str
) -> None:
    client = RolloutClient(NowhereKnown(), Heard(), term=1)
    try:
        with pytest.raises(FrameError, match=sentence):
            client.request(
                "train",
                [Group(0, np.array([1], np.int32), meta)],
                n=1,
                sampling=sampling,
                seed=1,
                min_version=0,
            )
    finally:
        client.close()


async def test_a_finished_sample_is_told_ahead_to_a_trainer_that_wants_it_and_delivered_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    ahead, came = heard.ahead, heard.came
    async with live_plane(tmp_path) as plane:
        client = RolloutClient(FixedEndpoint(plane.url, TOKEN), heard, term=1, samples_ahead=True)
        try:
            folder = small_folder(tmp_path / "v0", 0)
            client.publish(0, folder.checksum, folder.path)
            agent = await plane.working("a", max_running=64)
            group = Group(7, np.array([7, 8], np.int32), {})
            client.request("train", [group], n=3, sampling={"max_new_tokens": 9}, seed=1, min_version=0)
            samples = await agent.work(3)
            index = {sample.work.row: sample.work.key & 0xFFFF for sample in samples}
            first, second, third = (sample.work.row for sample in samples)
            await agent.report({first: 5, second: 2}, {first: "stop"})
            await until(lambda: len(ahead) == 1)
            assert came == {}
            told = ahead["train", (7, index[first])]
            assert (told.finish_reason, told.reward) == ("stop", None)
            assert told.token_ids.tolist() == [1, 2, 3, 4, 5]
            may_write = threading.Event()
            write = plane.manager.shell.write

            def waits(batch: Any) -> None:
                assert may_write.wait(20.0)
                write(batch)

            monkeypatch.setattr(plane.manager.shell.commits, "_write", waits)
            await agent.report({second: 1, third: 4}, {second: "length", third: "stop"})
            await until(lambda: len(ahead) == 3)  # nobody waits for the ledger to score them
            assert came == {}
            may_write.set()
            await until(lambda: came.keys() == {7})
        finally:
            await asyncio.to_thread(client.close)
    assert len(ahead) == 3
    assert came[7].samples[index[first]].token_ids.tolist() == [1, 2, 3, 4, 5]
