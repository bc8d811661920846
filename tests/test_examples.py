"""The examples load, plan and import; those that can run on CPUs run, with fewer steps and smaller models."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gyre.api.definition.entrypoints import check_entrypoints
from gyre.api.definition.jobfile import load_job_file
from gyre.config import parse_job

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples"
EXAMPLES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".py", ".yaml"))

DEADLINE_S = 90

SMALL = {
    "config.model": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16, "max_positions": 256},
    "config.sampling": {"n": 2, "max_new_tokens": 4},
    "config.warm_start": {"max_steps": 2, "batch": 8, "lr": 3e-3},
    "run": {
        "steps": 2,
        "prompts_per_step": 4,
        "groups_per_firing": 2,
        "groups_per_micro_batch": 2,
        "checkpoint_every": 1,
        "evaluate_every": 2,
        "held_out": 4,
    },
}
"""What every example is run with here."""

CALLED = {"roles.rollout": {"entrypoint": "gyre.workloads.torch.rollout:TorchRollout"}}
"""Rollouts that the trainer calls: without engines and their start."""


def short_job(name: str, changes: dict[str, Any], folder: Path) -> Any:
    """The example with these sections changed, in one process. Paths of more than one part reach into sections."""
    from gyre.testing.in_process import InProcessJob

    spec = load_job_file(FOLDER / name).spec.model_dump(mode="json")
    for path, values in changes.items():
        *above, last = path.split(".")
        section = spec
        for part in above:
            section = section[part]
        section[last] = {**(section.get(last) or {}), **values}
    return InProcessJob(parse_job(spec), folder)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_loads_and_plans(path: Path) -> None:
    job = load_job_file(path)
    plan = job.plan().plan
    wanted = {f"{name}-{rank}" for name, role in job.plan().spec.roles.items() for rank in range(role.total)}
    assert set(plan.placements) == wanted
    spec = job.spec.model_dump(mode="json")
    assert parse_job(json.loads(json.dumps(spec))) == job.spec


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_classes_of_an_example_have_what_is_called(path: Path) -> None:
    job = load_job_file(path)
    assert set(check_entrypoints(job.spec)) == set(job.plan().spec.roles)


def test_the_asynchronous_example_differs_from_the_synchronous_one_in_its_staleness_alone() -> None:
    folder = Path(__file__).parents[1] / "examples"
    sync = load_job_file(folder / "grpo_arithmetic.py").plan().spec
    other = load_job_file(folder / "async_grpo.yaml").plan().spec
    assert (sync.max_staleness, other.max_staleness) == (0, 1)
    assert other.run == sync.run
    assert {name: role.total for name, role in other.roles.items()} == {
        name: role.total for name, role in sync.roles.items()
    }


def test_the_arithmetic_example_is_the_demo() -> None:
    from gyre.api.demo import STEPS, demo_job

    example = load_job_file(Path(__file__).parents[1] / "examples" / "grpo_arithmetic.py").plan().spec
    demo = demo_job(steps=STEPS).plan().spec
    assert example.run == demo.run
    assert example.roles == demo.roles
    assert example.failover == demo.failover
    assert example.config == demo.config


@pytest.mark.parametrize(
    "name", ["grpo_arithmetic.py", "async_grpo.yaml", "ppo_critic.py", "fsdp_arithmetic.yaml"]
)
def test_an_example_on_arithmetic_trains(name: str, tmp_path: Path) -> None:
    changes = SMALL | CALLED
    with short_job(name, changes | {"roles.actor": {"total": 1}}, tmp_path) as job:
        result = job.result(timeout_s=DEADLINE_S)
        account = job.account()
    assert (result["steps"], account.trained, account.lost) == (2, 8, ())


def test_an_algorithm_of_ones_own_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss, its advantage and its graph are those that run: the loss's own metric is in every step."""
    monkeypatch.syspath_prepend(
        str(FOLDER)
    )  # one process plays all vertices, and none of them is started by path
    changes: dict[str, Any] = {
        **SMALL,
        "config.task": {"digits": 1},
        "config.model": SMALL["config.model"] | {"hidden": 48, "mlp": 96},
        "config.warm_start": {"max_steps": 80, "batch": 64, "lr": 1e-2, "slips": 0.3, "stop_at": 0.6},
        "config.sampling": {"n": 4},
        "run": SMALL["run"] | {"steps": 4, "prompts_per_step": 8, "evaluate_every": 0},
    }
    with short_job("own_algorithm.py", changes, tmp_path) as job:
        result = job.result(timeout_s=DEADLINE_S)
        with job.ledger() as ledger:
            steps = ledger.load().steps
    assert result["steps"] == 4
    assert all(0.0 < row.metrics["trust"] <= 1.0 for row in steps)
    assert len({row.digest for row in steps}) > 1, "some answers are right, and the weights move"


