"""Versions that are adapters alone: each sample ends under the one that it was asked with, and nothing pauses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from gyre.models.adapters import ADAPTER_CONFIG, config_of_published, model_print
from gyre.models.errors import ModelFolderError
from gyre.rollouts.agent.engine_adapters import MOST
from gyre.rollouts.samples import Group
from gyre.weights.version.model_folder import list_model_folder
from tests.rollouts.agent.crew import Crew
from tests.rollouts.agent.test_agent import all_groups
from tests.rollouts.agent.test_early_start import ready_early
from tests.rollouts.plane import ScriptedTrainer, until

CONFIG = {"model_type": "tiny", "hidden_size": 8}


def base_folder(path: Path, seed: int = 0) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"w": np.full(8, seed, np.float32)}, path / "model.safetensors")
    return path


class Adapters:
    """The trainer's side: a model's folder, and versions that are adapters of it."""

    def __init__(self, crew: Crew) -> None:
        self.root = crew.plane.tmp_path
        self.base = base_folder(self.root / "model")
        self.print = model_print(self.base)

    def write(self, version: int, **changes: Any) -> None:
        folder = self.root / f"v{version}"
        folder.mkdir()
        told = {"r": 2, "lora_alpha": 4, "target_modules": ["w"], "base_model_name_or_path": str(self.base)}
        (folder / ADAPTER_CONFIG).write_bytes(config_of_published(told | changes, self.print))
        (folder / "config.json").write_text(json.dumps(CONFIG))
        save_file({"w.lora_A": np.full(2, version, np.float32)}, folder / "model.safetensors")
        list_model_folder(folder, version=version)

    async def publish(self, trainer: ScriptedTrainer, *versions: int) -> None:
        for version in versions:
            self.write(version)
            await trainer.publish(version)


def notes(crew: Crew, name: str, word: str = "adapters") -> list[str]:
    path = crew.tmp_path / name / word
    return path.read_text().splitlines() if path.exists() else []


def versions_of(group: Group) -> set[tuple[int, ...]]:
    return {tuple(run.version for run in sample.versions) for sample in group.samples}


@pytest.fixture
def adapters(crew: Crew) -> Adapters:
    return Adapters(crew)


async def test_a_sample_ends_under_the_adapter_that_began_it(crew: Crew, adapters: Adapters) -> None:
    trainer = await crew.plane.trainer()
    await adapters.publish(trainer, 0)
    crew.start("a")
    await crew.serving("a")
    crew.hold("a", 2 + 20)
    await trainer.ask([0], n=2, limit=40)
    await crew.generated(10)
    await adapters.publish(trainer, 1)
    await crew.serving("a", version=1)
    await trainer.ask([1], n=2, limit=40)
    await crew.generated(50)
    assert notes(crew, "a") == ["load 0", "load 1"], "what samples use is not unloaded"
    crew.go_on("a")
    groups = await all_groups(trainer, 2)
    assert [versions_of(groups[index]) for index in (0, 1)] == [{(0,)}, {(1,)}]
    await adapters.publish(trainer, 2)
    await crew.serving("a", version=2)
    assert notes(crew, "a") == ["load 0", "load 1", "unload 0", "load 2"]
    assert notes(crew, "a", "modes") == [], "nothing paused"
    (instance,) = crew.plane.manager.status()["instances"]
    assert instance["loads"] == "adapter"
    assert crew.plane.told("LoaderFallback") == []


async def test_tokens_are_those_of_the_adapter_that_they_say(crew: Crew, adapters: Adapters) -> None:
    """Whoever draws them, and however its engine came to the version."""
    trainer = await crew.plane.trainer()
    await adapters.publish(trainer, 0)
    first = crew.start("a")
    await crew.serving("a")
    await adapters.publish(trainer, 1)
    await crew.serving("a", version=1)
    await trainer.ask([0], n=2, limit=30)
    (group,) = (await all_groups(trainer, 1)).values()
    first.drain("the other's turn")
    await crew.tasks["a"]
    crew.start("b")
    await crew.serving("b", version=1)
    await trainer.ask([0], n=2, limit=30, purpose="calm")
    (other,) = (await all_groups(trainer, 1, "calm")).values()
    drawn = [[sample.token_ids.tobytes() for sample in one.samples] for one in (group, other)]
    assert drawn[0] == drawn[1]
    assert versions_of(other) == {(1,)}


async def test_when_its_engine_dies_the_rest_is_drawn_with_the_newest(crew: Crew, adapters: Adapters) -> None:
    trainer = await crew.plane.trainer()
    await adapters.publish(trainer, 0)
    crew.start("a")
    await crew.serving("a")
    crew.hold("a", 2 + 20)
    await trainer.ask([0], n=2, limit=40)
    await crew.generated(2 * 20)
    await adapters.publish(trainer, 1)
    await crew.serving("a", version=1)
    crew.tell("a", "die")
    await until(lambda: crew.plane.told("EngineDied"))
    await crew.serving("a", version=1)
    crew.go_on("a")
    (group,) = (await all_groups(trainer, 1)).values()
    assert versions_of(group) == {(0, 1)}
    assert [run.end - run.start for sample in group.samples for run in sample.versions] == [20] * 4
    assert crew.plane.manager.groups.account.discarded == {}


async def test_samples_of_the_oldest_are_called_off_where_an_engine_would_have_too_many(
    crew: Crew, adapters: Adapters
) -> None:
    trainer = await crew.plane.trainer()
    await adapters.publish(trainer, 0)
    crew.start("a")
    await crew.serving("a")
    crew.hold("a", 2 + 5)
    for version in range(MOST):
        await trainer.ask([version], limit=10)
        await crew.generated(5 * (version + 1))
        await adapters.publish(trainer, version + 1)
        await crew.serving("a", version=version + 1)
    loads = [f"load {version}" for version in range(MOST)]
    assert notes(crew, "a") == [*loads, "unload 0", f"load {MOST}"]
    crew.go_on("a")
    groups = await all_groups(trainer, MOST)
    ((began, went_on),) = versions_of(groups[0])
    assert (began, went_on > 0) == (0, True)
    assert [versions_of(groups[index]) for index in range(1, MOST)] == [{(one,)} for one in range(1, MOST)]


async def test_an_engine_that_was_started_early_takes_the_first(
    crew: Crew, adapters: Adapters, tmp_path: Path
) -> None:
    """It stands over this machine's own copy of the model."""
    copy = base_folder(tmp_path / "copy")
    agent = crew.start("a", base=copy)
    early = await ready_early(agent)
    adapters.base.rename(tmp_path / "away")
    adapters.print = model_print(copy)
    await adapters.publish(await crew.plane.trainer(), 0)
    await crew.serving("a")
    (engine,) = agent._host.engines
    assert (engine.pid, psutil.pid_exists(early)) == (early, True)


