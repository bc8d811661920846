"""What `gyre plan` says a job comes to: rows, epochs, tokens, checkpoints, and yes or no as its last line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from gyre.api.checks.amounts import Amounts, amounts_of, lines_of
from gyre.api.cli import main
from gyre.config import parse_job
from gyre.data.prepare import PromptRecipe, prepare
from gyre.graph import compile_job
from gyre.models.architecture import Architecture, config_of
from tests.data.small import write_lines, write_tokenizer

SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16, "max_positions": 96}
ROLES: dict[str, Any] = {"actor": {}, "rollout": {}, "reward": {}}
SUMS = {"task": {"name": "arithmetic", "digits": 2}}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("gyre.api.checks.machine.has_gpu", lambda: False)


def job(config: Mapping[str, Any], **run: Any) -> dict[str, Any]:
    common = {"model": SHAPE, "optim": {"lr": 1e-3}, "sampling": {"n": 4, "max_new_tokens": 8}}
    return {"recipe": "grpo", "roles": ROLES, "config": {**common, **config}, "run": run}


def amounts(given: dict[str, Any]) -> Amounts:
    found = amounts_of(compile_job(parse_job(given)).spec)
    assert found is not None
    return found


def plan(given: dict[str, Any], *options: str) -> Result:
    Path("job.yaml").write_text(yaml.safe_dump(given))
    return CliRunner().invoke(main, ["plan", "job.yaml", *options])


def prepared(folder: Path, prompts: list[str]) -> str:
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        tokenizer.mkdir()
        write_tokenizer(tokenizer)
    made = folder / f"data-{len(prompts)}"
    rows = [{"prompt": prompt, "answer": "1"} for prompt in prompts]
    made.mkdir()
    prepare(write_lines(made / "rows.jsonl", rows), made / "data", tokenizer, PromptRecipe())
    return str(made / "data")


def test_rows_that_are_held_out_too_are_not_counted_as_trained_on(tmp_path: Path) -> None:
    rows = [f"What is {n}?" for n in range(12)]
    train, held_out = prepared(tmp_path, rows), prepared(tmp_path, rows[:3])
    data = {"data": {"path": train, "held_out": held_out}}
    found = amounts(job(data, steps=3, prompts_per_step=6, evaluate_every=2, held_out=2))
    assert found.prompts is not None
    assert (found.prompts.rows, found.prompts.training, found.prompts.held_out) == (12, 9, {"held_out": 3})
    assert found.epochs == 2.0
    assert (found.answers_per_step, found.tokens_per_step) == (24, 192)
    mean = found.prompts.mean_tokens
    assert found.prompt_tokens_per_step == round(6 * mean)
    said = dict(lines_of(found))
    assert said["prompts"].startswith("9 of 12 rows are trained on; 3 are never trained on")
    assert said["steps"] == "3 of 6 prompts, 2.0 epochs"
    assert "192 generated a step, 576 in all" in said["tokens"]
    assert said["evaluations"] == "every 2 steps: 2 prompts of held_out, at most 16 tokens each time"


def test_less_than_an_epoch_says_how_many_rows_are_not_reached(tmp_path: Path) -> None:
    data = {"data": {"path": prepared(tmp_path, [f"What is {n}?" for n in range(12)])}}
    said = dict(lines_of(amounts(job(data, steps=1, prompts_per_step=3, evaluate_every=0))))
    assert said["steps"] == "1 of 3 prompts, 0.25 of an epoch, so 9 rows are not reached"
    assert said["evaluations"] == "none (run.evaluate_every is 0)"


def test_what_is_not_here_is_not_known_and_a_task_makes_its_prompts() -> None:
    away = amounts(job({"data": {"path": "/no/data"}}))
    assert (away.prompts, away.epochs, away.prompt_tokens_per_step) == (None, None, None)
    assert dict(lines_of(away))["prompts"] == "not known: the data set is not on this machine"
    made = amounts(job(SUMS))
    assert dict(lines_of(made))["prompts"] == "made as they are drawn"


def test_yes_is_the_last_line_and_the_graph_is_only_shown_when_asked_for() -> None:
    good = job(SUMS, steps=2)
    plain, whole = plan(good), plan(good, "--graph")
    assert plain.exit_code == whole.exit_code == 0, plain.output
    assert plain.stdout.splitlines()[-1].startswith("Yes: 5 vertices on 1 machine")
    assert "Placement" not in plain.stdout
    assert "Placement" in whole.stdout
    assert whole.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]
    told = json.loads(plan(good, "--json").stdout)
    assert told["verdict"]["runs"] is True
    assert told["amounts"]["tokens"] == 2 * told["amounts"]["tokens_per_step"]
    assert told["placement"]


def test_no_is_the_last_line_and_names_the_key() -> None:
    bad = job({**SUMS, "optim": {}}, steps=2)
    found = plan(bad)
    assert found.exit_code == 2
    assert found.output.splitlines()[-1] == "No: config.optim.lr must be mended first."
    told = json.loads(plan(bad, "--json").stdout)
    assert told["verdict"]["runs"] is False
    assert "config.optim.lr" in told["verdict"]["because"]


def test_a_warning_is_counted_and_strict_makes_it_a_no() -> None:
    warned = job(SUMS, steps=2, evaluate_every=0)
    assert "1 warning" in plan(warned).stdout.splitlines()[-1]
    strict = plan(warned, "--strict")
    assert strict.exit_code == 2
    assert strict.output.splitlines()[-1] == "No: --strict does not permit warnings."
    told = json.loads(plan(warned, "--strict", "--json").stdout)
    assert told["verdict"]["runs"] is False


def test_the_fullest_device_is_in_the_verdict_and_a_cpu_job_is_told_its_disk(tmp_path: Path) -> None:
    shape = Architecture.qwen3(
        vocab=512, layers=2, hidden=64, heads=4, kv_heads=2, mlp=128, max_positions=2048
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config_of(shape, eos_id=1)))
    sharded = {
        **job({**SUMS, "model": None, "model_path": "model"}, steps=2),
        "backend": "fsdp",
        "node_num": 2,
    }
    on_gpus = {**sharded, "device_type": "GPU", "device_memory_gib": 80}
    last = plan(on_gpus, "--ray-address", "192.0.2.1:6379").stdout.splitlines()[-1]
    assert "it fits: of the 80.0 GiB of a device actor takes the most" in last
    unknown = {**sharded, "device_type": "GPU"}
    last = plan(unknown, "--ray-address", "192.0.2.1:6379").stdout.splitlines()[-1]
    assert "whether it fits its GPUs is not known" in last
    found = plan(sharded, "--ray-address", "192.0.2.1:6379")
    assert any(line.startswith("actor") and " disk " in line for line in found.stdout.splitlines())
    assert "GPUs" not in found.stdout.splitlines()[-1]


def test_the_price_of_an_hour_is_told_where_prices_are_given() -> None:
    """A CPU job's roles have a device each, too: that is how three of them cost three times the price."""
    given = job(SUMS)
    assert "an hour costs" not in plan(given).output
    priced = plan({**given, "device_price_per_hour": 3.0})
    assert "an hour costs  9.00: 3 devices at 3.00 each" in priced.output
    assert json.loads(plan({**given, "device_price_per_hour": 3.0}, "--json").stdout)["price_per_hour"] == 9.0
    pool = {**given, "roles": {**ROLES, "rollout": {"total": 2, "pool": {"price_per_hour": 1.25}}}}
    assert "an hour costs  2.50: 2 instances of rollout at 1.25 each" in plan(pool).output
    both = plan({**pool, "device_price_per_hour": 3.0}).output
    assert "8.50: 2 instances of rollout at 1.25 each and 2 devices at 3.00 each" in both


