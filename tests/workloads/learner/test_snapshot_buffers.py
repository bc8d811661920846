"""*Nobody's memory is written*: a buffer in which anybody has a tensor is not taken for the next snapshot."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from gyre.workloads.learner import snapshot_buffers
from gyre.workloads.learner.snapshot_buffers import SnapshotBuffers

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def test_one_buffer_serves_every_step_while_nobody_has_tensors_of_the_last() -> None:
    buffers = SnapshotBuffers(CPU)
    places = set()
    for _ in range(4):
        buffer = buffers.take()
        held = [buffer.place("a", torch.Size([3, 5]), BF16), buffer.place("b", torch.Size([]), torch.float32)]
        places.update(tensor.data_ptr() for tensor in held)
        assert not buffer.is_free
        del held
    assert (len(places), len(buffers.all)) == (2, 1)


def test_a_buffer_that_is_still_published_keeps_its_bytes_and_is_used_again_afterwards() -> None:
    buffers = SnapshotBuffers(CPU)
    first = buffers.take()
    published = first.place("a", torch.Size([4]), BF16).fill_(1)[1:]  # a view is enough
    second = buffers.take()
    own = second.place("a", torch.Size([4]), BF16).fill_(2)
    assert second is not first
    assert published.tolist() == [1, 1, 1]
    del published
    assert buffers.take() is first
    del own
    assert len(buffers.all) == 2


def test_tensors_have_their_own_places_and_one_that_grew_gets_a_new_one() -> None:
    buffer = SnapshotBuffers(CPU).take()
    given = {"a": torch.randn(7, 3), "b": torch.randn(129), "c": torch.arange(5), "d": torch.zeros(0, 4)}
    placed = {
        name: buffer.place(name, tensor.shape, tensor.dtype).copy_(tensor) for name, tensor in given.items()
    }
    for name, tensor in given.items():
        assert torch.equal(placed[name], tensor)
    assert buffer.place("a", torch.Size([70]), BF16).shape == (70,)


def test_memory_that_was_made_ready_is_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []

    def page_locked(memory: torch.Tensor, device: torch.device) -> Callable[[], None]:
        locked.append(memory.numel())
        return lambda: locked.remove(memory.numel())

    monkeypatch.setattr(snapshot_buffers, "page_locked", page_locked)
    monkeypatch.setattr(snapshot_buffers, "SLAB_BYTES", 1 << 10)
    buffers = SnapshotBuffers(torch.device("cuda"))
    buffers.prepare(5 << 10)
    buffer = buffers.take()
    assert buffers.all[1].ready.wait(30)
    assert locked == [1 << 10, 2 << 10, 4 << 10] * 2, "the second is there before anybody asks for it"
    held = [buffer.place(str(number), torch.Size([700]), torch.uint8).fill_(number) for number in range(8)]
    assert [int(one[0]) for one in held] == list(range(8))
    assert len(locked) == 6, "there is room for one in the first, two in the second, five in the third"
    assert buffers.take() is buffers.all[1]
    assert len(locked) == 6
    buffer.place("more", torch.Size([700]), torch.uint8)
    assert len(locked) == 7
    buffers.close()
    assert locked == []


def test_nobody_waits_for_memory_that_is_being_made_while_other_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first_is_made, go_on = threading.Event(), threading.Event()

    def page_locked(memory: torch.Tensor, device: torch.device) -> Callable[[], None]:
        if first_is_made.is_set():
            assert go_on.wait(30)
        first_is_made.set()
        return lambda: None

    monkeypatch.setattr(snapshot_buffers, "page_locked", page_locked)
    buffers = SnapshotBuffers(torch.device("cuda"))
    buffers.prepare(1)
    assert first_is_made.wait(30)
    for _ in range(3):
        held = buffers.take().place("a", torch.Size([4]), BF16)
        assert buffers.all[0].is_free is False
        del held
    go_on.set()
    buffers.close()
