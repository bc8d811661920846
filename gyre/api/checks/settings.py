"""What a job must have besides a graph that can run: settings without a default, its classes' own sections, and files.

`gyre plan` and every submission check them before any process starts.

A file that a job reads must be on the machines that run it. Where that is this machine alone (one node, and no cluster
but the one that is started here), a missing file is a mistake. Otherwise it may be there without being here: then it is
a note.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gyre.api.checks import data, learning, machine, models, rewards
from gyre.api.checks.findings import as_findings, elsewhere
from gyre.config import JobSpec
from gyre.config.sections import WorkloadSettings
from gyre.errors import ConfigError
from gyre.graph.integrations import check_complete, reads_sections
from gyre.graph.rollout_roles import check_context

_PREPARED = "gyre.data.prepared:PreparedData"
_REWARD_MODELS = ("TorchRewardModel", "MegatronRewardModel")


def check_settings(spec: JobSpec, ray_address: str | None = None) -> list[str]:
    """Whether a compiled job's `config` is complete, what it needs is installed, and its files are here. Returns notes
    and warnings. Raises ConfigError, one sentence, for the first mistake."""
    here = runs_here(spec, ray_address)
    if not reads_sections(spec):
        return list(machine.check(spec, here=here))
    found: list[str] = []
    check_complete(spec)
    for error in _missing_files(spec):
        if here:
            with _folder_named(spec):
                raise error
        found.append(elsewhere(error.message))
    with _folder_named(spec):
        for subject in (data, models, rewards, learning):
            found += as_findings(subject.check(spec, here=here))
    return [*found, *machine.check(spec, here=here)]


def runs_here(spec: JobSpec, ray_address: str | None = None) -> bool:
    """Whether the job's processes will all be on this machine, as far as can be told before the cluster is asked."""
    ray = sys.modules.get("ray")
    connected = ray is not None and ray.is_initialized()
    address = ray_address or os.environ.get("RAY_ADDRESS") or "local"
    return spec.node_num in (None, 1) and address == "local" and not connected


@contextmanager
def _folder_named(spec: JobSpec) -> Iterator[None]:
    """An error of a relative path that leads nowhere says in which folder it was looked up."""
    try:
        yield
    except ConfigError as error:
        value: Any = spec
        for part in error.message.partition(": ")[0].split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        path = Path(value.partition(":")[0]) if isinstance(value, str) and value else None
        here = str(Path.cwd())
        if path is not None and not path.is_absolute() and not path.exists() and here not in str(error):
            error.hint = f"It was looked up in {here}. {error.hint}".strip()
        raise


def _missing_files(spec: JobSpec) -> Iterator[ConfigError]:
    """An error for each file that is not on this machine; other mistakes in files are raised."""
    settings = WorkloadSettings.read(spec.config)
    if settings.data is not None and spec.run.data in (None, _PREPARED):
        folders = {"config.data.path": settings.data.path, "config.data.held_out": settings.data.held_out}
        missing = [
            ConfigError(
                f"{key}: {folder} is no prepared data set on this machine.",
                hint="Make one with `gyre data prepare`.",
            )
            for key, folder in folders.items()
            if folder and not Path(folder).is_dir()
        ]
        yield from missing
        if not missing:
            from gyre.data.prepared import PreparedData

            PreparedData(spec.config)  # its manifests are read: digest, format, tokenizers
    if settings.megatron.model_path:
        yield from _missing_model("config.megatron.model_path", settings.megatron.model_path)
        _check_context(spec, Path(settings.megatron.model_path) / "config.json")
    if settings.first_weights.path:
        yield from _missing_model("config.first_weights.path", settings.first_weights.path)
    reward = spec.roles.get("reward")
    if reward is not None and reward.entrypoint is not None and reward.entrypoint.name in _REWARD_MODELS:
        if not settings.reward_model.path:
            raise ConfigError(
                "config.reward_model.path: is missing.",
                hint="Name the folder of a model for sequence classification with one label.",
            )
        yield from _missing_model("config.reward_model.path", settings.reward_model.path)


def _check_context(spec: JobSpec, config: Path) -> None:
    """Raises GraphError if engines are to read more tokens than the model of this folder has positions."""
    try:
        told = json.loads(config.read_text())
        positions = None if told.get("rope_scaling") else told.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return  # it is missing, or damaged, and whoever loads the model says so
    if isinstance(positions, int):  # with scaled positions engines have a limit of their own
        check_context(spec, positions, f"max_position_embeddings of {config}")


def _missing_model(key: str, folder: str) -> Iterator[ConfigError]:
    if not (Path(folder) / "config.json").is_file():
        yield ConfigError(
            f"{key}: {folder} is no model's folder on this machine: it has no config.json.",
            hint="Give a folder in Hugging Face's layout.",
        )