def agents_job(total: int = 2, *, step: int = 128, **rollouts: Any) -> dict[str, Any]:
    agent = {"environment": "gyre.agents.calculator:Calculator", "concurrency": 16, "max_tokens": 64}
    given = job({"task": {"name": "gyre.agents.calculator:CalculatorTask"}, "agent": agent})
    given["roles"] = {"actor": {}, "rollout": {"total": 2}, "agent": {"total": total}}
    return given | {"run": {"steps": 2, "prompts_per_step": step}, "rollouts": rollouts}


def test_how_many_sessions_run_at_once() -> None:
    found = plan(agents_job())
    assert "32 at once, 16 with each of 2 agents; a step begins 512" in " ".join(found.output.split())
    assert "at most 32,768 generated a step, 65,536 in all; more where a session begins" in " ".join(
        found.output.split()
    )
    told = json.loads(plan(agents_job(), "--json").stdout)["amounts"]
    assert (told["sessions_at_once"], told["answers_per_step"]) == (32, 512)
    more = agents_job()
    more["config"]["agent"]["oversample"] = 1.3
    assert "a step begins 768" in " ".join(plan(more).output.split())
    assert "sessions" not in dict(lines_of(amounts(job(SUMS))))


def test_agents_that_leave_engines_idle_are_warned_of() -> None:
    few = "2 agents run 32 sessions at once (roles.agent.total times config.agent.concurrency), and a step begins 512"
    known = plan(agents_job(max_running=64)).output
    assert f"warning: {few}: the engines generate 128 samples at once, and wait for agents" in known
    assert f"note: {few}: engines that generate more than 32 samples at once" in plan(agents_job()).output
    for enough in (agents_job(max_running=16), agents_job(8, max_running=64), agents_job(step=8)):
        assert "sessions at once (" not in plan(enough).output


