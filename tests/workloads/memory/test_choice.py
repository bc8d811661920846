"""Whether activations are kept or computed again: by what is foretold, by who shares the device, and by what did not
fit before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gyre.config.sections import WorkloadSettings
from gyre.graph.devices import Neighbour
from gyre.models.architecture import Architecture
from gyre.workloads.memory.beside import beside
from gyre.workloads.memory.choice import ENOUGH, PassChoice, PassSettings, choose, smaller
from gyre.workloads.memory.learners import ranks_of
from gyre.workloads.memory.parameters import parameters_of
from gyre.workloads.memory.passes import CONTEXT, GIB, LEAST, MARGIN, MOST, need
from gyre.workloads.memory.rank import PassSize


def qwen3(layers: int, hidden: int, heads: int, mlp: int, *, tied: bool) -> Architecture:
    shape = Architecture.qwen3(
        vocab=151936, layers=layers, hidden=hidden, heads=heads, kv_heads=8, mlp=mlp, max_positions=32768
    )
    return replace(shape, head_dim=128, tied=tied)


SHAPES = {
    "0.6B": qwen3(28, 1024, 16, 3072, tied=True),
    "4B": qwen3(36, 2560, 32, 9728, tied=True),
    "8B": qwen3(36, 4096, 32, 12288, tied=False),
}
CARDS = {24: 23, 80: 79, 141: 139}
"""What cards of so many GB say that they have, in GiB."""


def chosen(
    shape: str,
    card: int,
    *,
    tokens: Any = 16384,
    ranks: int = 2,
    backend: str = "fsdp",
    longest: int = 1024,
    others: dict[str, int | None] | None = None,
    **more: Any,
) -> PassChoice:
    settings = WorkloadSettings.read({backend: {"recompute": "auto"}, "sampling": {"n": 8}, **more})
    found = ranks_of(backend, SHAPES[shape], settings, ranks=ranks)
    return choose(
        PassSettings(tokens, "auto"),
        found,
        CARDS[card] * GIB,
        longest=longest,
        several=ranks > 1,
        beside=others,
    )


@pytest.mark.parametrize(
    ("shape", "card", "ranks", "tokens", "again"),
    [
        ("0.6B", 24, 1, 4096, False),
        ("0.6B", 24, 1, 16384, True),
        ("0.6B", 80, 1, 16384, False),
        ("0.6B", 141, 1, 32768, False),
        ("4B", 24, 2, 4096, True),
        ("4B", 80, 2, 8192, False),
        ("4B", 80, 2, 16384, True),
        ("4B", 80, 4, 8192, False),
        ("4B", 141, 2, 16384, False),
        ("8B", 80, 2, 8192, True),
        ("8B", 80, 8, 8192, False),
        ("8B", 141, 2, 8192, False),
        ("8B", 141, 2, 32768, True),
    ],
)
def test_activations_are_kept_where_they_fit_with_the_margin(
    shape: str, card: int, ranks: int, tokens: int, again: bool
) -> None:
    """Passes stay as large as the job says, also where not even that helps."""
    found = chosen(shape, card, tokens=tokens, ranks=ranks)
    assert (found.tokens, found.recompute) == (tokens, again)
    assert found.why_tokens == ""
    assert found.kept is not None
    assert found.again is not None
    assert found.again < found.kept
    assert (found.kept > (1 - MARGIN) * CARDS[card] * GIB) == again
    assert found.may_change == (not again)
    assert f"{found.kept / GIB:.1f} GiB" in found.said
    assert f"{found.again / GIB:.1f}" in found.said


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_one_byte_decides(backend: str) -> None:
    settings = WorkloadSettings.read({backend: {"recompute": "auto"}})
    ranks = ranks_of(backend, SHAPES["0.6B"], settings, ranks=1)
    kept = need(ranks, PassSize.of(4096, 1024), several=False).total
    for taken, again in ((0, False), (1, True)):
        device = -(-kept // 92) * 100
        room = int((1 - MARGIN) * device) - kept
        found = choose(
            PassSettings(4096, "auto"), ranks, device, longest=1024, several=False, beside={"x": room + taken}
        )
        assert found.recompute == again


@pytest.mark.parametrize(
    ("shape", "card", "ranks", "again"),
    [
        ("0.6B", 24, 1, False),
        ("4B", 80, 2, False),
        ("4B", 24, 2, True),
        ("8B", 80, 2, True),
        ("8B", 141, 2, False),
    ],
)
def test_passes_by_auto_are_large_enough_or_are_computed_again(
    shape: str, card: int, ranks: int, again: bool
) -> None:
    found = chosen(shape, card, tokens="auto", ranks=ranks)
    assert found.recompute == again
    if not again:
        assert ENOUGH <= found.tokens <= MOST
        assert found.kept is not None
        assert found.kept <= (1 - MARGIN) * CARDS[card] * GIB
    else:
        assert found.keeps_up_to < ENOUGH
    assert found.said.startswith(f"passes of {found.tokens} tokens: ")


def test_a_sample_is_a_pass_of_its_own_whatever_passes_have() -> None:
    assert not chosen("4B", 80, tokens=4096).recompute
    assert chosen("4B", 80, tokens=4096, longest=16384).recompute
    assert chosen("4B", 80, tokens="auto", longest=16384).recompute
    assert chosen("4B", 80, tokens="auto", longest=16384).keeps_up_to == 0


def test_what_the_job_says_is_done() -> None:
    ranks = ranks_of("fsdp", SHAPES["4B"], WorkloadSettings(), ranks=2)
    for on in (False, True):
        for device in (None, 24 * GIB):
            found = choose(PassSettings(8192, on), ranks, device, longest=1024, several=True)
            assert (found.tokens, found.recompute, found.said, found.may_change) == (8192, on, "", False)


def test_on_cpus_they_are_kept_and_of_an_unknown_model_computed_again() -> None:
    alone = choose(PassSettings(16384, "auto"), None, None, longest=1024, several=True)
    assert (alone.recompute, alone.may_change) == (False, True)
    unknown = choose(PassSettings(16384, "auto"), None, 139 * GIB, longest=1024, several=True)
    assert (unknown.recompute, unknown.may_change) == (True, False)
    assert "is not known" in unknown.said


# -- who shares the device --------------------------------------------------------------------------------


def neighbour(module: str, name: str, *, total: int = 2, **engine: Any) -> Neighbour:
    return Neighbour(
        role=name.lower(),
        module=f"gyre.workloads.{module}",
        name=name,
        total=total,
        engine=engine.get("engine", ""),
        engine_args=engine.get("engine_args", []),
        local=engine.get("local", False),
    )


CRITIC = neighbour("fsdp.critic", "FsdpCritic")
REFERENCE = neighbour("fsdp.reference", "FsdpReference")
ACTOR = neighbour("fsdp.actor", "FsdpActor")
WEIGHTS = 2 * parameters_of(SHAPES["4B"]).total
FRACTION = ["--mem-fraction-static", "0.25"]


def taken(*there: Neighbour, **fsdp: Any) -> dict[str, int | None]:
    settings = WorkloadSettings.read(
        {"fsdp": {"pass_tokens": 8192, **fsdp}, "sampling": {"max_new_tokens": 1024}}
    )
    return beside(there, SHAPES["4B"], settings, 139 * GIB)


@pytest.mark.parametrize(
    ("there", "bytes_there"),
    [
        (neighbour("rewards", "PythonReward"), 0),
        (neighbour("torch.actor", "TorchReference"), 0),
        (neighbour("rollout_vertices", "RolloutInstance", engine="sglang", local=True), WEIGHTS + CONTEXT),
        (
            neighbour("rollout_vertices", "RolloutInstance", engine="sglang", engine_args=FRACTION),
            int(0.25 * 139 * GIB) + CONTEXT,
        ),
        (neighbour("rollout_vertices", "RolloutInstance", engine="sglang"), None),
        (neighbour("rollout_vertices", "RolloutInstance", engine="vllm", local=True), None),
        (neighbour("fsdp.reward_model", "FsdpRewardModel"), None),
        (neighbour("fsdpish", "FsdpReference"), None),
    ],
)
def test_what_a_neighbour_takes_is_known_or_said_not_to_be(there: Neighbour, bytes_there: int | None) -> None:
    (found,) = taken(there).values()
    assert found == bytes_there
    choice = chosen("4B", 141, tokens=8192, others=taken(there))
    assert choice.recompute == (found is None)
    assert (there["role"] in choice.said) == (found is None)
    if found is None:
        assert chosen("4B", 141, tokens="auto", others=taken(there)).tokens == LEAST


def test_a_frozen_model_is_counted_with_its_passes_and_a_learner_with_its_states() -> None:
    (reference,) = taken(REFERENCE).values()
    assert reference is not None
    assert WEIGHTS < reference < WEIGHTS + 8 * GIB
    (critic,) = taken(CRITIC).values()
    assert critic is not None
    assert critic > 4 * WEIGHTS


def test_two_that_choose_by_each_other_fit_together() -> None:
    """Each counts the other with its activations kept: they keep them both, or neither does."""
    for tokens, again in ((1024, False), (8192, True)):
        actor = chosen("4B", 141, tokens=tokens, others=taken(CRITIC, pass_tokens=tokens))
        critic = chosen("4B", 141, tokens=tokens, others=taken(ACTOR, pass_tokens=tokens))
        assert (actor.recompute, critic.recompute) == (again, again)
    settings = WorkloadSettings.read({"fsdp": {"pass_tokens": 8192}})
    told = {"fsdpcritic": True}
    known = beside([CRITIC], SHAPES["4B"], settings, 139 * GIB, recompute=told)
    assert (known["fsdpcritic"] or 0) < (taken(CRITIC)["fsdpcritic"] or 0)


# -- after a pass that did not fit -----------------------------------------------------------------------


def test_activations_are_spared_before_passes_are_halved() -> None:
    whole = {"pass_tokens": 16384, "recompute": False}
    assert [smaller(whole, times) for times in range(4)] == [
        whole,
        {"pass_tokens": 16384, "recompute": True},
        {"pass_tokens": 8192, "recompute": True},
        {"pass_tokens": 4096, "recompute": True},
    ]
    assert [smaller({"pass_tokens": 5}, times) for times in range(4)] == [
        {"pass_tokens": size} for size in (5, 2, 1, 1)
    ]
    assert [smaller({"passes": 1}, times) for times in range(3)] == [{"passes": n} for n in (1, 2, 4)]
