"""Memory that is foretold, by itself: counts of numbers, the largest pass, `auto`, engines, hosts. What back ends
really keep is compared in `tests/megatron/test_memory.py` and `tests/fsdp/test_memory.py`."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from gyre.config.sections import FsdpSettings, LoraSettings, MegatronSettings, WorkloadSettings
from gyre.engines.sglang.kind import SGLANG
from gyre.models.architecture import Architecture
from gyre.models.tensor_names import expected_shapes, value_shapes
from gyre.workloads.gang import weight_source
from gyre.workloads.learner import packing, snapshot_buffers
from gyre.workloads.memory import host, passes, rank
from gyre.workloads.memory.engine import engine_need
from gyre.workloads.memory.host import host_need
from gyre.workloads.memory.learners import ranks_of
from gyre.workloads.memory.parameters import adapter_of, parameters_of
from gyre.workloads.memory.passes import GIB, automatic, largest_pass, need, tokens_of
from gyre.workloads.memory.rank import PassSize, fsdp_rank, megatron_ranks
from tests.memory_work import SHAPES

QWEN3_4B = replace(
    Architecture.qwen3(
        vocab=151936, layers=36, hidden=2560, heads=32, kv_heads=8, mlp=9728, max_positions=32768
    ),
    head_dim=128,
)
KEPT = WorkloadSettings.read({"fsdp": {"recompute": False}})
LLAMA_BIASED = replace(SHAPES["its own head"], qk_norm=False, qkv_bias=True, out_bias=True, mlp_bias=True)


@pytest.mark.parametrize("shape", [*SHAPES.values(), QWEN3_4B, LLAMA_BIASED])
def test_numbers_are_those_of_the_tensors(shape: Architecture) -> None:
    assert parameters_of(shape).total == sum(map(prod, expected_shapes(shape).values()))
    assert parameters_of(shape, values=True).total == sum(map(prod, value_shapes(shape).values()))


def test_qwen3_4b_has_four_billion_numbers() -> None:
    assert parameters_of(QWEN3_4B).total == 4_022_468_096
    assert QWEN3_4B.layers * adapter_of(QWEN3_4B, LoraSettings(rank=32)) == 66_060_288


def test_two_ranks_ran_out_of_79_gib_with_passes_of_8192_tokens_and_not_of_4096() -> None:
    """As it was seen of Qwen3-4B's shape with a vocabulary of 640, by transformers' own norms and gated units."""
    seen = replace(QWEN3_4B, vocab=640)
    ranks = [fsdp_rank(seen, FsdpSettings(recompute=False, fused_kernels=False), ranks=2, width=2)]
    assert need(ranks, PassSize.of(8192, 304), several=True).total > 76 * GIB
    assert need(ranks, PassSize.of(4096, 304), several=True).total < 60 * GIB
    megatron = megatron_ranks(seen, MegatronSettings(tensor_parallel=2), ranks=2, width=2)
    assert need(megatron, PassSize.of(8192, 304), several=True).total < 79 * GIB


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("own", [{"recompute": False}, {"recompute": True}])
@pytest.mark.parametrize("device", [48, 79, 139])
def test_the_largest_pass_fits_and_a_larger_one_does_not(
    backend: Any, own: dict[str, Any], device: int
) -> None:
    settings = WorkloadSettings.read({backend: own})
    ranks = ranks_of(backend, SHAPES["qwen3"], settings, ranks=1) + ranks_of(
        backend, replace(QWEN3_4B, layers=8), settings, ranks=1
    )
    most = largest_pass(ranks, device * GIB, longest=1024, several=False)
    assert most % passes.STEP == 0
    assert need(ranks, PassSize.of(most, 1024), several=False).total <= device * GIB
    assert need(ranks, PassSize.of(most + passes.STEP, 1024), several=False).total > device * GIB


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_keys_of_a_prompt_that_is_computed_once_are_foretold(backend: Any) -> None:
    """With as many samples as a pass may have keys for, of a model that keeps nothing else; and alike where nothing is
    shared."""
    assert rank.PATH_KEYS == packing.PATH_KEYS

    def largest_of(**own: Any) -> int:
        settings = WorkloadSettings.read({backend: {"recompute": True, **own}, "sampling": {"n": n}})
        return largest_pass(
            ranks_of(backend, replace(QWEN3_4B, vocab=640), settings, ranks=1),
            79 * GIB,
            longest=1024,
            several=False,
        )

    n = 8
    assert 0.5 * largest_of(prompts_once=False) < largest_of() < largest_of(prompts_once=False)
    n = 1
    assert largest_of() == largest_of(prompts_once=False)


def test_less_is_kept_of_what_is_computed_again() -> None:
    for recompute in (MegatronSettings(recompute=True), MegatronSettings()):
        (mine,) = megatron_ranks(QWEN3_4B, recompute, ranks=1, width=2)
        tokens = 8192
        each = mine.held(tokens) / QWEN3_4B.layers / tokens
        assert (each < 3 * 2 * QWEN3_4B.hidden) == recompute.recompute


class TestAuto:
    RANKS = ranks_of("fsdp", QWEN3_4B, KEPT, ranks=2)

    def test_it_leaves_a_margin(self) -> None:
        tokens, why = automatic(self.RANKS, 79 * GIB, longest=1024, several=True)
        assert "fits" in why
        assert (
            need(self.RANKS, PassSize.of(tokens, 1024), several=True).total <= (1 - passes.MARGIN) * 79 * GIB
        )
        assert 8192 <= tokens <= 12288

    def test_it_is_bounded(self) -> None:
        tiny = ranks_of("fsdp", SHAPES["qwen3"], KEPT, ranks=2)
        assert automatic(tiny, 79 * GIB, longest=1024, several=True)[0] == passes.MOST
        assert automatic(self.RANKS, 8 * GIB, longest=1024, several=True)[0] == passes.LEAST

    def test_what_is_not_known_takes_the_default(self) -> None:
        default = WorkloadSettings().fsdp.pass_tokens
        assert automatic(None, 79 * GIB, longest=1, several=False)[0] == default
        assert automatic(self.RANKS, None, longest=1, several=False)[0] == default

    def test_what_the_job_says_is_taken(self) -> None:
        assert tokens_of(77, self.RANKS, GIB, longest=1, several=True) == (77, "")


def test_more_ranks_need_less_each() -> None:
    found = [
        need(
            [fsdp_rank(QWEN3_4B, FsdpSettings(recompute=False), ranks=n, width=2)],
            PassSize(4096, 4),
            several=n > 1,
        ).total
        for n in (1, 2, 4, 8)
    ]
    assert found == sorted(found, reverse=True)


def test_a_frozen_model_has_no_states() -> None:
    backends: tuple[str, ...] = ("megatron", "fsdp")
    for backend in backends:
        (mine,) = ranks_of(backend, QWEN3_4B, WorkloadSettings(), ranks=4, trains=False)
        assert set(mine.static) == {"weights", "workspaces"}
        assert mine.static["weights"] == 2 * parameters_of(QWEN3_4B).total
        assert mine.bytes_of(PassSize(16384, 16)) < 16 * GIB


class TestEngine:
    def test_keys_and_values_of_a_token(self) -> None:
        found = engine_need(QWEN3_4B, ["--mem-fraction-static", "0.8"], SGLANG.memory)
        assert found is not None
        assert found.by_token == 36 * 2 * 8 * 128 * 2
        assert found.weights == 2 * 4_022_468_096
        assert found.tokens(79 * GIB) == int((0.8 * 79 * GIB - found.weights) // found.by_token)

    def test_devices_share(self) -> None:
        found = engine_need(QWEN3_4B, ["--tp=4"], SGLANG.memory)
        assert found is not None
        assert (found.by_token, found.fraction) == (36 * 2 * 2 * 128 * 2, None)
        assert found.tokens(79 * GIB) is None

    @pytest.mark.parametrize("arguments", [["--dtype", "float32"], ["--tp", "many"], ["--quantization=fp8"]])
    def test_what_changes_its_numbers_is_not_known(self, arguments: list[str]) -> None:
        assert engine_need(QWEN3_4B, arguments, SGLANG.memory) is None


def test_hosts_and_disks() -> None:
    assert (host.SNAPSHOTS, host.VERSIONS) == (snapshot_buffers.MADE_READY, weight_source.HELD)
    numbers = parameters_of(QWEN3_4B).total
    alone = WorkloadSettings.read({"fsdp": {"memory_checkpoint_share": 0.0}})
    fsdp = host_need("fsdp", QWEN3_4B, alone, ranks=2, width=2)
    assert (fsdp.checkpoint, fsdp.by_rank) == (12 * numbers, 6 * numbers)
    assert (fsdp.first_rank, fsdp.on_disk) == (5 * 2 * numbers, 36 * numbers)
    assert host_need("fsdp", QWEN3_4B, KEPT, ranks=2, width=2).by_rank == 12 * numbers
    layout = WorkloadSettings.read({"megatron": {"tensor_parallel": 2, "memory_checkpoint_share": 1.0}})
    megatron = host_need("megatron", QWEN3_4B, layout, ranks=4, width=2)
    assert megatron.checkpoint == 14 * numbers
    assert megatron.by_rank == 2 * (2 + 6) * numbers // 2
    settings = WorkloadSettings.read({"lora": {"rank": 32}})
    assert settings.lora is not None
    adapter = QWEN3_4B.layers * adapter_of(QWEN3_4B, settings.lora)
    found = host_need("fsdp", QWEN3_4B, settings, ranks=1, width=2)
    assert (found.checkpoint, found.first_rank) == (12 * adapter, 20 * adapter)