def session_job(**agent: Any) -> dict[str, Any]:
    given = agents_job()
    given["config"]["agent"] = {"environment": "gyre.agents.calculator:Calculator", **agent}
    return given


def test_a_session_has_to_fit_the_model() -> None:
    """One that is not said how long it may be fills the context, whatever its turns are."""
    for context, longest in ((None, 96), (48, 48)):
        given = session_job()
        given["rollouts"] = {} if context is None else {"context_length": context}
        compiled = compile_job(parse_job(given)).spec
        assert compiled.config["agent"]["max_tokens"] == longest
        assert compile_job(compiled).spec == compiled
        assert plan(given).exit_code == 0, plan(given).output
    told = plan(session_job(max_tokens=97))
    assert told.exit_code == 2
    assert (
        "config.agent.max_tokens: 97 given, which is more than config.model.max_positions, 96." in told.stderr
    )
    assert plan(session_job(max_tokens=96)).exit_code == 0


def test_a_prompt_has_to_leave_a_session_room(tmp_path: Path) -> None:
    """Of a prepared data set, and of a file of rows."""
    data = prepared(tmp_path, ["1+1=", "1+1+1+1+1+1="])
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": "1+1+1+1+1+1=", "answer": "6"}])
    for source in ({"data": {"path": data}}, {"task": {"name": "rows", "file": str(rows)}}):
        given = session_job(max_tokens=8)
        given["run"] = {**given["run"], "evaluate_every": 0}
        given["config"] = {key: one for key, one in given["config"].items() if key != "task"} | source
        told = plan(given)
        assert told.exit_code == 2, told.output
        assert "config.agent.max_tokens: 8 given, which leaves no room for an answer beside" in told.stderr
        given["config"]["agent"]["max_tokens"] = 97
        assert "which is more than config.model.max_positions" in plan(given).stderr


def test_agents_need_a_way_to_write_conversations(tmp_path: Path) -> None:
    """An environment is asked in messages; a function may ask with token ids."""
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    plain = write_lines(tmp_path / "plain.jsonl", [{"prompt": "1+1=[:]", "answer": "2"}])
    given = session_job()
    no_evaluation = {**given["run"], "evaluate_every": 0}
    for source, is_refused in (
        ({"data": {"path": prepared(tmp_path, ["1+1="])}}, True),
        ({"task": {"name": "rows", "file": str(rows)}}, True),
        ({"task": {"name": "rows", "file": str(plain)}}, False),
        ({"task": {"name": "arithmetic"}}, True),
    ):
        config = {key: one for key, one in given["config"].items() if key != "task"} | source
        told = plan({**given, "config": config, "run": no_evaluation})
        assert ("config.agent.environment: is asked in messages" in told.stderr) is is_refused, told.output
        config["agent"] = {"function": "tests.agents.given_agents:scores"}
        told = plan({**given, "config": config, "run": no_evaluation})
        assert told.exit_code == 0, told.output
        assert ("agents ask with token ids alone" in told.output) is is_refused
    given["config"]["chat"] = {"renderer": "qwen3"}
    assert "config.chat: is given, but there is no model's folder" in plan(given).stderr


def test_a_tool_has_to_be_cut_off_before_its_session() -> None:
    told = plan(session_job(seconds=60.0, tool_timeout_s=60.0)).output
    assert "warning: config.agent.tool_timeout_s: 60 given, but a session is cut off after 60 s" in told
    assert "tool_timeout_s" not in plan(session_job(seconds=61.0, tool_timeout_s=60.0)).output
