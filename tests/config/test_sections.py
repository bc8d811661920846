"""The sections of `config`: defaults in one place, and a mistake that names its path and the nearest known key."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from gyre.config import apply_overrides
from gyre.config.parse import read_yaml
from gyre.config.sections import Section, WorkloadSettings, read_section
from gyre.errors import ConfigError

SHAPE = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "mlp": 32}


def sections() -> list[type[BaseModel]]:
    found, waiting = [], [WorkloadSettings]
    while waiting:
        model: Any = waiting.pop()
        found.append(model)
        for field in model.model_fields.values():
            kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
            waiting += [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return found


@pytest.mark.parametrize("model", sections(), ids=lambda model: model.__name__)
def test_every_setting_says_what_it_is(model: type[BaseModel]) -> None:
    assert model.model_config["extra"] == "forbid"
    assert {name for name, field in model.model_fields.items() if not field.description} == set()


def test_other_workloads_keys_are_left_to_them() -> None:
    assert WorkloadSettings.read({"my_dataset": {"path": "x"}}) == WorkloadSettings()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model": SHAPE | {"hiden": 8}}, r"config\.model\.hiden: unknown key; did you mean 'hidden'"),
        ({"modle": {}}, r"config\.modle: unknown key; did you mean 'model'"),
        ({"seed": "1"}, r"config\.seed: '1' should be a valid integer"),
        ({"seed": True}, r"config\.seed: True should be a valid integer"),
        ({"seed": -1}, r"config\.seed: -1 should be greater than or equal to 0"),
        ({"seed": 2**63}, r"config\.seed: 9223372036854775808 should be less than 9223372036854775808"),
        ({"optim": {"lr": "fast"}}, r"config\.optim\.lr: 'fast' should be a valid number"),
        ({"optim": {"lr": 0}}, r"config\.optim\.lr: 0 should be greater than 0"),
        ({"critic": {"optim": {"lrr": 1.0}}}, r"config\.critic\.optim\.lrr: unknown key; did you mean 'lr'"),
        ({"sampling": 3}, r"config\.sampling: 3 given, expected a mapping"),
        ({"task": {"operators": "/"}}, r"config\.task\.operators: '/' must be made of"),
        ({"model": SHAPE | {"heads": 5}}, "even multiple"),
        ({"model": SHAPE | {"kv_heads": 3}}, "multiple of kv_heads"),
        ({"loss": {"loss_agg_mode": "mean"}}, "loss_agg_mode"),
        ({"model": {}}, r"config\.model\.layers: is missing; config\.model\.hidden: is missing"),
        ({"data": {}}, r"config\.data\.path: is missing"),
        ({"data": {"path": "x", "held_out": "y", "held_out_every": 9}}, "both given"),
    ],
)
def test_a_wrong_setting_is_named(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        WorkloadSettings.read(config)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"held_out": 3}, r"config\.data\.held_out: 3 must be a folder, or a mapping"),
        ({"held_out": {"a/b": "x"}}, r"held_out: names a set 'a/b'"),
        ({"held_out": {"aime": ""}}, r"held_out: gives '' for aime, expected a folder"),
        ({"held_out": {"aime": "x"}, "held_out_every": 4}, "both given"),
    ],
)
def test_held_out_sets_are_folders_with_names(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        WorkloadSettings.read({"data": {"path": "p", **given}})


def test_a_plain_held_out_folder_is_a_set_too() -> None:
    plain = WorkloadSettings.read({"data": {"path": "p", "held_out": "x"}}).data
    named = WorkloadSettings.read({"data": {"path": "p", "held_out": {"b": "x", "a": "y"}}}).data
    assert plain is not None
    assert named is not None
    assert (plain.held_out_sets, list(named.held_out_sets)) == ({"held_out": "x"}, ["a", "b"])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"n": 4, "k": [1, 8]}, r"config\.evaluation: k has 8, but a prompt has 4 samples"),
        ({"k": [0]}, r"config\.evaluation\.k\.0: 0 should be greater"),
        ({"treshold": 1}, "did you mean 'threshold'"),
    ],
)
def test_an_evaluation_s_settings_fit_together(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        WorkloadSettings.read({"evaluation": given})


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        WorkloadSettings.read({"sampling": {"n": 0, "temprature": 1}, "optim": {"eps": "small"}})
    assert len(caught.value.details["mistakes"]) == 3


def test_an_integer_is_a_fine_float() -> None:
    assert WorkloadSettings.read({"optim": {"lr": 1}}).optim.lr == 1.0


def test_what_may_be_absent_is_a_number_or_nothing() -> None:
    for given, read in ((0, 0.0), (-1.5, -1.5), (None, None)):
        assert WorkloadSettings.read({"reward": {"stuck_score": given}}).reward.stuck_score == read
    for wrong in ("0", True, float("nan")):
        with pytest.raises(ConfigError, match=r"config\.reward\.stuck_score: "):
            WorkloadSettings.read({"reward": {"stuck_score": wrong}})


def test_a_section_of_ones_own_is_read_in_the_same_way() -> None:
    class Curriculum(Section):
        levels: int = 3

    assert read_section(Curriculum, {}, "curriculum").levels == 3
    with pytest.raises(ConfigError, match=r"config\.curriculum\.level: unknown key; did you mean 'levels'"):
        read_section(Curriculum, {"curriculum": {"level": 4}}, "curriculum")


def test_sections_tasks_rewards_and_manifests_import_neither_torch_nor_ray() -> None:
    modules = "gyre.config.sections, gyre.workloads.tasks.arithmetic, gyre.workloads.rewards, gyre.weights"
    script = f"import sys, {modules}; sys.exit(bool({{'torch', 'ray'}} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "value"), [("1e-6", 1e-6), ("-2E+3", -2000.0), ("1.0e-6", 1e-6), ("1_0e2", 1000.0)]
)
def test_a_number_without_a_point_is_a_number(text: str, value: float) -> None:
    assert isinstance(yaml.safe_load("1e-6"), str), "YAML 1.1, as PyYAML reads it by itself"
    assert read_yaml(f"lr: {text}") == {"lr": value}
    assert apply_overrides({}, [f"config.optim.lr={text}"]) == {"config": {"optim": {"lr": value}}}


@pytest.mark.parametrize("text", ["e6", "1e", "v1e6", "1e6b", "0x1e6z"])
def test_what_only_looks_like_a_number_stays_text(text: str) -> None:
    assert read_yaml(text) == text


def test_a_key_that_older_yaml_takes_for_true_is_text() -> None:
    assert read_yaml("{on: [end], No: yes, true: 1, 'off': 2}") == {
        "on": ["end"],
        "No": True,
        True: 1,
        "off": 2,
    }
