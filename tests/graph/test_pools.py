"""Pools of rollout instances: roles of the plane beside `rollout`, with engines, prices and bounds of their own."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.config.job_plugins import plugins_of
from gyre.errors import GraphError
from gyre.graph import compile_job, is_instance, pools_of, rollouts_of
from tests.graph.jobs import grpo_job, role

SPOT = {
    "total": 1,
    "elastic": {"min": 0, "max": 8},
    "pool": {"price_per_hour": 1.2, "engine_args": ["--tp", "2"], "max_running": 64},
}


def test_a_pool_consists_of_instances_with_what_it_has_otherwise() -> None:
    spec = compile_job(
        grpo_job(
            {"rollout": {"pool": {"price_per_hour": 4.0}}, "rollout_spot": SPOT},
            rollouts={"engine": "sglang", "engine_args": ["--tp", "1"], "context_length": 512},
        )
    ).spec
    assert is_instance(spec, "rollout_spot")
    plain, spot = rollouts_of(spec, "rollout"), rollouts_of(spec, "rollout_spot")
    assert (plain.engine_args, plain.max_running) == (["--tp", "1"], None)
    assert (spot.engine_args, spot.max_running) == (["--tp", "2"], 64)
    assert (spot.engine, spot.context_length) == ("sglang", 512), "as the job says"
    told = pools_of(spec)
    assert list(told) == ["rollout", "rollout_spot"]
    assert (told["rollout"]["elastic"], told["rollout"]["price_per_hour"]) == (None, 4.0)
    assert told["rollout_spot"]["elastic"]["max"] == 8
    assert told["rollout_spot"]["price_per_hour"] == 1.2


def test_instances_on_the_actors_devices_are_no_pool() -> None:
    spec = compile_job(grpo_job(rollouts={"local": 1})).spec
    assert is_instance(spec, "local_rollout")
    assert list(pools_of(spec)) == ["rollout"]


def test_an_engine_of_ones_own_may_be_a_pools() -> None:
    pool = {**SPOT, "pool": {"engine": "my.engines:Fast"}}
    assert "my.engines:Fast" in [name for _, name in plugins_of(grpo_job({"rollout_spot": pool}))]


def test_a_pool_beside_rollouts_that_the_trainer_calls_itself_is_refused() -> None:
    with pytest.raises(
        GraphError, match=r"roles\.rollout_spot\.pool: is given, but the job's rollouts are not"
    ):
        compile_job(grpo_job({"rollout": role(), "rollout_spot": SPOT}))


def test_a_pool_of_another_class_is_refused() -> None:
    with pytest.raises(GraphError, match=r"roles\.rollout_spot\.entrypoint: my\.module:Worker given"):
        compile_job(grpo_job({"rollout_spot": role(pool={})}))


@pytest.mark.parametrize(
    ("roles", "keys", "sentence"),
    [
        ({}, {"rollouts": {"context_length": 64}}, r"rollouts\.context_length: 64 given, .* 32 positions"),
        (
            {"rollout_spot": {"pool": {"context_length": 33}}},
            {},
            r"roles\.rollout_spot\.pool\.context_length: 33",
        ),
    ],
)
def test_engines_that_would_read_more_than_the_model_can_are_refused(
    roles: dict[str, Any], keys: dict[str, Any], sentence: str
) -> None:
    model = {"layers": 1, "hidden": 8, "heads": 1, "kv_heads": 1, "mlp": 8, "max_positions": 32}
    compile_job(grpo_job(config={"model": model}, rollouts={"context_length": 32}))
    with pytest.raises(GraphError, match=sentence):
        compile_job(grpo_job(roles, config={"model": model}, **keys))
