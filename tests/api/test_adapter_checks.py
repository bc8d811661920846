"""What `gyre plan` says of a job that trains an adapter: all that it cannot train or serve, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.api.checks import machine
from gyre.errors import ConfigError, GraphError
from tests.api.test_checks import SMALL, checked, job
from tests.engines.embedded.tiny import write_checkpoint

OWN = "tests.workloads.test_plugins:engine"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("adapter") / "model", "qwen3"))


def adapter_job(folder: str, config: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    own = {"task": {}, "optim": {"lr": 1e-3}, "model_path": folder, "lora": {"rank": 4}}
    return job(own | (config or {}), **({"backend": "fsdp"} | keys))


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_a_job_with_an_adapter_is_in_order(folder: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_engines", lambda spec: iter(()))  # SGLang need not be here
    told = checked(adapter_job(folder, {"loss": {"kl_loss_coef": 0.1}}, rollouts={"engine": engine}))
    assert not [line for line in told if "lora" in line]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "by plain torch": ({}, {"backend": "torch"}, "only FSDP2's ranks train an adapter"),
    "by Megatron": ({}, {"backend": "megatron"}, "only FSDP2's ranks train an adapter"),
    "beside no model": (
        {"model_path": "", "model": SMALL["model"]},
        {},
        "there is no model for an adapter to stand beside",
    ),
    "by an engine of one's own": (
        {},
        {"rollouts": {"engine": OWN}},
        f"it is not known whether the engine {OWN} takes adapters",
    ),
    "by a pool with such an engine": (
        {},
        {"roles": {"rollout": {"pool": {"engine": OWN}}}},
        "takes adapters",
    ),
    "beside a second model": (
        {"loss": {"kl_loss_coef": 0.1}},
        {"roles": {"reference": {}}},
        "the role reference would hold the model a second time",
    ),
    "for a critic that is told of the KL": (
        {"loss": {"kl_reward_coef": 0.1, "adv_estimator": "gae"}, "critic": {"optim": {"lr": 1e-5}}},
        {"recipe": "ppo", "roles": {"critic": {}}},
        "a critic does not hear",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_adapter_that_cannot_be_trained_or_served_is_refused(folder: str, what: str) -> None:
    config, keys, said = REFUSED[what]
    with pytest.raises(ConfigError, match=r"config\.lora: given, but") as caught:
        checked(adapter_job(folder, config, **keys))
    assert said in caught.value.message
    assert caught.value.hint


def test_without_an_adapter_a_kl_term_needs_the_role(folder: str) -> None:
    given = adapter_job(folder, {"loss": {"kl_loss_coef": 0.1}})
    del given["config"]["lora"]
    with pytest.raises(GraphError, match="no reference role"):
        checked(given)