def test_the_custom_workload_arrives(tmp_path: Path) -> None:
    with short_job("custom_workload.py", {"config": {"rounds": 20}}, tmp_path) as job:
        assert job.result(timeout_s=DEADLINE_S)["distance"] < 0.5


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize(
    "name", ["grpo_gsm8k.yaml", "grpo_openr1_qwen3.yaml", "ppo_gsm8k.yaml", "lora_gsm8k.yaml"]
)
def test_an_example_on_a_data_set_trains_with_a_small_model_instead(name: str, tmp_path: Path) -> None:
    """Data set, chat template, tokenizer and mathematical reward as in the file; another actor and other rollouts."""
    pytest.importorskip("math_verify")
    from gyre.data.prepare import PromptRecipe, prepare
    from tests.data.small import write_lines, write_tokenizer

    tokenizer = write_tokenizer(tmp_path / "model")
    rows: list[dict[str, object]] = [
        {"problem": f"What is ${n}+{n}$?", "answer": str(2 * n), "uuid": f"u{n}"} for n in range(40)
    ]
    prepare(write_lines(tmp_path / "train.jsonl", rows), tmp_path / "train", tokenizer)
    data: dict[str, Any] = {"path": str(tmp_path / "train")}
    if "gsm8k" in name:
        questions: list[dict[str, object]] = [
            {"question": f"What is {n} less {n}?", "answer": "#### 0"} for n in range(4)
        ]
        prepare(
            write_lines(tmp_path / "test.jsonl", questions),
            tmp_path / "test",
            tokenizer,
            PromptRecipe(layout="gsm8k"),
        )
        data["held_out"] = str(tmp_path / "test")
    else:
        data["held_out_every"] = 3
    changes = SMALL | CALLED
    changes |= {"config.data": data, "config.reward": {"processes": 1, "timeout_s": 60.0}}
    changes |= {
        "roles.actor": {"entrypoint": None, "total": 1, "per_node": None},
        "roles.reward": {"total": 1},
    }
    changes |= {"config": {"model_path": ""}}
    if "lora" in name:  # an adapter stands beside a folder's model
        changes |= {"config": {"model_path": "", "lora": None, "loss": {"kl_loss_coef": 0.0}}}
    if "ppo" in name:
        changes |= {"roles.critic": {"entrypoint": None}}
    with short_job(name, changes, tmp_path / "job") as job:
        result = job.result(timeout_s=DEADLINE_S)
        account = job.account()
    assert (result["steps"], account.trained, account.lost) == (2, 8, ())
    assert result["accuracy_last"] is not None


# -- other machines ---------------------------------------------------------------------------------

FAKE_GYRE = """#!{python}
import json, os, pathlib, signal, sys, time
arguments = sys.argv[1:]
notice = pathlib.Path(arguments[arguments.index("--notice-file") + 1])
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append("SIGTERM"))
pathlib.Path(os.environ["TOLD"]).write_text(json.dumps(arguments))
until = time.monotonic() + 60
while time.monotonic() < until and not told and not notice.exists():
    time.sleep(0.02)
pathlib.Path(os.environ["TOLD"] + ".end").write_text(told[0] if told else "notice" if notice.exists() else "nothing")
sys.exit(0 if told or notice.exists() else 7)
"""


def spot(tmp_path: Path, **env: str) -> subprocess.Popen[bytes]:
    fake = tmp_path / "bin" / "gyre"
    fake.parent.mkdir()
    fake.write_text(FAKE_GYRE.format(python=sys.executable))
    fake.chmod(0o755)
    path = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [str(FOLDER / "spot_rollouts.sh"), "--tp-size", "2"],
        env={**os.environ, "PATH": path, "TOLD": str(tmp_path / "told"), "TOKEN": "t", **env},
    )


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)
    return path.read_text()


@pytest.mark.parametrize("how", ["SIGTERM", "notice"])
def test_a_spot_machine_hands_over_when_it_is_told_to_go(how: str, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    script = spot(tmp_path, MANAGER="http://10.0.0.5:7000", NOTICE=str(notice))
    try:
        arguments = json.loads(wait_for(tmp_path / "told"))
        assert arguments[:4] == ["join", "http://10.0.0.5:7000", "--token", "t"]
        assert arguments[-3:] == ["--", "--tp-size", "2"]
        if how == "SIGTERM":
            script.send_signal(signal.SIGTERM)
        else:
            notice.touch()
        assert script.wait(DEADLINE_S) == 0
    finally:
        script.kill()
        script.wait()
    assert wait_for(tmp_path / "told.end") == how
    assert not notice.exists()


def test_the_options_of_the_spot_script_are_those_of_join() -> None:
    from gyre.api.cli.instances import join

    known = {name for parameter in join.params for name in parameter.opts}
    line = re.search(r"^gyre join .*?&$", (FOLDER / "spot_rollouts.sh").read_text(), re.MULTILINE | re.DOTALL)
    assert line is not None
    assert set(re.findall(r" (--[a-z-]+)", line[0])) <= known


def test_the_images_hold_what_their_processes_import() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r"\.whl\)\[([a-z,-]+)\]", text)
    assert extras is not None
    assert set(extras[1].split(",")) <= project["optional-dependencies"].keys()
    passed_on = (ROOT / ".dockerignore").read_text().splitlines()
    sources = re.findall(r"^COPY ([^-].*) \S+$", text, re.MULTILINE)
    assert sources
    for source in sources:
        for name in source.split():
            assert (ROOT / name).exists(), name
            assert f"!{name}" in passed_on
    assert re.findall(r" AS (\w+)$", text, re.MULTILINE) == ["wheel", "trainer", "instance"]
    for stage in text.split("\nFROM ")[2:]:
        assert stage.index("\nUSER 1000") < stage.index("\nENTRYPOINT")
    installed = {name.lower() for name in re.findall(r"'([A-Za-z0-9-]+)>=", text.split(" AS instance")[1])}
    code = (
        "import sys, gyre.api.cli.instances, gyre.rollouts.agent.join, gyre.rollouts.agent.agent\n"
        "print(*{name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    imported = {"pyyaml" if name == "yaml" else name for name in found.stdout.split()}
    mine = {re.split(r"[><\[]", name)[0].lower() for name in project["dependencies"]}
    assert imported & mine <= installed
