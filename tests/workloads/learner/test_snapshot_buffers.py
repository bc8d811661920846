"""*Nobody's memory is written*: a buffer in which anybody has a tensor is not taken for the next snapshot."""

from __future__ import annotations

import torch

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
