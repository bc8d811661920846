"""The table of mistakes: what `gyre plan` says of each, in YAML and in a Python job file.

*plan is the judge*: one sentence with file and line, exit code 2, and no frame of Gyre's own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

import gyre.api.checks.code as code
from gyre.api.cli import OTHER_WORDS, VERBS, main
from gyre.api.home import Home
from tests.api.conftest import Seed
from tests.waits import GENEROUS_S

YAML = """\
name: table
recipe: grpo
config:
  task: {digits: 1}
  model: {layers: 1, hidden: 16, heads: 2, kv_heads: 1, mlp: 16, max_positions: 32}
  sampling: {n: 2, max_new_tokens: 8}
  optim: {lr: 0.001}
run:
  {steps: 2, prompts_per_step: 4, groups_per_firing: 2, groups_per_micro_batch: 2, evaluate_every: 2, held_out: 4}
roles:
  actor: {total: 2}
  rollout: {}
  reward: {}
"""

PYTHON = """\
from gyre.api import RLJobBuilder
import users_code

job = (
    RLJobBuilder()
    .recipe("grpo")
    .config({"task": {"digits": 1}, "optim": {"lr": 0.001}, "sampling": {"n": 2, "max_new_tokens": 8},
             "model": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16, "max_positions": 32}})
    .run(steps=2, prompts_per_step=4, groups_per_firing=2, groups_per_micro_batch=2, evaluate_every=2, held_out=4)
    .actor()
    .total(2)
    .rollout()
    .reward()
    .build()
)
"""

USERS = """\
from gyre.workloads import BaseTrainer, BaseWorkload
class NoFit(BaseTrainer): pass
class FitOfSteps(BaseTrainer):
    def fit(self, steps): ...
class NoScore(BaseWorkload): pass
class ScoreOfTwo(BaseWorkload):
    def score(self, groups, answers): return groups
class Later(BaseWorkload):
    async def score(self, groups): return groups
class Made(BaseWorkload):
    def __init__(self, size): ...
    def score(self, groups): return groups
class Good(BaseWorkload):
    def score(self, groups, *, step): return groups
class Thief(Good):
    SECTIONS = {"optim": object}
class NoneHeldOut:
    def __init__(self, config): ...
    def prompt(self, index):
        from gyre.rollouts import Group
        return Group(id=index, prompt_ids=[1, 2], meta={})
    def held_out(self, count): return []
class Half:
    def __init__(self, config): ...
    def prompt(self, index): ...
class Raises(NoneHeldOut):
    def __init__(self, config): raise KeyError("corpus")
