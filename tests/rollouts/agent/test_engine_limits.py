"""What an engine is given at once: the user's word first, then the engine's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre.engines.dialect import EngineInfo, EngineLoad
from gyre.rollouts.agent.engine_limits import limits_of, limits_unknown

LOAD = EngineLoad(running=0, waiting=0, used_tokens=0, max_tokens=900_000, max_running=2048)
INFO = EngineInfo("m", "0", 4096, "0.5.17", graphs_up_to=512)


def test_left_to_itself_an_engine_gets_what_its_graphs_and_its_memory_hold() -> None:
    limits = limits_of(LOAD, INFO, max_running=None, kv_tokens=None)
    assert (limits.max_running, limits.kv_tokens) == (512, 900_000)
    assert limits.why == (
        "512 samples at once: its CUDA graphs hold no more, the engine allows 2,048; "
        "900,000 tokens of KV memory: all that the engine has"
    )


@pytest.mark.parametrize("graphs", [None, 4096])
def test_without_graphs_or_with_larger_ones_the_engine_itself_is_the_limit(graphs: int | None) -> None:
    limits = limits_of(LOAD, replace(INFO, graphs_up_to=graphs), max_running=None, kv_tokens=None)
    assert limits.max_running == 2048
    assert "the engine allows no more" in limits.why


def test_graphs_are_counted_for_each_replica() -> None:
    info = replace(INFO, replicas=2)
    assert limits_of(LOAD, info, max_running=None, kv_tokens=None).max_running == 1024


def test_what_the_user_set_wins() -> None:
    limits = limits_of(LOAD, INFO, max_running=700, kv_tokens=100_000)
    assert (limits.max_running, limits.kv_tokens) == (700, 100_000)
    assert "as rollouts.max_running says" in limits.why
    assert "as rollouts.kv_tokens says" in limits.why


def test_nobody_gets_more_than_the_engine_has() -> None:
    limits = limits_of(LOAD, INFO, max_running=5000, kv_tokens=1 << 20)
    assert (limits.max_running, limits.kv_tokens) == (2048, 900_000)
    assert "rollouts.max_running says 5,000" in limits.why
    assert "rollouts.kv_tokens says 1,048,576" in limits.why


def test_before_its_start_an_engine_is_taken_for_a_common_one() -> None:
    assert limits_unknown(None, None, "not started").max_running == 256
    assert limits_unknown(8, 64, "not started").kv_tokens == 64
