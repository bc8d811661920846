"""Keys along paths: what a node attends to, and a gradient that is added up in the same order each time."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.workloads.learner.packing import laid_out, paths_of
from gyre.workloads.learner.path_keys import PathKeys
from tests.workloads.learner.trees import drawn_tree

PASS = laid_out(drawn_tree(48), 8)
TOKENS = len(PASS.tokens)
CPU = torch.device("cpu")


def keys() -> PathKeys:
    found = PathKeys.of(PASS.lengths, PASS.parents, CPU)
    assert found is not None
    return found


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    bounds: Tensor,
    longest: int,
    longest_path: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """What torch documents of `varlen_attn`, aligned to the lower right as FlashAttention is."""
    lengths, of_keys = queries.diff().tolist(), bounds.diff().tolist()
    assert (longest, longest_path) == (max(lengths), max(of_keys))
    assert enable_gqa or q.shape[1] == k.shape[1]
    assert window_size[1] == 0
    out = []
    for a, b, c in zip(q.split(lengths), k.split(of_keys), v.split(of_keys), strict=True):
        row = torch.arange(len(a))[:, None] + len(b) - len(a)
        column = torch.arange(len(b))[None]
        seen = column <= row
        if window_size[0] >= 0:
            seen &= column >= row - window_size[0]
        a, b, c = (x.transpose(0, 1)[None] for x in (a, b, c))
        mixed = F.scaled_dot_product_attention(a, b, c, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        out.append(mixed[0].transpose(0, 1))
    return torch.cat(out)


def by_fsdp(window: int | None, *, kept: bool) -> Any:
    from gyre.workloads.fsdp.packed_attention import Segments, packed_attention

    segments = Segments.of(PASS.lengths, CPU, PASS.parents, kept=kept)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        module: Any = None
        return packed_attention(module, q, k, v, None, sliding_window=window, segments=segments)[0][0]

    return attend


def by_megatron() -> Any:
    pytest.importorskip("megatron.core")
    from gyre.workloads.megatron.model.seam import open_seam

    open_seam(CPU)
    from gyre.workloads.megatron.model.gpt import Segments, _attend_by_segment

    segments = Segments.of(PASS.lengths, CPU, PASS.parents)
    return lambda q, k, v: _attend_by_segment(q, k, v, segments)


def attended(attend: Any) -> list[Tensor]:
    q, k, v = (drawn(TOKENS, heads, 8, seed=heads).requires_grad_() for heads in (4, 2, 2))
    found = attend(q, k, v)
    return [found, *torch.autograd.grad((found * drawn(*found.shape)).sum(), (q, k, v))]


def plainly(window: int | None) -> Any:
    """Each path alone, by torch."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = []
        for length, path in zip(PASS.lengths, paths_of(PASS.lengths, PASS.parents), strict=True):
            at = torch.from_numpy(path)
            a, b, c = (x[at].transpose(0, 1)[None] for x in (q, k, v))
            row, column = torch.arange(len(at))[:, None], torch.arange(len(at))[None]
            seen = (column <= row) & (column > row - (window or len(at)))
            mixed = F.scaled_dot_product_attention(a, b, c, attn_mask=seen, enable_gqa=True)
            found.append(mixed[0].transpose(0, 1)[-length:])
        return torch.cat(found)

    return attend


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("how", ["sequence by sequence", "by bounds", "by bounds, keys for each head"])
def test_fsdp_attends_along_paths(monkeypatch: pytest.MonkeyPatch, how: str, window: int | None) -> None:
    """On a GPU by the sequences' bounds; its kernel is played here."""
    pytest.importorskip("transformers")
    from gyre.workloads.fsdp import packed_attention

    if how != "sequence by sequence":
        monkeypatch.setattr(packed_attention, "_by_bounds", lambda query, value: True)
        monkeypatch.setattr(packed_attention, "varlen_attn", varlen)
        monkeypatch.setattr(packed_attention, "_takes_fewer_keys", lambda: how == "by bounds")
    wanted = attended(plainly(window))
    for kept in (True, False):
        for mine, one in zip(attended(by_fsdp(window, kept=kept)), wanted, strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["sequence by sequence", "by bounds", "by bounds, keys for each head"])
def test_megatron_attends_along_paths(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    attend = by_megatron()
    from gyre.workloads.megatron.model import gpt

    if how != "sequence by sequence":
        by_bounds = gpt._attend_by_bounds
        monkeypatch.setattr(gpt, "_attend_by_segment", by_bounds)
        monkeypatch.setattr(gpt, "varlen_attn", varlen)
        monkeypatch.setattr(gpt, "_VARLEN_OPTIONS", {"window_size": (-1, 0)})
        monkeypatch.setattr(gpt, "_TAKES_FEWER_KEYS", how == "by bounds")
        segments = gpt.Segments.of(PASS.lengths, CPU, PASS.parents)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return by_bounds(q, k, v, segments)

    for mine, one in zip(attended(attend), attended(plainly(None)), strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("repeats", [1, 2])
def test_gathered_keys_are_not_kept_for_the_gradient(repeats: int) -> None:
    """They would take several times the memory of the tokens, in each layer."""
    paths, gathered = keys(), []

    def attention(k: Tensor, v: Tensor) -> Tensor:
        gathered.extend(weakref.ref(one.untyped_storage()) for one in (k, v))
        return k * v

    key, value = (drawn(TOKENS, 2, 3, seed=seed).requires_grad_() for seed in (1, 2))
    for kept in (True, False):
        gathered.clear()
        found = paths.attend(attention, key, value, repeats=repeats, kept=kept)
        gc.collect()
        assert [one() is not None for one in gathered] == [kept] * 2
        mine = torch.autograd.grad(found.sum(), (key, value))
        wanted = paths.gather(value).sum(0)
        assert mine[0].shape == key.shape
        torch.testing.assert_close(mine[0].sum(0), repeats * wanted)