def loss(logprobs, mask): ...
def advantage(group): ...
number = 3
"""

MODULES = {
    "users_code": USERS,
    "lacks": "import json\nimport no_such_library\n",
    "raises": "def f():\n    raise KeyError('k')\nf()\n",
    "leaves": "import os\nos._exit(3)\n",
    "hangs": "import time\ntime.sleep(600)\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the job file and the user's modules are, which is also where the command runs."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("gyre.api.checks.machine.has_gpu", lambda: False)
    monkeypatch.chdir(tmp_path)
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def plan(text: str, name: str = "job.yaml", *options: str) -> Result:
    Path(name).write_text(text)
    return CliRunner().invoke(main, ["plan", name, *options])


def line_in(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def refused(result: Result, where: str, sentence: str) -> None:
    assert result.exit_code == 2, result.output
    (verdict,) = result.stdout.splitlines()  # last, and alone where the error is on stderr
    assert verdict.startswith("No: ")
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {where}: "), error
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert "/gyre/" not in result.stderr.replace(sys.prefix, "").replace(str(Path.cwd()), "")


def test_the_jobs_of_the_table_are_in_order() -> None:
    for text, name in ((YAML, "job.yaml"), (PYTHON, "job.py")):
        result = plan(text, name, "--strict")
        assert (result.exit_code, result.stderr) == (0, "")


IN_YAML = {
    "a key of another section": ("recipe: grpo", "recipe: grpo\nsteps: 5", "steps: ", "did you mean 'run.steps'?"),
    "a section at the top": ("recipe: grpo", "recipe: grpo\noptim: {}", "optim: {}", "did you mean 'config.optim'"),
    "a typo of another section's key": ("recipe: grpo", "recipe: grpo\nstesp: 5", "stesp", "did you mean 'run.steps'?"),
    "a typo in a section": ("digits: 1", "digts: 1", "task:", "config.task.digts: unknown key; did you mean 'digits'?"),
    "an adapter": ("  optim:", "  lora: {rank: 8}\n  optim:", "lora:", "config.lora: given, but only FSDP2's"),
    "a typo of a section": ("  model:", "  modle:", "modle:", "config.modle: unknown key; did you mean 'model'?"),
    "a typo of a recipe": ("grpo", "gpro", "recipe", "recipe: 'gpro' is neither a known recipe"),
    "a key by its name elsewhere": ("  model:", "  model: {path: m}\n  critic:", "model: {path",
                                "did you mean 'config.model_path'?"),
    "another case": ("recipe: grpo", "recipe: GRPO", "recipe: GRPO", "did you mean 'grpo'?"),
    "groups that do not divide": ("groups_per_firing: 2, ", "groups_per_firing: 3, ", "{steps",
                                  "run.groups_per_firing: 3 does not divide run.prompts_per_step"),
    "a typo of a role": ("  reward:", "  rewrd:", "roles:", "did you mean 'rewrd'?"),
    "a key twice": ("lr: 0.001}", "lr: 0.001}\n  task: {}", "  task: {}\nrun", "'task' stands in line 4 already"),
    "a name with a space": ("name: table", "name: my table", "name", "expected at most 63 letters"),
    "a role with a space": ("  actor:", "  my actor:", "my actor", "expected at most 32 lower-case letters"),
    "no YAML": ("recipe: grpo", "recipe: grpo\n  x: 1", "x: 1", "is not YAML"),
    "a number that is none": ("lr: 0.001", "lr: fast", "optim", "config.optim.lr: 'fast' should be a valid number"),
    "no learning rate": ("lr: 0.001", "", "optim", "config.optim.lr: is missing"),
    "no prompts": ("  task: {digits: 1}\n", "", "config:", "config.data: is missing, so the job has no prompts"),
    "no model": ("  model: {layers: 1, hidden: 16, heads: 2, kv_heads: 1, mlp: 16, max_positions: 32}\n", "", "config:",
                 "is missing, so the actor has no model"),
    "groups of one": ("n: 2", "n: 1", "sampling", "config.sampling.n: 1 given, but grpo compares"),
    "samples that are all the same": ("n: 2", "n: 2, temperature: 0", "sampling", "nothing is learnt"),
    "answers beyond the model": ("tokens: 8", "tokens: 40", "sampling", "more than config.model.max_positions, 32"),
    "more held out than there is": ("held_out: 4", "held_out: 400", "{steps", "run.held_out: 400 given, but"),
    "an indivisible total": ("total: 2", "total: 2, per_node: 3", "actor", "2 is not divisible by per_node (3)"),
    "an indivisible step": ("prompts_per_step: 4", "prompts_per_step: 5", "{steps", "does not divide"),
    "too few devices": ("name: table", "name: table\nnode_num: 1\ndevice_per_node: 2", "roles:", "required 4 devices"),
    "a GPU that is not there": ("name: table", "name: table\ndevice_type: GPU", "device_type", "this machine has none"),
    "an engine that is not there": ("name: table", "name: table\nrollouts: {engine: sglang}", "rollouts",
                                    "rollouts.engine: sglang given, but it is not installed"),
    "a folder by a relative path": ("name: table", "name: table\nrollouts: {door: {policy_folders: [x]}}", "rollouts",
                                    "has 'x', which is no absolute path"),
    "a Python that is not there": ("name: table", "name: table\nrollouts: {engine: sglang, engine_python: /no/python}",
                                   "rollouts", "/no/python is no program"),
    "more cores than there are": ("{total: 2}", "{total: 2, resources: {cpu: 9999}}", "actor", "actor required"),
    "an address of another machine": ("name: table", "name: table\nweights: {bind: 192.0.2.77}", "weights", "has not"),
    "too few ports": ("name: table", "name: table\nnode_num: 1\nweights: {ports: 7100}", "weights", "give 2"),
    "no certificate": ("name: table", "name: table\nrollouts: {tls_cert: a, tls_key: b}", "rollouts", "not a cert"),
    "a pool's engine": ("  reward:", "  rollout_spot: {pool: {engine: sglang}}\n  reward:", "rollout_spot",
                        "roles.rollout_spot.pool.engine: sglang given"),
    "data that are not there": ("digits: 1}", "digits: 1}\n  data: {path: nowhere}", "data:", "is no prepared data"),
    "a home that has it not": ("digits: 1}", "digits: 1}\n  data: {path: ~/nowhere-at-all}", "data:",
                               f"config.data.path: {Path.home()}/nowhere-at-all is no prepared"),
    "a configuration that is not there": (YAML[YAML.index("config:"):YAML.index("run:")], "config: none.yaml\n", "",
                                          "none.yaml: cannot be read"),
    "nobody to notify": ("name: table", "name: table\nobserve: {notify: [{on: [end]}]}", "observe",
                         "says nobody to tell"),
    "two to notify as one": ("name: table", "name: table\nobserve: {notify: [{webhook: 'http://a', command: [b]}]}",
                             "observe", "give each an entry of its own"),
    "an address that is none": ("name: table", "name: table\nobserve: {notify: [{webhook: slack}]}", "observe",
                                "'slack' is no address"),
    "news that there are not": ("name: table", "name: table\nobserve: {notify: [{webhook: $A, on: [ends]}]}", "observe",
                                "did you mean 'end'?"),
    "a command that is none": ("name: table", "name: table\nobserve: {notify: [{command: []}]}", "observe",
                               "says nobody to tell"),
    "a command of the folder": ("name: table", "name: table\nobserve: {notify: [{command: [./tell]}]}", "observe",
                                "is a relative path"),
    "a command that is not there": ("name: table", "name: table\nobserve: {notify: [{command: [no-such-tell]}]}",
                                    "observe", "no-such-tell is no program of this machine"),
    "a sink without a collector": ("name: table", "name: table\nobserve: {sinks: [otlp]}", "observe",
                                   "observe.sinks: otlp has no collector"),
    "a collector that is none": ("name: table", "name: table\nobserve: {sinks: [{kind: otlp, to: 'c:43'}]}", "observe",
                                 "'c:43' is no address of a collector"),
    "a variable that is not set": ("name: table", "name: table\nobserve: {notify: [{webhook: $NO_HOOK}]}", "observe",
                                   "observe.notify.0: $NO_HOOK is not set"),
    "a variable that is no address": ("name: table", "name: table\nenv: {A: x}\nobserve: {notify: [{webhook: $A}]}",
                                      "observe", "$A is set to what is no address"),
    "a header that is none": ("name: table",
                              "name: table\nobserve: {notify: [{webhook: 'http://a', headers: {'a b': c}}]}",
                              "observe", "has 'a b', which is no name of a header"),
    "a recipe that lacks a module": ("recipe: grpo", "recipe: 'lacks:R'", "recipe", "'no_such_library'"),
}  # fmt: skip
"""By mistake: what stands in the YAML, what instead of it, a text whose line is named, and a part of the sentence."""


@pytest.mark.parametrize("mistake", IN_YAML)
def test_a_mistake_in_yaml_is_a_sentence_with_its_line(mistake: str) -> None:
    before, after, at, sentence = IN_YAML[mistake]
    assert YAML.count(before), "the table is out of date"
    text = YAML.replace(before, after, 1)
    result = plan(text)
    if at:
        refused(result, f"job.yaml, line {line_in(text, at)}", sentence)
    else:
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert sentence in result.stderr


IN_PYTHON = {
    "a typo of a method": (".rollout()", ".rolout()", ".rolout()", "did you mean 'rollout'?"),
    "a module that is not there": ("import users_code", "import user_code", "import user_code", "No module named"),
    "a module that raises": ("import users_code", "import raises", "import raises", "raises.py, line 2: KeyError: 'k'"),
    "an exception": ("job = (", "{}['k']\njob = (", "{}['k']", "KeyError: 'k'"),
    "no Python": ("job = (", "job = ((", "job = (", "SyntaxError: '(' was never closed"),
    "no job": ("job = (", "jb = (", "jb = (", "defines no job, but jb."),
    "a wrong value": (".total(2)", ".total(0)", ".total(0)", "roles.actor.total: 0 should be greater"),
    "an indivisible total": (".total(2)", ".total(2).per_node(3)", ".total(2)", "is not divisible by per_node (3)"),
    "too few devices": (".build()", ".node_num(1).device_per_node(2).build()", "", "required 4 devices"),
    "a typo of a recipe": ('"grpo"', '"gpro"', '"gpro"', "did you mean 'grpo'?"),
    "a typo of a key": ("steps=2", "stepz=2", "stepz", "run.stepz: unknown key; did you mean 'steps'?"),
    "a typo in a section": ('"digits"', '"digts"', ".config(", "config.task.digts: unknown key"),
    "no learning rate": ('"lr": 0.001', "", ".config(", "config.optim.lr: is missing"),
    "groups of one": ('"n": 2', '"n": 1', ".config(", "config.sampling.n: 1 given"),
    "a GPU that is not there": (".build()", ".device_type('GPU').build()", ".device_type", "this machine has none"),
    "a class without its method": (".reward()", ".reward(users_code.NoScore)", ".reward(", "has no score()"),
    "a class by a wrong name": (".reward()", ".reward('users_code:Goood')", ".reward(", "did you mean 'Good'?"),
    "an edge to nobody": (".build()", ".connect('actor', 'nobody').build()", ".connect", "'nobody' is not a role"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", IN_PYTHON)
def test_a_mistake_in_a_python_file_is_a_sentence_with_its_line(mistake: str) -> None:
    before, after, at, sentence = IN_PYTHON[mistake]
    assert PYTHON.count(before), "the table is out of date"
    text = PYTHON.replace(before, after, 1)
    result = plan(text, "job.py")
    where = f"job.py, line {line_in(text, at)}" if at else "job.py, line 13"
    refused(result, where, sentence)


# -- the user's own code, imported apart ------------------------------------------------------------

OF_CODE = {
    "a module that is not there": ("reward", "no_such_module:X", "module no_such_module does not import"),
    "a module that lacks one": ("reward", "lacks:X", "lacks.py, line 2: ModuleNotFoundError"),
    "a file that is not there": ("reward", "nowhere.py:X", "nowhere.py: no such file"),
    "a class that is not there": ("reward", "users_code:Goood", "did you mean 'Good'?"),
    "a class of Gyre's that is not there": ("actor", "gyre.workloads.torch:TorchActr", "did you mean 'TorchActor'?"),
    "no class": ("reward", "users_code:number", "is a int, expected a class"),
    "a trainer without fit": ("trainer", "users_code:NoFit", "has no fit(), which its role needs"),
    "a fit that wants more": ("trainer", "users_code:FitOfSteps", "cannot be called as fit(self): missing"),
    "a reward without score": ("reward", "users_code:NoScore", "has no score(), which recipe 'grpo' calls"),
    "a score that wants more": ("reward", "users_code:ScoreOfTwo", "users_code.py, line 7) cannot be called as score("),
    "a score that is async": ("reward", "users_code:Later", "Later.score() ("),
    "a class that wants arguments": ("reward", "users_code:Made", "Made(size)"),
    "a section of Gyre's": ("reward", "users_code:Thief", "Thief.SECTIONS names 'optim'"),
}  # fmt: skip
"""By mistake: a role, its class, and a part of the sentence."""


@pytest.mark.parametrize("mistake", OF_CODE)
def test_code_of_the_users_is_looked_into(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_examined_apart", _here)
    role, name, sentence = OF_CODE[mistake]
    text = YAML.replace(f"  {role}:", f"  {role}_:", 1) if f"  {role}:" in YAML else YAML
    text = text.replace("roles:\n", f"roles:\n  {role}: {{entrypoint: '{name}'}}\n")
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(f"  {role}_:"))
    refused(plan(text), f"job.yaml, line {line_in(text, name)}", sentence)


PLUGINS = {
    "a loss whose module raises": ("  optim:", "  loss: {loss_mode: 'raises:loss'}\n  optim:", "raises.py, line 2"),
    "prompts of a file": ("run:\n  {", "run:\n  {data: 'users_code.py:Half', ", "expected \"module:Class\""),
    "prompts without a class": ("run:\n  {", "run:\n  {data: users_code, ", "expected \"module:Class\""),
    "prompts without held-out ones": ("run:\n  {", "run:\n  {data: 'users_code:NoneHeldOut', ", "holds no prompt out"),
    "prompts without a method": ("run:\n  {", "run:\n  {data: 'users_code:Half', ", "has no held_out()"),
    "prompts that raise": ("run:\n  {", "run:\n  {data: 'users_code:Raises', ", "KeyError: 'corpus'"),
    "a loss": ("  optim:", "  loss: {loss_mode: 'users_code:loss'}\n  optim:", "cannot be called as loss(logprobs"),
    "an advantage": ("  optim:", "  loss: {adv_estimator: 'users_code:advantage'}\n  optim:", "advantage(group,"),
    "a staleness policy": ("run:\n  {", "staleness: {policy: 'users_code:nobody'}\nrun:\n  {micro_batches: streamed, ",
                           "has no function 'nobody'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", PLUGINS)
def test_plug_ins_and_prompts_of_the_users_are_looked_into(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "_examined_apart", _here)
    before, after, sentence = PLUGINS[mistake]
    text = YAML.replace(before, after, 1)
    result = plan(text)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert ", line " in result.stderr.partition(": ")[2].partition(": ")[0]


def _here(spec: object, *, graph_alone: bool = False) -> list[str]:
    """As in the process apart, which takes most of a second to start."""
    from gyre.api.checks.examine import examine, import_graph
    from gyre.config import JobSpec

    assert isinstance(spec, JobSpec)
    return import_graph(spec, lambda text: None) if graph_alone else examine(spec)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("hangs:X", "module hangs did not import within 0.5 s"),
        ("leaves:X", "module leaves ended its process with exit code 3"),
        ("users_code:ScoreOfTwo", "cannot be called as score(groups)"),
        ("users_code:Good", ""),
    ],
)
def test_an_import_neither_hangs_nor_ends_the_plan(
    name: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "IMPORT_S", 0.5 if name.startswith("hangs") else 60.0)
    text = YAML.replace("reward: {}", f"reward: {{entrypoint: '{name}'}}")
    result = plan(text)
    assert not {"hangs", "leaves", "users_code"} & sys.modules.keys()
    if sentence:
        refused(result, "job.yaml, line 13", sentence)
    else:
        assert (result.exit_code, result.stderr) == (0, "")


def test_a_module_that_is_elsewhere_is_a_note_for_a_job_that_runs_elsewhere() -> None:
    text = YAML.replace("reward: {}", "reward: {entrypoint: 'lacks:X'}")
    result = plan(text, "job.yaml", "--ray-address", "head:6379", "--strict")
    assert result.exit_code == 0
    assert result.stderr.startswith("note: roles.reward.entrypoint: module lacks does not import")


def test_a_job_of_gyres_own_classes_is_planned_without_torch_or_ray_or_another_process() -> None:
    Path("job.yaml").write_text(YAML)
    program = (
        "import subprocess, sys\nfrom gyre.api.cli import main\nsubprocess.Popen = None\n"
        "try:\n    main(['plan', 'job.yaml'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print([name for name in ('torch', 'ray', 'numpy', 'sqlalchemy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1:] == ["[]"], done


# -- warnings and notes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "warning"),
    [
        ("evaluate_every: 2", "evaluate_every: 0", "no held-out evaluation: run.evaluate_every is 0"),
        ("evaluate_every: 2", "evaluate_every: 3", "no held-out evaluation but the first"),
        ("n: 2", "n: 1", "config.sampling.n: 1 given, so there are no other samples for rloo's baseline"),
        ("lr: 0.001", "lr: 0.001, warmup_steps: 9", "config.optim.warmup_steps: 9 given"),
        ("lr: 0.001", "lr: 1.0", "config.optim.lr: 1 is beyond"),
        ("lr: 0.001", "lr: 0.001, decay_steps: 1, final_lr_ratio: 0", "from step 1 on of 2 the learning rate is 0"),
    ],
)  # fmt: skip
def test_a_warning_is_refused_by_strict_alone(before: str, after: str, warning: str) -> None:
    text = YAML.replace(before, after).replace("grpo", "rloo")
    assert plan(text).exit_code == 0
    strict = plan(text, "job.yaml", "--strict", "--json")
    first, last = strict.stderr.splitlines()[0], strict.stderr.splitlines()[-2]
    assert first.startswith("warning: ")
    assert warning in first
    assert last == "error: job.yaml: 1 warning, which --strict does not permit."
    assert strict.exit_code == 2
    assert warning in strict.stdout


def test_a_note_is_no_warning() -> None:
    text = YAML.replace("name: table", "name: table\ndevice_type: GPU\nnode_num: 3\ndevice_per_node: 8")
    result = plan(text, "job.yaml", "--strict", "--json")
    assert result.exit_code == 0, result.output
    assert "note: device_type: GPU given" in result.stderr
    assert '"warnings": []' in result.stdout
    assert '"notes": [' in result.stdout


# -- the other verbs, and --debug -------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["run", "submit"])
@pytest.mark.parametrize("late", [False, True], ids=["the file", "the user's code"])
def test_run_and_submit_say_what_plan_says(verb: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_examined_apart", _here)
    monkeypatch.setattr("gyre.api.submit.prepare_local", lambda *_: None)
    monkeypatch.setattr("gyre.api.submit.connect", lambda *_, **__: pytest.fail("a cluster was taken"))
    before, after = ("reward: {}", "reward: {entrypoint: 'users_code:NoScore'}") if late else ("n: 2", "n: 1")
    said = plan(YAML.replace(before, after)).stderr
    result = CliRunner().invoke(main, [verb, "job.yaml"])
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(("place", "named"), [("nowhere", True), ("/nowhere", False)])
def test_a_relative_path_that_leads_nowhere_says_where_it_was_looked_up(place: str, named: bool) -> None:
    result = plan(YAML.replace("digits: 1}", f"digits: 1}}\n  data: {{path: {place}}}"))
    assert result.exit_code == 2
    assert (str(Path.cwd()) in result.stderr) is named


def test_an_override_is_named_instead_of_a_line() -> None:
    result = plan(YAML, "job.yaml", "--set", "config.optim.lr=fast")
    refused(result, "--set config.optim.lr=fast", "config.optim.lr: 'fast'")


@pytest.mark.parametrize("arguments", [["--debug", "plan"], ["plan", "--debug"]])
def test_debug_shows_every_frame(arguments: list[str]) -> None:
    Path("job.py").write_text(PYTHON.replace(".total(2)", ".total(0)"))
    result = CliRunner().invoke(main, [*arguments, "job.py"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "builder.py" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: job.py, line 11: ")


def test_frames_of_the_users_own_come_before_the_sentence() -> None:
    result = plan(PYTHON.replace("import users_code", "import raises"), "job.py")
    assert [line.rpartition("/")[2] for line in result.stderr.splitlines()[:3]] == [
        "job.py, line 2, in <module>: import raises",
        "raises.py, line 3, in <module>: f()",
        "raises.py, line 2, in f: raise KeyError('k')",
    ]


# -- words that others use --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "verb"),
    [("train", "run"), ("describe", "show"), ("abort", "stop"), ("new", "init"), ("validate", "plan"), ("pln", "plan")],
)  # fmt: skip
def test_a_word_of_another_tool_names_the_verb(word: str, verb: str) -> None:
    result = CliRunner().invoke(main, [word])
    assert result.exit_code == 2
    assert f"There is no verb {word!r}; did you mean {verb!r}?" in result.stderr


def test_every_other_word_leads_to_a_verb() -> None:
    assert set(OTHER_WORDS.values()) <= {*VERBS, "--{}"}


def test_logs_of_a_role_that_is_not_there(seed: Seed, home: Home) -> None:
    seed("rollout_lost")
    result = CliRunner().invoke(main, ["logs", "--role", "rewrd"])
    assert result.exit_code == 4
    assert result.stderr == "error: Job golden-1 has no role 'rewrd'; did you mean 'reward'?\n"


def test_a_plan_that_is_killed_leaves_no_process(folder: Path) -> None:
    """Its import never returns, and has started a process in a session of its own."""
    (folder / "starts.py").write_text(
        "import os, subprocess, sys, time\n"
        "sleep = [sys.executable, '-S', '-c', 'import time; time.sleep(600)']\n"
        "other = subprocess.Popen(sleep, start_new_session=True)\n"
        "open('pids.part', 'w').write(f'{os.getpid()} {other.pid}')\n"
        "os.rename('pids.part', 'pids')\n"
        "time.sleep(600)\n"
    )
    Path("job.yaml").write_text(YAML.replace("reward: {}", "reward: {entrypoint: 'starts:Own'}"))
    planning = subprocess.Popen([sys.executable, "-m", "gyre.api", "plan", "job.yaml"])
    until = time.monotonic() + GENEROUS_S
    while not Path("pids").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    started = [psutil.Process(int(pid)) for pid in Path("pids").read_text().split()]
    planning.kill()
    planning.wait()
    _, left = psutil.wait_procs(started, timeout=GENEROUS_S)
    assert left == []
