"""Megatron's attention along paths, on a CPU and by the bounds that its kernel gets on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from gyre.workloads.megatron.model.seam import open_seam
from tests.workloads.learner.path_work import CPU, PASS, WAYS, attended, plainly, varlen

open_seam(CPU)

from gyre.workloads.megatron.model import gpt  # noqa: E402


@pytest.mark.parametrize("how", WAYS)
def test_megatron_attends_along_paths(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """On a GPU by the sequences' bounds; its kernel is played here."""
    segments = gpt.SegmentParams.of(PASS.lengths, CPU, PASS.parents)
    attend = gpt._attend_by_segment
    if how != WAYS[0]:
        attend = gpt._attend_by_bounds
        monkeypatch.setattr(gpt, "varlen_attn", varlen)
        monkeypatch.setattr(gpt, "_VARLEN_OPTIONS", {"window_size": (-1, 0)})
        monkeypatch.setattr(gpt, "_TAKES_FEWER_KEYS", how == WAYS[1])

    def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, segments)

    for mine, one in zip(attended(own), attended(plainly(None)), strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-5, atol=1e-5)
