"""What a job must have besides a graph that can run: settings without a default, its classes' own sections, and files.

`gyre plan` and every submission check them before any process starts.

A file that a job reads must be on the machines that run it. Where that is this machine alone (one node, and no cluster
but the one that is started here), a missing file is a mistake. Otherwise it may be there without being here: then it is
a note.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from gyre.api.checks import data, learning, models, rewards
from gyre.config import JobSpec
from gyre.config.job_plugins import plugins_of
from gyre.config.plugins import ADVANTAGE, CODEC, ENGINE, LOSS, TASK
from gyre.config.sections import WorkloadSettings, read_section
from gyre.config.sections.workload import refuse_near_names
from gyre.errors import ConfigError
from gyre.graph.integrations import check_complete, reads_sections
from gyre.workloads.algorithms.options import with_options

_PREPARED = "gyre.data.prepared:PreparedData"


def check_settings(spec: JobSpec, ray_address: str | None = None) -> list[str]:
    """Whether a compiled job's `config` is complete, and its files are here. Returns notes on files that are not, where
    they need not be. Raises ConfigError, one sentence, for the first mistake."""
    if not reads_sections(spec):
        return []
    check_complete(spec)
    notes, here = [], runs_here(spec, ray_address)
    for error in _missing_files(spec):
        if here:
            raise error
        notes.append(f"{error.message} The machines that run the job must have it.")
    for subject in (data, models, rewards, learning):
        notes += subject.check(spec, here=here)
    return notes


def runs_here(spec: JobSpec, ray_address: str | None = None) -> bool:
    """Whether the job's processes will all be on this machine, as far as can be told before the cluster is asked."""
    ray = sys.modules.get("ray")
    connected = ray is not None and ray.is_initialized()
    address = ray_address or os.environ.get("RAY_ADDRESS") or "local"
    return spec.node_num in (None, 1) and address == "local" and not connected


def check_class_sections(spec: JobSpec, classes: Mapping[str, type]) -> None:
    """The sections of `config` that the roles' classes name as their own, in `BaseWorkload.SECTIONS`. Raises
    ConfigError."""
    own = {}
    for role, cls in classes.items():
        for name, model in getattr(cls, "SECTIONS", {}).items():
            if name in WorkloadSettings.model_fields:
                raise ConfigError(
                    f"roles.{role}.entrypoint: {cls.__qualname__}.SECTIONS names {name!r}, a section of Gyre's.",
                    hint="Give your section another name.",
                )
            own[name] = model
            read_section(model, spec.config, name)
    refuse_near_names(spec.config, {**WorkloadSettings.model_fields, **own} if reads_sections(spec) else own)


def check_plugins(spec: JobSpec) -> None:
    """Import what the job names of the user's own, and see that it is what it is to be. Raises ConfigError. Recipes and
    back ends were imported when the job was compiled."""
    settings = WorkloadSettings.read(spec.config) if reads_sections(spec) else WorkloadSettings()
    task = settings.task.options if settings.task is not None else {}
    options = {
        LOSS: ("config.loss.loss_options", settings.loss.loss_options),
        ADVANTAGE: ("config.loss.adv_options", settings.loss.adv_options),
        TASK: ("config.task.options", task),
        ENGINE: ("", {}),
    }
    methods = {TASK: ("prompt", "held_out", "prompt_text", "answer_of"), CODEC: ("encode", "decode")}
    for kind, name in plugins_of(spec):
        found = kind.load(name, spec.python_path)
        if kind in options:
            with_options(kind, name, *options[kind], spec.python_path)
        for method in methods.get(kind, ()):
            if not callable(getattr(found, method, None)):
                raise ConfigError(f"{kind.setting}: {name} has no {method}(), which a {kind.noun} must have.")


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