@pytest.mark.parametrize(("what", "said"), [("away", "not on this machine"), ("other", "other weights")])
async def test_an_agent_without_the_adapter_s_model_ends(
    crew: Crew, adapters: Adapters, tmp_path: Path, what: str, said: str
) -> None:
    """It could serve no version."""
    adapters.write(0)
    adapters.base.rename(tmp_path / "was")
    if what == "other":
        base_folder(adapters.base, seed=5)
    agent = crew.start("a")
    await (await crew.plane.trainer()).publish(0)
    with pytest.raises(ModelFolderError, match=said):
        await crew.tasks["a"]
    assert agent._host.engines == []


async def test_an_engine_that_refuses_the_first_is_started_again(crew: Crew, adapters: Adapters) -> None:
    crew.start("a")
    crew.tell("a", "no_load")
    await adapters.publish(await crew.plane.trainer(), 0)
    await until(lambda: crew.plane.told("WeightsRefused"))
    assert "full" in str(crew.plane.told("WeightsRefused")[0])
    crew.take_back("a", "no_load")
    await crew.serving("a")
    assert len(crew.agents["a"]._host.engines) == 1


async def test_versions_of_another_kind_are_refused_and_the_served_one_stays(
    crew: Crew, adapters: Adapters
) -> None:
    trainer = await crew.plane.trainer()
    await adapters.publish(trainer, 0)
    crew.start("a")
    await crew.serving("a")
    await trainer.publish(1)  # a whole model
    await until(lambda: crew.plane.told("WeightsRefused"))
    assert "serves adapters" in str(crew.plane.told("WeightsRefused")[0])
    adapters.print = "another's"
    await adapters.publish(trainer, 2)
    await until(lambda: "other weights" in str(crew.plane.told("WeightsRefused")))
    adapters.print = model_print(adapters.base)
    await adapters.publish(trainer, 3)
    await crew.serving("a", version=3)
    assert crew.plane.told("EngineDied") == []
