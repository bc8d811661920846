"""Keys along paths: what a node attends to, and a gradient that is added up in the same order each time."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from gyre.workloads.learner.packing import paths_of
from gyre.workloads.learner.path_keys import PathKeys
from tests.workloads.learner.path_work import CPU, PASS, TOKENS, WAYS, attended, drawn, plainly, varlen


def keys() -> PathKeys:
    found = PathKeys.of(PASS.lengths, PASS.parents, CPU)
    assert found is not None
    return found


def test_without_parents_there_are_no_paths() -> None:
    assert PathKeys.of([3, 4], (), CPU) is None


def test_each_path_is_gathered_and_its_gradient_is_the_sum_over_all_that_saw_a_token() -> None:
    paths = keys()
    states = drawn(TOKENS, 2, 3).double().requires_grad_()
    found = paths.gather(states)
    for one, path in zip(found.split(list(paths.lengths)), paths_of(PASS.lengths, PASS.parents), strict=True):
        assert torch.equal(one, states[torch.from_numpy(path)])
    weights = drawn(*found.shape).double()
    (mine,) = torch.autograd.grad((found * weights).sum(), states)
    (wanted,) = torch.autograd.grad((states[paths.tokens] * weights).sum(), states)
    torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


def test_a_gradient_in_bfloat16_is_added_up_in_float32() -> None:
    count = 4096
    paths = PathKeys.of([1] * (count + 1), [-1] + [0] * count, CPU)
    assert paths is not None
    states = torch.ones(count + 1, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    (found,) = torch.autograd.grad(paths.gather(states).sum(), states)
    assert found[0].unique().tolist() == [count], "bfloat16 would have stopped at 256"


def by_fsdp(window: int | None, *, kept: bool) -> Any:
    from gyre.workloads.fsdp.packed_attention import Segments, packed_attention

    segments = Segments.of(PASS.lengths, CPU, PASS.parents, kept=kept)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        module: Any = None
        return packed_attention(module, q, k, v, None, sliding_window=window, segments=segments)[0][0]

    return attend


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("how", WAYS)
def test_fsdp_attends_along_paths(monkeypatch: pytest.MonkeyPatch, how: str, window: int | None) -> None:
    """On a GPU by the sequences' bounds; its kernel is played here."""
    pytest.importorskip("transformers")
    from gyre.workloads.fsdp import packed_attention

    if how != WAYS[0]:
        monkeypatch.setattr(packed_attention, "_by_bounds", lambda query, value: True)
        monkeypatch.setattr(packed_attention, "varlen_attn", varlen)
        monkeypatch.setattr(packed_attention, "_takes_fewer_keys", lambda: how == WAYS[1])
    wanted = attended(plainly(window))
    for kept in (True, False):
        for mine, one in zip(attended(by_fsdp(window, kept=kept)), wanted, strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("repeats", [1, 2])
def test_gathered_keys_are_not_kept_for_the_gradient(repeats: int) -> None:
    """They would take several times the memory of the tokens, in each layer."""
    paths, gathered = keys(), []

    def attention(k: Tensor, v: Tensor) -> Tensor:
        gathered.extend(weakref.ref(one.untyped_storage()) for one in (k, v))
        return (k * v).exp()  # which keeps its output, too

    key, value = (drawn(TOKENS, 2, 3, seed=seed).requires_grad_() for seed in (1, 2))
    for kept in (True, False):
        gathered.clear()
        found = paths.attend(attention, key, value, repeats=repeats, kept=kept)
        gc.collect()
        assert [one() is not None for one in gathered] == [kept] * 2
        mine = torch.autograd.grad(found.sum(), (key, value))
        plain = (paths.gather(key) * paths.gather(value)).exp().sum()
        wanted = torch.autograd.grad(repeats * plain, (key, value))
        weak = weakref.ref(found.untyped_storage())
        del found
        assert weak() is None, "without the collector"
        torch.testing.assert_close(mine, wanted)
