"""Jobs from files: YAML, Python, overrides, and what is wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gyre.api.definition.jobfile import load_job_file
from gyre.errors import ConfigError

YAML = """
name: from-yaml
recipe: grpo
device_type: gpu
config: config.yaml
python_path: code
roles:
  actor:
    total: 2
    resources: {memory_bytes: 2GiB}
  rollout:
    entrypoint: mine.rollout:Rollout
  reward:
    entrypoint: script.py:Reward
"""

PYTHON = """
from gyre.api import RLJobBuilder
class Trainer:
    def fit(self): ...
job = RLJobBuilder().trainer(Trainer).actor("m", "A").total(2)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "config.yaml").write_text("lr: 0.1\n")
    (tmp_path / "job.yaml").write_text(YAML)
    (tmp_path / "job.py").write_text(PYTHON)
    return tmp_path.resolve()


def test_yaml_job(folder: Path) -> None:
    spec = load_job_file(folder / "job.yaml").spec
    assert (spec.name, spec.device_type, spec.config) == ("from-yaml", "GPU", {"lr": 0.1})
    assert spec.roles["actor"].resources.memory_bytes == 2 * 2**30
    assert str(spec.roles["rollout"].entrypoint) == "mine.rollout:Rollout"
    assert str(spec.roles["reward"].entrypoint) == f"{folder}/script.py:Reward"
    assert spec.python_path[:2] == [str(folder / "code"), str(folder)]


def test_python_job(folder: Path) -> None:
    path = list(sys.path)
    job = load_job_file(folder / "job.py")
    entrypoint = job.spec.roles["trainer"].entrypoint
    assert entrypoint is not None
    assert (entrypoint.name, entrypoint.file) == ("Trainer", str(folder / "job.py"))
    assert job.spec.roles["actor"].total == 2
    assert job.spec.python_path == [str(folder)]
    assert sys.path == path


@pytest.mark.parametrize(
    "tail",
    [
        "job = _b",
        "job = _b.build()",
        "job = _b.build().spec",
        "def job(): return _b",
        "def job(): return _b.build()",
        "job = lambda: _b.end()",
    ],
)
def test_ways_to_give_a_job(tail: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        f"from gyre.api import RLJobBuilder\n_b = RLJobBuilder().trainer('m', 'T')\n{tail}\n"
    )
    assert list(load_job_file(tmp_path / "job.py").spec.roles) == ["trainer"]


@pytest.mark.parametrize("name", ["job.yaml", "job.py"])
def test_overrides_go_over_the_file(name: str, folder: Path) -> None:
    spec = load_job_file(
        folder / name,
        [
            "roles.actor.total=3",
            "config.lr=0.5",
            "run.steps=7",
            "roles.rollout.entrypoint=m:R",
            "roles.rollout.elastic.min=1",
            "roles.rollout.elastic.max=2",
        ],
    ).spec
    assert (spec.roles["actor"].total, spec.config["lr"], spec.run.steps) == (3, 0.5, 7)
    assert spec.roles["rollout"].elastic is not None
    assert spec.roles["rollout"].elastic.max == 2


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.yaml", "roels: {}", ["a.yaml, line 1: roels: unknown key; did you mean 'roles'?"]),
        ("a.yaml", "roles: {actor: {totl: 2}}", ["roles.actor.totl: unknown key; did you mean 'total'?"]),
        ("a.yaml", "roles: {env: {totl: 2}}", ["roles.env.totl: unknown key; did you mean 'total'?"]),
        (
            "a.yaml",
            "edges: [{source: a, target: b, dely: 1}]",
            ["edges.0.dely: unknown key; did you mean 'delay'?"],
        ),
        ("a.yaml", "roles: {actor: 3}", ["roles.actor: 3"]),
        (
            "a.yaml",
            "roles: {actor: {entrypoint: nonsense}}",
            ["roles.actor.entrypoint: 'nonsense' expected the class"],
        ),
        (
            "a.yaml",
            "roles: {actor: {total: 0}, rollout: {total: x}}",
            ["roles.actor.total: 0", "roles.rollout.total: 'x'"],
        ),
        ("a.yaml", "a: [", ["a.yaml, line 1: is not YAML: "]),
        ("a.yaml", "1: x", ["a.yaml, line 1: 1: a key of type int, expected text"]),
        ("a.yaml", "name: x\nroles:", ["a.yaml, line 2: roles: nothing given, expected a mapping"]),
        ("a.py", "raise ValueError('a\\nb')", ["a.py, line 1: ValueError: a b."]),
        ("a.yaml", "- 1", ["a.yaml, line 1: holds a list"]),
        ("a.yaml", "config: none.yaml", ["none.yaml: cannot be read"]),
        ("a.toml", "", ["a.toml: ends in '.toml', expected .yaml"]),
        ("a.py", "x = 1\njob = 1 / 0\n", ["a.py, line 2: ZeroDivisionError: division by zero"]),
        ("a.py", "x = 1\n\njob = = 2\n", ["a.py, line 3: SyntaxError: invalid syntax"]),
        (
            "a.py",
            "def f():\n    raise KeyError('k')\n\ndef job():\n    f()\n",
            ["a.py, line 2: KeyError: 'k'"],
        ),
        ("a.py", "raise SystemExit('no')\n", ["a.py, line 1: SystemExit: no"]),
        (
            "a.py",
            "from gyre.api import RLJobBuilder\njob = (\n    RLJobBuilder()\n    .node_num(0)\n)\n",
            ["a.py, line ", "node_num: 0"],
        ),
        ("a.py", "x = 1\n", ["a.py: defines no job.", "Name it `job`"]),
        (
            "a.py",
            "from gyre.api import RLJobBuilder\nmine = RLJobBuilder()\n",
            ["a.py, line 2: defines no job"],
        ),
        ("a.py", "job = {}\n", ["`job` is a mapping, expected an RLJob"]),
        ("a.py", "def job(): return 3\n", ["`job` is of type int, expected an RLJob"]),
    ],
)
def test_mistake_in_a_file_is_a_sentence(name: str, text: str, parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_job_file(file)
    for part in parts:
        assert part in str(raised.value)


def test_file_that_is_not_there_names_the_nearest(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"jb.yaml: no such file; did you mean 'job.yaml'\?"):
        load_job_file(folder / "jb.yaml")


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("nothing", "expected KEY=VALUE"),
        ("roles.actr.totl=1", "roles.actr.totl"),
        ("name.x=1", "has no keys below it"),
    ],
)
def test_wrong_override_is_a_sentence(override: str, part: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=part):
        load_job_file(folder / "job.yaml", [override])
