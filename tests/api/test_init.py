"""`gyre init`: what it writes is planned as it is, runs to its end, and overwrites nothing."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gyre.agents import PolicyFault
from gyre.agents import calculator as demo
from gyre.api.cli import main
from gyre.api.cli.init import HERE, SCHEMA, TEMPLATES, job_name
from gyre.api.definition.jobfile import load_job_file
from gyre.config.schema import job_schema

ROOT = Path(__file__).parents[2]
FILES = {*TEMPLATES["cpu"], SCHEMA}


def gyre(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def written(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_what_it_writes_is_planned_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = gyre("init", "my first job")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == ["cd 'my first job' && gyre plan job.yaml", "gyre run job.yaml"]
    folder = tmp_path / "my first job"
    assert set(written(folder)) == FILES
    assert "name: my-first-job\n" in (folder / "job.yaml").read_text()
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["prompt"] for row in rows}) == 20
    assert json.loads((folder / "job.schema.json").read_text()) == job_schema()
    monkeypatch.chdir(folder)
    planned = gyre("plan", "job.yaml", "--strict")
    assert planned.exit_code == 0, planned.output


@pytest.mark.parametrize("template", sorted(TEMPLATES.keys() - {"cpu"}))
def test_every_template_is_planned_for_a_cluster_without_a_warning(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    assert gyre("init", str(folder), "--template", template).exit_code == 0
    assert written(folder).keys() == {*TEMPLATES[template], SCHEMA}
    text = (folder / "job.yaml").read_text()
    assert "name: mine\n" in text
    assert "my-job" not in text
    monkeypatch.chdir(folder)
    planned = gyre("plan", "job.yaml", "--strict", "--ray-address", "192.0.2.1:6379")
    assert planned.exit_code == 0, planned.output
    assert planned.stdout.splitlines()[-1].startswith("Yes: ")
    assert "lora" not in text or "adapter" in text


def test_the_template_with_an_agent_is_an_environment_of_the_demos_task(tmp_path: Path) -> None:
    assert gyre("init", str(tmp_path), "--template", "agent").exit_code == 0
    module = runpy.run_path(str(tmp_path / "agent.py"))
    environment = module["Calculator"]()
    assert environment.tools[0]["function"]["name"] == demo.Calculator.tools[0]["function"]["name"]
    for problem in ("12*34=", "12*34*5="):
        task = {"problem": problem, "answer": demo.answer_to(problem)}
        assert environment.reset(task, 0) == problem
        told = demo.session_of(problem, [False, False])
        for (said, _), (answer, _) in zip(told[:-1:2], told[1::2], strict=True):
            call = {"id": "1", "function": {"arguments": json.dumps({"factors": said.strip("[]")})}}
            message = {"content": None, "tool_calls": [call]}
            expected = {"role": "tool", "tool_call_id": "1", "content": answer.strip(":")}
            assert environment.step(message) == ([expected], 0.0, False)
        assert environment.step({"content": told[-1][0]}) == ([], 1.0, True)
        assert environment.step({"content": "1"}) == ([], 0.0, True)
    for arguments in ("{}", "[", '{"factors": "1*2*3"}', '{"factors": 7}'):
        with pytest.raises(PolicyFault):
            environment.step({"tool_calls": [{"id": "1", "function": {"arguments": arguments}}]})


def test_the_templates_that_have_rows_plan_here_with_a_prepared_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their own commands, with a small tokenizer: the rows are enough for what the job holds out."""
    from gyre.api.checks.amounts import amounts_of
    from gyre.data.prepare import PromptRecipe, prepare
    from gyre.graph import compile_job
    from tests.data.small import write_tokenizer

    for template in ("gpu", "lora"):
        folder = tmp_path / template
        assert gyre("init", str(folder), "--template", template).exit_code == 0
        (folder / "model").mkdir()
        write_tokenizer(folder / "model")
        prepare(folder / "rows.jsonl", folder / "data" / "train", folder / "model", PromptRecipe())
        monkeypatch.chdir(folder)
        found = amounts_of(compile_job(load_job_file(Path("job.yaml")).spec).spec)
        assert found is not None
        assert found.prompts is not None
        assert found.prompts.held_out["held_out"] >= found.held_out


def test_it_overwrites_nothing_without_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("mine")
    refused = gyre("init")
    assert refused.exit_code == 5
    assert "reward.py already there" in refused.stderr
    assert written(tmp_path) == {"reward.py": "mine"}
    forced = gyre("init", "--force")
    assert forced.stdout.splitlines() == ["gyre plan job.yaml", "gyre run job.yaml"]
    assert set(written(tmp_path)) == FILES
    assert "def score" in (tmp_path / "reward.py").read_text()


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = gyre("init", str(tmp_path / "file"))
    assert refused.exit_code == 2
    assert re.match(r"error: \S+/file: cannot be written: ", refused.stderr)


@pytest.mark.parametrize(
    ("folder", "name"), [("a b", "a-b"), ("-x-", "x"), ("日本", "my-job"), ("a" * 80, "a" * 63)]
)
def test_the_job_has_the_folders_name(tmp_path: Path, folder: str, name: str) -> None:
    assert job_name(tmp_path / folder) == name


@pytest.mark.parametrize("folder", ["2024", "no", "1e3"])
def test_a_name_that_yaml_would_take_for_something_else_is_quoted(tmp_path: Path, folder: str) -> None:
    assert gyre("init", str(tmp_path / folder)).exit_code == 0
    assert load_job_file(tmp_path / folder / "job.yaml").spec.name == folder


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.parametrize("template", HERE)
def test_what_it_writes_runs_to_its_end_and_learns(template: str, tmp_path: Path) -> None:
    environment = {**os.environ, "GYRE_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)

    def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gyre.api", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    assert run(tmp_path, "init", "mine", "--template", template).returncode == 0
    done = run(tmp_path / "mine", "run", "job.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert "mine succeeded" in done.stderr
    rewards = json.loads(done.stdout)["training"]
    assert rewards["last"]["reward_mean"] > rewards["first"]["reward_mean"] + 0.3
