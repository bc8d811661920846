"""What a user brings by an import path or an entry point, one of each kind; no file of Gyre's knows them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gyre.api import RLJobBuilder
from gyre.api.checks import check_plugins
from gyre.config import parse_job, plugins
from gyre.config.job_plugins import plugins_of
from gyre.config.sections import LossSettings, WorkloadSettings, read_section
from gyre.engines.process import EngineProcess
from gyre.errors import ConfigError, GraphError
from gyre.graph import compile_job
from gyre.rollouts.agent.join import EngineCommands
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.weights.codecs.brought import bring
from gyre.weights.codecs.encoding import decode, encode, is_known
from gyre.weights.version.manifest import WeightMismatch
from gyre.workloads.algorithms.advantages import advantages_of
from gyre.workloads.algorithms.losses import metrics_of, policy_loss_of
from gyre.workloads.tasks.task import task_of
from tests.engines.tiny_model import write_tiny_model

OWN = "tests.workloads.own_plugins"
ROLES: dict[str, Any] = {"actor": {}, "rollout": {}, "reward": {}}


def spec(**keys: Any) -> Any:
    return parse_job({"recipe": "grpo", "roles": ROLES, **keys})


def group(*lengths: int) -> Group:
    samples = [
        Sample(np.zeros(n, np.int32), np.zeros(n, np.float32), (VersionRun(0, 0, n),), reward=float(n > 2))
        for n in lengths
    ]
    return Group(1, np.zeros(2, np.int32), samples=samples)


# -- the registry -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", plugins.KINDS, ids=lambda kind: kind.noun)
def test_a_name_is_built_in_an_import_path_or_refused_with_the_nearest(kind: plugins.PluginKind) -> None:
    for name in (*kind.built_in, "my_package.module:Name"):
        assert kind.check(name) == name
    for last in [*kind.built_in][-1:]:
        with pytest.raises(ValueError, match=f"did you mean '{last}'"):
            kind.check(last + "x")
    for name in ("no such", "module.Name", "module:", ":Name", "module:Na me"):
        with pytest.raises(ValueError, match="import path"):
            kind.check(name)


@pytest.mark.parametrize("kind", plugins.KINDS, ids=lambda kind: kind.noun)
def test_an_installed_package_names_its_own_by_an_entry_point(
    kind: plugins.PluginKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "short_names-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: short-names\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{kind.group}]\nshort = {OWN}:deflate\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins._installed.cache_clear()
    try:
        assert kind.check("short") == "short"
        assert type(kind.load("short")).__name__ == "Deflate"
        with pytest.raises(ValueError, match="did you mean 'short'"):
            kind.check("shortt")
    finally:
        plugins._installed.cache_clear()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "no_such_module:loss",
            r"config\.loss\.loss_mode: .*no_such_module does not import: ModuleNotFoundError",
        ),
        (f"{OWN}:squarde", rf"module {OWN} has no 'squarde'\. Did you mean 'squared'"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plugins.LOSS.load(name)


def test_folders_of_the_job_are_imported_from_and_left_again(tmp_path: Path) -> None:
    (tmp_path / "only_there_for_a_test.py").write_text("thing = 7\n")
    before = list(sys.path)
    assert plugins.LOSS.load("only_there_for_a_test:thing", [str(tmp_path)]) == 7
    assert sys.path == before


# -- at submit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"config": {"loss": {"loss_mode": f"{OWN}:RECIPE"}}}, r"loss_mode: .* is a Recipe, expected a loss"),
        (
            {"config": {"loss": {"loss_mode": f"{OWN}:squared", "loss_options": {"scael": 1}}}},
            r"loss_options\.scael: .*takes no such option; did you mean 'scale'",
        ),
        (
            {"config": {"loss": {"adv_estimator": f"{OWN}:by_length", "adv_options": {"token": True}}}},
            r"adv_options\.token: .*takes no such option",
        ),
        ({"config": {"task": {"name": f"{OWN}:Deflate"}}}, r"config\.task\.name: .* has no prompt\(\)"),
        ({"observe": {"sinks": [f"{OWN}:Deaf"]}}, r"observe\.sinks: .*Deaf has no step\(\)"),
        ({"observe": {"sinks": [f"{OWN}:HalfTold"]}}, r"HalfTold has one of incident\(\) and ended\(\)"),
        (
            {"observe": {"sinks": [{"kind": f"{OWN}:Silent", "options": {"prefx": "x"}}]}},
            r"observe\.sinks: .*prefx",
        ),
        ({"weights": {"codec": f"{OWN}:Letters"}}, r"weights\.codec: .* has no encode\(\)"),
        ({"rollouts": {"engine": "no_such_module:engine"}}, r"rollouts\.engine: .*does not import"),
    ],
)
def test_what_is_not_what_it_is_to_be_is_told_at_submit(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_plugins(compile_job(spec(**keys)).spec)


def test_a_job_of_the_users_own_plug_ins_is_checked_whole() -> None:
    job = spec(
        config={
            "loss": {"loss_mode": f"{OWN}:squared", "adv_estimator": f"{OWN}:by_length"},
            "task": {"name": f"{OWN}:Letters", "options": {"letters": "xyz"}},
        },
        rollouts={"engine": f"{OWN}:engine"},
        weights={"codec": f"{OWN}:deflate"},
        backend=f"{OWN}:BACKEND",
        observe={"sinks": [{"kind": f"{OWN}:Silent", "options": {"prefix": "x"}}]},
    ).model_copy(update={"recipe": f"{OWN}:RECIPE"})
    compiled = compile_job(job).spec
    of_agents = {plugins.AGENT, plugins.ENVIRONMENT}  # of jobs with that role: tests/agents/test_plan.py
    assert {kind for kind, _ in plugins_of(compiled)} == {*plugins.KINDS} - of_agents
    check_plugins(compiled)


# -- a loss -----------------------------------------------------------------------------------------------


def test_a_loss_of_ones_own_is_the_one_that_is_minimised() -> None:
    settings = LossSettings(loss_mode=f"{OWN}:squared", loss_options={"scale": 3.0})
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    advantages, mask = torch.tensor([[1.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    found = policy_loss_of(settings)(logprobs, advantages, mask, settings, rows=None, norm_length=1.0)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(3.0 * (4.0 + 4.0))
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-12.0, -12.0]]
    assert metrics_of(settings) == ("gap",)
    assert settings.needs_every_sample


@pytest.mark.parametrize("options", ["loss_options", "adv_options"])
def test_what_is_built_in_takes_no_options(options: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.loss: {options} are given"):
        read_section(LossSettings, {"loss": {options: {"a": 1}}}, "loss")


# -- an advantage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, [[2.0, 2.0], [3.0, 3.0, 3.0]]), ({"per_token": True}, [[0.0, 1.0], [0.0, 1.0, 2.0]])],
)
def test_an_advantage_of_ones_own_is_a_number_or_token_by_token(
    options: dict[str, Any], expected: list[list[float]]
) -> None:
    settings = LossSettings(adv_estimator=f"{OWN}:by_length", adv_options=options)
    found = advantages_of([group(2, 3)], settings)
    assert [one.tolist() for one in found] == expected
    assert {one.dtype for one in found} == {np.dtype(np.float32)}


def test_too_few_advantages_are_refused() -> None:
    with pytest.raises(ValueError, match="gave 1 advantages for the 2 samples of group 1"):
        advantages_of([group(2, 3)], LossSettings(adv_estimator=f"{OWN}:too_few"))


# -- a recipe and a back end ------------------------------------------------------------------------------


def test_a_recipe_of_ones_own_brings_its_graph_and_its_loss() -> None:
    own = compile_job(spec().model_copy(update={"recipe": f"{OWN}:RECIPE"}))
    assert own.dcg.edges == compile_job(spec()).dcg.edges
    assert WorkloadSettings.read(own.spec.config).loss.loss_mode == f"{OWN}:squared"
    with pytest.raises(GraphError, match="is of type Deflate, expected a Recipe"):
        compile_job(spec().model_copy(update={"recipe": f"{OWN}:deflate"}))
    with pytest.raises(GraphError, match="did you mean 'grpo'"):
        compile_job(spec().model_copy(update={"recipe": "grop"}))


def test_the_builder_takes_a_recipe_by_its_path_and_finds_its_folder() -> None:
    builder = RLJobBuilder().recipe(f"{OWN}:RECIPE").actor().rollout().reward()
    assert builder.build().spec.python_path == [str(Path(__file__).parents[2])]


@pytest.mark.parametrize(
    ("backend", "path", "actor", "reference", "given_first"),
    [
        (None, "", "TorchActor", "TorchReference", True),
        ("torch", "", "TorchActor", "TorchReference", True),
        ("megatron", "", "MegatronActor", "TorchReference", True),
        ("megatron", "models/8b", "MegatronActor", "MegatronReference", False),
        (f"{OWN}:BACKEND", "", "Actor", "Reference", True),
        (f"{OWN}:BACKEND", "models/8b", "Actor", "Reference", False),
    ],
)
@pytest.mark.parametrize("actor_last", [False, True])
def test_a_back_end_fills_the_roles_that_the_job_leaves_open(
    backend: str | None, path: str, actor: str, reference: str, given_first: bool, actor_last: bool
) -> None:
    roles = {"reference": {}, **ROLES} if actor_last else {**ROLES, "reference": {}}
    config = {"megatron": {"model_path": path}}
    compiled = compile_job(spec(backend=backend, roles=roles, config=config))
    names = {name: role.entrypoint.name for name, role in compiled.spec.roles.items() if role.entrypoint}
    assert (names["actor"], names["reference"]) == (actor, reference)
    assert names["reward"] == "ExactMatchReward"
    assert compiled.dcg.operator("reference.logprobs").initial_policy == given_first


def test_a_class_that_the_job_names_goes_before_its_back_end() -> None:
    compiled = compile_job(
        spec(backend=f"{OWN}:BACKEND", roles={**ROLES, "actor": {"entrypoint": "mine:Own"}})
    )
    assert str(compiled.spec.roles["actor"].entrypoint) == "mine:Own"


# -- a task -----------------------------------------------------------------------------------------------


def test_a_task_of_ones_own_is_the_workloads_task() -> None:
    task = task_of({"task": {"name": f"{OWN}:Letters", "options": {"letters": "xyz"}}})
    assert task.prompt(1).meta["answer"] == "y"
    assert task.prompt_text(task.prompt(2)) == "z"


def test_the_arithmetic_tasks_settings_are_not_another_tasks() -> None:
    with pytest.raises(ConfigError, match="digits is a setting of a built-in task"):
        task_of({"task": {"name": f"{OWN}:Letters", "digits": 2}})


# -- an engine --------------------------------------------------------------------------------------------


async def test_an_engine_of_ones_own_is_started_and_answers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model(folder, seed=1)
    commands = EngineCommands(f"{OWN}:engine", max_running=3, kv_tokens=512)
    command = commands.command(folder, "4")
    assert command.argv[command.argv.index("--max-running-requests") + 1] == "3"
    async with EngineProcess(command, ready_within_s=90.0, stop_within_s=5.0) as engine:
        assert engine.url.startswith("http://127.0.0.1:")


def test_an_engine_that_is_no_command_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="returned a str, expected an EngineCommand"):
        EngineCommands(f"{OWN}:no_engine", max_running=3, kv_tokens=512).command(tmp_path, "1")


# -- a codec ----------------------------------------------------------------------------------------------


def test_a_codec_of_ones_own_encodes_and_what_is_not_decoded_is_a_mismatch() -> None:
    name = f"{OWN}:deflate"
    bring(name, plugins.CODEC.load(name))
    raw = bytes(4096)
    data = encode(name, raw, word=2)
    assert len(data) < 100
    into = bytearray(len(raw))
    decode(name, data, memoryview(into), word=2)
    assert into == raw
    for damaged in (bytes(data)[:-9], b"x", encode(name, bytes(9999), word=2)):
        with pytest.raises(WeightMismatch, match="cannot be decoded"):
            decode(name, damaged, memoryview(into), word=2)


def test_a_codec_that_fails_to_encode_costs_bytes_and_no_transfer(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{OWN}:broken"
    bring(name, plugins.CODEC.load(name))
    assert encode(name, b"12345678", word=2) == b"12345678"
    assert "RuntimeError: no" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [None, 7, [], {}, "pickle", "os:system"])
def test_a_peer_names_only_codecs_that_were_brought(asked: Any) -> None:
    assert not is_known(asked)
