"""FSDP2's back end against plain torch: losses, gradients and steps are those of one process over transformers' own
model, however the rows are dealt and packed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.errors import NOT_FINITE
from tests.fsdp.work import (
    CONFIG,
    MODELS,
    VARIANTS,
    a_deep_tree,
    a_loss_that_raises,
    a_model_that_does_not_bear_trees,
    a_model_that_packs_wrongly,
    a_tree_for_any_model,
    fsdp,
    grouped_rows,
    kept_and_again,
    loads,
    once_and_each,
    only_forward,
    random_rows,
    read_back,
    refused_updates,
    refused_without_gradient,
    says_in_pieces,
    step_save_step,
    take_plain_steps,
    take_steps,
    uneven_step,
)
from tests.rank_pool import RankPool

pytestmark = pytest.mark.landing

STEPS = [
    [*random_rows(4, seed=1), *grouped_rows([(6, 20, 9), (2, 45, 3), (3, 2, 9)]), *random_rows(3, seed=3)],
    random_rows(8, seed=2),
]
"""Groups among them, one with a prompt longer than windows, one with one longer than a pass."""


def relative(found: Any, wanted: Any) -> float:
    scale = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(np.asarray(found) - np.asarray(wanted))) / max(scale, 1e-30)


def dealt(said: list[Any], ranks: int) -> list[Any]:
    return [np.concatenate([np.zeros(0), *said[rank::ranks]]) for rank in range(ranks)]


def agrees(told: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    for rank, (mine, wanted) in enumerate(zip(told, dealt(plain["said"], len(told)), strict=True)):
        assert relative(mine["said"], wanted) < 1e-5, f"what rank {rank} says"
    first = told[0]
    assert all(one["losses"] == first["losses"] and one["norms"] == first["norms"] for one in told)
    assert relative(first["losses"], plain["losses"]) < 1e-5
    whole = {
        name: relative(first["gradients"][name], plain["gradients"][name]) for name in plain["gradients"]
    }
    assert first["gradients"].keys() == plain["gradients"].keys()
    total = relative(
        np.concatenate([first["gradients"][name].ravel() for name in sorted(whole)]),
        np.concatenate([plain["gradients"][name].ravel() for name in sorted(whole)]),
    )
    assert total < 1e-5, whole
    assert relative(first["norms"][0], plain["norms"][0]) < 1e-5
    # AdamW's first step has the sign of each gradient, also of those that are rounding alone.
    assert relative(first["norms"], plain["norms"]) < 1e-3


KINDS = [*MODELS, *VARIANTS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_transformers_has_plain_torchs_steps(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    folder = folder_of(kind)
    (plain,) = pool.run(take_plain_steps, 1, folder, STEPS)
    told = pool.run(take_steps, 2, folder, CONFIG, STEPS)
    agrees(told, plain)
    ((said, missed),) = pool.run(read_back, 1, folder, told[0]["weights"], STEPS[0], tmp_path / "out")
    assert not missed
    assert not told[1]["weights"]
    assert relative(said, told[0]["after"]) < 1e-5
    packs, word = PACKS.get(kind, (True, "each attends to itself alone"))
    assert all(one["packs"] == packs and word in one["packing"] for one in told), told[0]["packing"]
    assert all(bool(one["trees"]) == packs for one in told), (
        "a prompt is there once where sequences are packed"
    )


PACKS = {
    "bert": (True, "each attends to itself alone"),
    "mamba2": (False, "each sequence is a pass of its own: of a small copy"),
    "qwen3_5_text": (False, "each sequence is a pass of its own: of a small copy"),
}
"""Those that do not keep sequences apart by position ids."""


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(1, {}), (4, {}), (2, {"recompute": False}), (2, {"whole_gradient": True}), (2, {"attention": "eager"})],
    ids=["one rank", "four ranks", "activations kept", "whole gradients", "eager"],
)
def test_a_step_is_the_same_however_it_is_computed(
    pool: RankPool, folder_of: Callable[[str], Path], ranks: int, settings: dict[str, Any]
) -> None:
    folder = folder_of("qwen3_moe")
    (plain,) = pool.run(take_plain_steps, 1, folder, STEPS)
    agrees(pool.run(take_steps, ranks, folder, fsdp(**settings), STEPS), plain)


@pytest.mark.parametrize(
    ("kind", "ranks", "more"),
    [
        ("qwen3", 2, {"fsdp": {"dtype": "bfloat16"}}),
        ("qwen3_moe", 1, {}),
        ("gemma2", 2, {}),
        ("qwen3", 2, {"lora": {"rank": 4, "alpha": 6.0}}),
        ("llama", 1, {"fsdp": {"attention": "sdpa", "whole_gradient": True}}),
    ],
    ids=["bfloat16", "experts", "two ranks", "an adapter", "sdpa"],
)
def test_activations_that_are_computed_again_have_the_same_bits(
    pool: RankPool, folder_of: Callable[[str], Path], kind: str, ranks: int, more: dict[str, Any]
) -> None:
    """A gang turns it on in the middle of a job, and off for a step that is made again as it was."""
    rows = grouped_rows([(8, 20, 9), (5, 12, 30)], seed=4)
    for told in pool.run(kept_and_again, ranks, folder_of(kind), {**CONFIG, **more}, rows):
        kept, again, once_more = told["kept"], told["again"], told["kept once more"]
        assert told["trees"] or kind != "qwen3"
        assert kept["loss"] == again["loss"] == once_more["loss"]
        assert np.array_equal(kept["said"], again["said"])
        for name, one in kept["gradients"].items():
            for other in (again, once_more):
                assert np.array_equal(one, other["gradients"][name]), f"{name} has other bits"
        assert again["saved"] < 0.7 * kept["saved"]
        assert once_more["saved"] == kept["saved"]


@pytest.mark.parametrize("settings", [{}, {"whole_gradient": True}])
def test_ranks_may_have_unequal_numbers_of_passes_or_none(
    pool: RankPool, folder_of: Callable[[str], Path], settings: dict[str, Any]
) -> None:
    folder, alone = folder_of("qwen3"), [random_rows(1, seed=8, longest=30), random_rows(3, seed=9)]
    (plain,) = pool.run(take_plain_steps, 1, folder, alone)
    agrees(pool.run(take_steps, 2, folder, fsdp(**settings), alone), plain)


def test_a_value_model_has_plain_torchs_steps(pool: RankPool, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    (plain,) = pool.run(take_plain_steps, 1, folder, STEPS, True)
    told = pool.run(take_steps, 2, folder, CONFIG, STEPS, True)
    agrees(told, plain)
    assert told[0]["weights"].keys() == plain["parameters"].keys()
    assert all(relative(told[0]["weights"][name], one) < 1e-2 for name, one in plain["parameters"].items())


def test_bfloat16_computes_and_float32_adds_up(pool: RankPool, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("qwen3")
    (plain,) = pool.run(take_plain_steps, 1, folder, STEPS)
    told = pool.run(take_steps, 2, folder, fsdp(dtype="bfloat16"), STEPS)
    found, wanted = told[0]["gradients"], plain["gradients"]
    flat = [np.concatenate([some[name].ravel() for name in sorted(wanted)]) for some in (found, wanted)]
    assert all(one.dtype == np.float32 for one in found.values())
    assert float(flat[0] @ flat[1] / np.linalg.norm(flat[0]) / np.linalg.norm(flat[1])) > 0.999
    assert told[0]["packs"], told[0]["packing"]
    assert any((one.view(np.uint32) & 0xFFFF).any() for one in found.values()), (
        "more digits than bfloat16 has"
    )


def test_a_gradient_that_is_not_finite_is_refused_on_all_ranks(
    pool: RankPool, folder_of: Callable[[str], Path]
) -> None:
    told = pool.run(refused_updates, 2, folder_of("qwen3"), CONFIG)
    assert all(one["refused"] == [NOT_FINITE, NOT_FINITE] for one in told)
    assert all(one["untouched"] and one["gone"] for one in told)
    assert told[0]["next"] == told[1]["next"] > 0


def test_a_parameter_without_a_gradient_is_named_and_nothing_is_trained(
    pool: RankPool, folder_of: Callable[[str], Path]
) -> None:
    for one in pool.run(refused_without_gradient, 2, folder_of("qwen3"), CONFIG):
        assert (one["code"], one["named"], one["untouched"]) == ("fsdp.no_gradient", True, True)
        assert one["next"] > 0


def test_a_parameter_that_one_ranks_sequences_do_not_reach_is_summed_over_all(
    pool: RankPool, folder_of: Callable[[str], Path]
) -> None:
    """DeepSeek-V4 compresses what is longer than some tokens: shorter sequences do not reach what does so."""
    norms = pool.run(uneven_step, 2, folder_of("deepseek_v4"))
    assert norms[0] == norms[1] > 0


def test_a_loss_that_raises_leaves_no_rank_waiting(pool: RankPool, folder_of: Callable[[str], Path]) -> None:
    told = pool.run(a_loss_that_raises, 2, folder_of("qwen3"), CONFIG)
    assert told[0]["told"] == "ValueError: a loss that does not like this sample"
    assert told[1]["told"].startswith("LossFailed")
    assert told[0]["next"] == told[1]["next"] > 0


def test_other_weights_are_taken_whole_or_refused_on_all_ranks(
    pool: RankPool, folder_of: Callable[[str], Path]
) -> None:
    told = pool.run(loads, 2, folder_of("mixtral"), CONFIG, folder_of("qwen3"))
    for one in told:
        assert len(one["refused"]) == 3
        assert one["untouched"]
        assert one["as at first"]
    assert told[0]["doubled"]


def test_a_model_that_does_not_train_says_the_same(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, path = folder_of("qwen3"), tmp_path / "actor"
    rows = random_rows(5, seed=4)
    trained = pool.run(step_save_step, 2, folder, CONFIG, path, STEPS)
    told = pool.run(only_forward, 2, folder, CONFIG, path)
    (plain,) = pool.run(take_plain_steps, 1, folder, [rows])
    ((said, _),) = pool.run(read_back, 1, folder, of_weights(trained[0]["at"]), rows, tmp_path / "out")
    for first, restored in told:
        assert relative(first, np.concatenate(plain["said"])) < 1e-5
        assert relative(restored, said) < 1e-5
        assert relative(restored, first) > 1e-3


def of_weights(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if "/" not in name}


def test_log_probs_do_not_depend_on_the_pieces(pool: RankPool) -> None:
    pool.run(says_in_pieces, 1, 3)


def test_a_model_that_packs_wrongly_on_one_rank_packs_on_none(
    pool: RankPool, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of("qwen3")
    (plain,) = pool.run(take_plain_steps, 1, folder, STEPS[:1])
    told = pool.run(a_model_that_packs_wrongly, 2, folder, CONFIG, STEPS[0])
    for (packs, said, found), wanted in zip(told, dealt(plain["said"], 2), strict=True):
        assert not packs
        assert said.startswith("each sequence is a pass of its own")
        assert relative(found, wanted) < 1e-5


TREES = ["qwen3", "gemma3_text", "mistral", "gpt_oss", "gemma2", "deepseek_v3", "modernbert-decoder"]
"""Windows, sinks, caps, and keys of other sizes than values."""


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert relative(found["said"], wanted["said"]) < 1e-5
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    flat = [
        np.concatenate([some["gradients"][name].ravel() for name in sorted(wanted["gradients"])])
        for some in (found, wanted)
    ]
    assert relative(*flat) < 1e-5


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("kind", TREES)
def test_a_prompt_computed_once_has_the_gradient_of_its_copies(
    pool: RankPool, folder_of: Callable[[str], Path], kind: str
) -> None:
    """Groups of 16, of 2 and of 1; passes that cut the first one, and one pass for all."""
    rows = grouped_rows([(16, 30, 12), (2, 17, 5), (1, 9, 4)], seed=3)
    for max_tokens in (90, 10_000):
        (told,) = pool.run(once_and_each, 1, folder_of(kind), CONFIG, rows, max_tokens)
        same(told["once"], told["each"])
        assert told["once"]["tokens"] < 0.6 * told["each"]["tokens"]
        for name, one in told["once"]["gradients"].items():
            assert np.array_equal(one, told["again"]["gradients"][name]), f"{name} has other bits"


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("kind", TREES)
def test_a_tree_of_any_depth_has_the_gradient_of_its_paths(
    pool: RankPool, folder_of: Callable[[str], Path], kind: str
) -> None:
    (told,) = pool.run(a_deep_tree, 1, folder_of(kind), CONFIG)
    same(told["once"], told["each"])


@pytest.mark.parametrize("settings", [{"recompute": False}, {"whole_gradient": True}, {"recompute": True}])
def test_ranks_have_unequal_trees_and_a_critic_too(
    pool: RankPool, folder_of: Callable[[str], Path], settings: dict[str, Any]
) -> None:
    """One rank's group is large and its passes are cut, the other's fits into one."""
    one, other = grouped_rows([(12, 30, 12)], seed=5), grouped_rows([(12, 4, 2)], seed=6)
    rows = [row for pair in zip(one, other, strict=True) for row in pair]
    for values in (False, True):
        for told in pool.run(once_and_each, 2, folder_of("qwen3"), fsdp(**settings), rows, 90, values):
            same(told["once"], told["each"])


def test_prompts_may_be_computed_for_each_sample(pool: RankPool, folder_of: Callable[[str], Path]) -> None:
    (plain,) = pool.run(take_plain_steps, 1, folder_of("qwen3"), STEPS)
    told = pool.run(take_steps, 2, folder_of("qwen3"), fsdp(prompts_once=False), STEPS)
    agrees(told, plain)
    assert told[0]["packing"] == "sequences are packed, and each attends to itself alone"
    assert not told[0]["trees"]


@pytest.mark.parametrize("in_small", [True, False], ids=["by its code", "by a kernel"])
def test_a_model_that_does_not_bear_trees_packs_without_them_on_all_ranks(
    pool: RankPool, folder_of: Callable[[str], Path], in_small: bool
) -> None:
    rows = grouped_rows([(8, 20, 9)], seed=7)
    work, folder = a_model_that_does_not_bear_trees, folder_of("mistral")
    told = pool.run(partial(work, in_small=in_small), 2, folder, CONFIG, rows)
    wanted = pool.run(once_and_each, 2, folder, CONFIG, rows, 90)
    for mine, right in zip(told, wanted, strict=True):
        assert mine["packs"]
        assert not mine["once"]
        assert "each sample has its own copy of its prompt: " in mine["packing"]
        same(mine, right["each"])
    assert ("of a small copy" if in_small else "a branch's hidden states differ") in told[0]["packing"]


def test_a_pass_that_is_a_tree_is_taken_apart_for_a_model_that_does_not_pack(
    pool: RankPool, folder_of: Callable[[str], Path]
) -> None:
    """Whoever made it."""
    (told,) = pool.run(a_tree_for_any_model, 1, folder_of("mamba2"), CONFIG)
    same(told["once"], told["each"])
