"""`gyre config`: the schema for editors, and the whole configuration of a job file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from gyre.api.cli import main
from gyre.config.schema import job_schema

ROOT = Path(__file__).parents[2]

JOB = """
name: shown
recipe: dr_grpo
config:
  task: {digits: 1}
  model: {layers: 1, hidden: 16, heads: 2, kv_heads: 1, mlp: 16}
  optim: {lr: 0.001}
  mine: {anything: 1}
roles: {actor: {}, rollout: {}, reward: {}}
"""


def gyre(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_the_schema_is_printed_as_json() -> None:
    assert json.loads(gyre("config", "schema").stdout) == job_schema()


def test_defaults_and_what_the_recipe_adds_are_shown(file: Path) -> None:
    shown = yaml.safe_load(gyre("config", "show", str(file), "--set", "run.steps=7").stdout)
    assert shown["run"]["steps"] == 7
    assert shown["run"]["checkpoint_every"] == 10
    assert shown["config"]["loss"]["adv_estimator"] == "dr_grpo"  # by the recipe
    assert shown["config"]["loss"]["gamma"] == 1.0
    assert shown["config"]["mine"] == {"anything": 1}
    assert shown["config"]["task"].keys().isdisjoint({"file", "options"})  # of other tasks
    assert shown["roles"]["actor"]["entrypoint"] == "gyre.workloads.torch.actor:TorchActor"
    assert json.loads(gyre("config", "show", str(file), "--set", "run.steps=7", "--json").stdout) == shown


@pytest.mark.parametrize(
    "name", ["async_grpo.yaml", "grpo_gsm8k.yaml", "ppo_gsm8k.yaml", "grpo_arithmetic.py"]
)
def test_what_is_shown_is_a_job_file_of_the_same_job(name: str, tmp_path: Path) -> None:
    shown = gyre("config", "show", str(ROOT / "examples" / name))
    assert shown.exit_code == 0, shown.output
    again = tmp_path / "again.yaml"
    again.write_text(shown.stdout)
    second = yaml.safe_load(gyre("config", "show", str(again)).stdout)
    first = yaml.safe_load(shown.stdout)
    assert second.pop("python_path") == [*first.pop("python_path"), str(tmp_path)]
    assert second == first


def test_a_mistake_is_the_sentence_that_plan_has(file: Path) -> None:
    file.write_text(JOB.replace("digits", "digts"))
    refused = gyre("config", "show", str(file))
    assert refused.exit_code == 2
    assert f"{file}, line 5: config.task.digts: unknown key; did you mean 'digits'?" in refused.stderr
