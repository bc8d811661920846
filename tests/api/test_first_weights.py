"""A new job begins with another one's weights, whatever holds them; what cannot be begun with leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file

from gyre.api.cli import main
from gyre.api.first_weights import first_weights
from gyre.api.home import Home
from gyre.api.resume import _with_first_weights
from gyre.config import JobSpec, parse_job
from gyre.config.sections.model import source_of
from gyre.errors import ConfigError, GyreError, NotFound
from gyre.graph import compile_job
from gyre.store import Store, open_store
from gyre.workloads.gang.state_files import sealed
from gyre.workloads.learner.errors import CheckpointMismatch
from gyre.workloads.rollout_vertices import _base_model
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.trainer.learning.checkpoints import _mark_complete
from tests.api.conftest import Seed
from tests.workloads.torch_workloads import CONFIG, bind, rolled_out

JOB: dict[str, Any] = {
    "name": "second",
    "recipe": "grpo",
    "device_type": "CPU",
    "device_per_node": 8,
    "config": CONFIG,
    "roles": {"trainer": {}, "actor": {}, "rollout": {}, "reward": {}},
}
OWN_CLASSES: dict[str, Any] = {
    "recipe": None,
    "roles": {"trainer": {"entrypoint": {"module": "tests.e2e.workloads", "name": "Trainer"}}},
}


def spec_of(**changes: Any) -> JobSpec:
    return compile_job(parse_job({**JOB, **changes})).spec


@pytest.fixture
def store(home: Home) -> Iterator[Store]:
    with open_store(home.database_url()) as opened:
        yield opened


def begun(
    store: Store, home: Home, source: str | Path, spec: JobSpec | None = None, *, trust: bool = False
) -> JobSpec:
    with first_weights(store, home, spec or spec_of(), "second-1", source, trust=trust) as (taken, _):
        return taken


def digest_of(spec: JobSpec) -> str:
    """Of the weights that an actor of the job has when it is set up and warmed up."""
    actor = bind(TorchActor(), spec.config)
    try:
        assert actor.step == 0
        assert actor.warm_start()["steps"] == 0
        digest: str = actor.state()["digest"]
        return digest
    finally:
        actor.teardown()


Checkpoints = tuple[Path, dict[int, str]]


@pytest.fixture
def checkpoints(seed: Seed, home: Home) -> Checkpoints:
    """Those of job `golden-1`, whose journal knows of step 3: their folder, and the digests by step."""
    seed("undisturbed")
    folder = home.job_directory("golden-1") / "checkpoints"
    actor = bind(TorchActor(), {**CONFIG, "seed": 5})
    digests = {}
    for step in (1, 2, 3):
        groups = rolled_out(actor, 10 * step, 4)
        actor.accumulate(groups, step=step, index=0)
        actor.apply(step=step, indices=1, group_ids=[group.id for group in groups])
        if step > 1:
            here = folder / f"step_{step:08d}"
            actor.checkpoint(here)
            _mark_complete(here, step)
            digests[step] = actor.state()["digest"]
    actor.teardown()
    return folder, digests


def cut(folder: Path) -> None:
    file = folder / "rank_00000.pt"
    file.write_bytes(file.read_bytes()[:-100])


def change(folder: Path) -> None:
    """Other weights than those that were written, which only their digest shows."""
    file = folder / "rank_00000.pt"
    content = torch.load(file, weights_only=True)
    content["model"]["embed.weight"][0, 0] += 1.0
    torch.save(content, file)
    _mark_complete(folder, 3)


def give_up(folder: Path) -> None:
    """A trainer that died before the ledger knew of a later checkpoint."""
    shutil.copytree(folder, folder.with_name("step_00000009"))


@pytest.mark.parametrize(
    ("harm", "step"),
    [(None, 3), (give_up, 3), (shutil.rmtree, 2), (cut, 2), (change, 2)],
    ids=["whole", "a later one unknown", "gone", "cut", "changed"],
)
def test_a_job_begins_with_the_last_whole_checkpoint_of_another(
    store: Store, home: Home, checkpoints: Checkpoints, harm: Callable[[Path], None] | None, step: int
) -> None:
    folder, digests = checkpoints
    if harm is not None:
        harm(folder / "step_00000003")
    with first_weights(store, home, spec_of(), "second-1", "golden", trust=False) as (spec, notes):
        pass
    assert source_of(spec.config) == f"job golden-1, step_0000000{step}"
    assert len(notes) == (2 if harm in (cut, change) else 1)
    shutil.rmtree(folder)
    assert [digest_of(spec), digest_of(spec)] == [digests[step]] * 2
    assert digest_of(spec_of(config={**CONFIG, "warm_start": None})) != digests[step]
    assert spec.config["seed"] == CONFIG["seed"], "nothing else of that job is taken"


def test_it_ends_where_all_are_damaged(store: Store, home: Home, checkpoints: Checkpoints) -> None:
    folder, _ = checkpoints
    cut(folder / "step_00000002")
    cut(folder / "step_00000003")
    with pytest.raises(CheckpointMismatch, match=r"step_00000002 is damaged: .* bytes"):
        begun(store, home, "golden-1")
    assert not (home.path / "jobs" / "second-1").exists()


def test_a_checkpoint_or_a_model_s_folder_does_as_well(
    store: Store, home: Home, checkpoints: Checkpoints
) -> None:
    folder, digests = checkpoints
    spec = begun(store, home, folder / "step_00000002")
    assert digest_of(spec) == digests[2]
    assert source_of(spec.config) == str(folder / "step_00000002")
    model = home.path / "model"
    shutil.copytree(spec.config["first_weights"]["path"], model)
    (model / "tokenizer.json").write_text("{}")
    with first_weights(store, home, spec_of(), "third-1", str(model), trust=False) as (again, _):
        shutil.rmtree(model)
    assert digest_of(again) == digests[2]
    assert (Path(again.config["first_weights"]["path"]) / "tokenizer.json").read_text() == "{}"


def small(**shape: Any) -> dict[str, Any]:
    return {"config": {**CONFIG, "model": {**CONFIG["model"], **shape}}}


@pytest.mark.parametrize(
    ("source", "changes", "error", "sentence"),
    [
        ("nobody", {}, NotFound, "nobody"),
        ("./nowhere", {}, NotFound, "There is no folder .*nowhere"),
        ("unsaved-1", {}, NotFound, "Job unsaved-1 has no checkpoint to begin with"),
        ("elsewhere-1", {}, NotFound, "checkpoints of job elsewhere-1 are not on this machine"),
        ("golden", small(layers=1), ConfigError, "step_00000003 is not this job's: layers is 2 instead of 1"),
        (
            "golden",
            small(hidden=48, heads=6),
            ConfigError,
            "hidden is 32 instead of 48, heads is 4 instead of 6",
        ),
        (
            "golden",
            small(rope_theta=5e5),
            ConfigError,
            "rope_theta is 10000.0 instead of 500000.0. The job's model is that of config.model",
        ),
        ("golden", OWN_CLASSES, ConfigError, "is not Gyre's"),
    ],
)
def test_what_cannot_be_begun_with_is_refused(
    store: Store,
    home: Home,
    seed: Seed,
    checkpoints: Checkpoints,
    source: str,
    changes: dict[str, Any],
    error: type[GyreError],
    sentence: str,
) -> None:
    seed("rollout_lost", job_id="unsaved-1", at=0.5)
    seed("undisturbed", job_id="elsewhere-1", at=0.5)
    with pytest.raises(error, match=sentence):
        begun(store, home, source, spec_of(**changes))
    assert not (home.path / "jobs" / "second-1").exists()


def test_the_longest_context_may_be_another(store: Store, home: Home, checkpoints: Checkpoints) -> None:
    _, digests = checkpoints
    assert digest_of(begun(store, home, "golden", spec_of(**small(max_positions=64)))) == digests[3]


def test_a_folder_that_holds_no_weights_is_not_drawn_from_the_seed(
    store: Store, home: Home, checkpoints: Checkpoints
) -> None:
    model = home.path / "model"
    shutil.copytree(begun(store, home, "golden").config["first_weights"]["path"], model)
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no weights as safetensors"):
        begun(store, home, model)
    with pytest.raises(ConfigError, match="is neither a checkpoint nor a model's folder"):
        begun(store, home, home.path / "jobs")


def test_a_pickle_is_not_read_unless_its_writer_is_trusted(store: Store, home: Home) -> None:
    theirs = home.path / "theirs"
    theirs.mkdir()
    (theirs / "actor.json").write_text(json.dumps(sealed({"format": 1, "model": None})))
    with pytest.raises(ConfigError, match="is unpickled") as refused:
        begun(store, home, theirs)
    assert "--trust" in refused.value.hint
    with pytest.raises(ConfigError, match="is not of a policy"):
        begun(store, home, theirs, trust=True)


def test_the_copy_goes_where_the_job_does_not_start(
    store: Store, home: Home, checkpoints: Checkpoints
) -> None:
    taking = first_weights(store, home, spec_of(), "second-1", "golden", trust=False)
    spec, _ = taking.__enter__()
    assert load_file(Path(spec.config["first_weights"]["path"]) / "model.safetensors")
    interrupt = KeyboardInterrupt()
    assert not taking.__exit__(KeyboardInterrupt, interrupt, None)
    assert not (home.path / "jobs" / "second-1").exists()


def test_an_engine_starts_over_them_too(store: Store, home: Home, checkpoints: Checkpoints) -> None:
    given = begun(store, home, "golden").config["first_weights"]
    shutil.copytree(given["path"], home.path / "model")
    megatron = {"model_path": str(home.path / "model")}
    assert _base_model({"megatron": megatron}) == home.path / "model"
    assert _base_model({"megatron": megatron, "first_weights": given}) == Path(given["path"])
    assert _base_model({"first_weights": given}) is None, "the small decoder's engine gets it from the actor"


def test_a_job_file_that_goes_on_keeps_the_first_weights() -> None:
    given = {"path": "/there", "source": "job one"}
    before = {"config": {"seed": 1, "first_weights": given}}
    assert _with_first_weights({"config": {"seed": 2}}, before)["config"] == {
        "seed": 2,
        "first_weights": given,
    }
    assert _with_first_weights({}, {"config": {"seed": 1}})["config"] == {}


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--from", "nobody"], 4, "nobody"),
        (["--from", "golden", "--set", "config.model.mlp=64"], 2, "mlp is 48 instead of 64"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "submit"])
def test_the_command_line_refuses_before_anything_starts(
    home: Home, checkpoints: Checkpoints, verb: str, arguments: list[str], code: int, sentence: str
) -> None:
    file = home.path / "job.yaml"
    file.write_text(yaml.safe_dump(JOB))
    where = [
        "--ray-address",
        "127.0.0.1:1",
    ]  # where nothing listens: a job that got so far ends with another code
    result = CliRunner().invoke(main, [verb, str(file), *arguments, *where])
    assert (result.exit_code, sentence in result.stderr) == (code, True), result.output
    with open_store(home.database_url()) as store:
        assert [row.name for row in store.jobs()] == ["golden"]
