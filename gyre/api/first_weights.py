"""A new job that begins with another one's weights: they are found, compared with its model, and copied to its folder.

Only the policy's weights are taken, in the type that they were written in. Optimizer, data position and ledger begin
anew. The source is a job, whose last whole checkpoint is taken; or the folder of a checkpoint; or a model's folder in
Hugging Face's layout. Whatever it is, the copy is a model's folder, so that the actors of every back end, in any
layout, begin with any of them.

Invariants:
- *the job's own*: the copy is whole before anything of the job is started, and every process of the job reads it; the
  source may go at once;
- *the same model*: a source of another shape, and one that is of no policy, are refused by what differs;
- *no stranger's pickle*: a checkpoint in Megatron's own format is read only where its writer is trusted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre.api.definition.entrypoints import load_class
from gyre.api.home import Home
from gyre.api.saved_policies import called, refuse_missing
from gyre.api.terminal.signals import signals_held
from gyre.config import JobSpec, parse_job
from gyre.config.sections import WorkloadSettings
from gyre.config.sections.model import NAME, FirstWeightsSettings
from gyre.errors import ConfigError, GyreError, NotFound
from gyre.failover import state_from
from gyre.graph.backends import Backend
from gyre.graph.integrations import reads_sections
from gyre.store import Store
from gyre.workloads.learner.checkpoint_identity import written_by

if TYPE_CHECKING:
    from gyre.models.architecture import Architecture

_EXPORT_S = 3600.0
"""Deadline of reading a checkpoint of several ranks: at the 100 MB/s of a slow disk, 180 GB in and 180 GB out."""


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Where weights come from: `name` for people, and the folders to try in turn."""

    name: str
    folders: tuple[Path, ...]
    is_job: bool


def find_source(store: Store, place: Home, source: str | Path) -> WeightsSource:
    """What `source` names: a job (an id, or the newest of a name), or a folder. Text with a slash is a folder's path,
    other text is a job's name first. Raises NotFound, with what is missing."""
    if isinstance(source, str) and "/" not in source:
        try:
            job_id = store.job(source).job_id
        except NotFound:
            if not Path(source).is_dir():
                raise
        else:
            return _checkpoints_of(store, place, job_id)
    folder = Path(source).expanduser().absolute()
    if not folder.is_dir():
        raise NotFound(f"There is no folder {folder}.", hint="Give a job, a checkpoint or a model's folder.")
    return WeightsSource(str(folder), (folder,), is_job=False)


def _checkpoints_of(store: Store, place: Home, job_id: str) -> WeightsSource:
    """The job's checkpoints, the newest first."""
    job = state_from(store.journal(job_id).snapshot()).job
    if job.checkpoint_step < 0:
        raise NotFound(
            f"Job {job_id} has no checkpoint to begin with.", hint="It writes the first one after its set-up."
        )
    root = place.find_checkpoints(job_id) or Path(job.checkpoint_path).parent
    steps = {path: path.name.removeprefix("step_") for path in root.glob("step_*") if path.is_dir()}
    found = {int(step): path for path, step in steps.items() if step.isdecimal()}
    known = sorted((step for step in found if step <= job.checkpoint_step), reverse=True)
    if not known:
        raise NotFound(
            f"The checkpoints of job {job_id} are not on this machine: nothing is in {root}.",
            hint="Begin where its home is, or give the folder of a checkpoint.",
        )
    return WeightsSource(f"job {job_id}", tuple(found[step] for step in known), is_job=True)


@contextmanager
def first_weights(
    store: Store, place: Home, spec: JobSpec, job_id: str, source: str | Path | None, *, trust: bool
) -> Iterator[tuple[JobSpec, list[str]]]:
    """The spec with weights from the source, which are copied into the job's folder, and notes on them. The copy is
    taken back if what is done with it raises; without a source nothing is done. Raises NotFound, ConfigError and
    CheckpointMismatch."""
    if source is None:
        yield spec, []
        return
    found = find_source(store, place, source)
    wanted = Wanted.of(spec)
    out = place.job_directory(job_id) / NAME
    try:
        folder, notes = _copy_whole(found, out, wanted, trust=trust)
        writer = written_by(folder)
        name = f"{found.name}, {folder.name}" if found.is_job else found.name
        section = FirstWeightsSettings(path=str(out), source=name)
        config = {**spec.config, NAME: section.model_dump()}
        begun = parse_job({**spec.model_dump(mode="json"), "config": config})
        whose = f", which {writer.writer} wrote" if writer is not None else ""
        said = f"begins with the weights of {name}{whose}; its optimizer begins anew"
        yield begun, [*notes, said]
    except BaseException:
        with signals_held():
            shutil.rmtree(out, ignore_errors=True)
            with suppress(OSError):  # the logs of a master that did not start stay
                out.parent.rmdir()
        raise


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model of the job that begins: the content of its `config.json`, its folder, "" for the small decoder, and its
    shape, None for a model that only transformers knows."""

    config: dict[str, Any]
    folder: str
    architecture: Architecture | None

    @classmethod
    def of(cls, spec: JobSpec) -> Wanted:
        """Raises ConfigError where the job has no actor of Gyre's, or its model cannot be read."""
        from gyre.models.architecture import read_config
        from gyre.models.errors import NotComputed
        from gyre.workloads.fsdp.actor import FsdpActor
        from gyre.workloads.learner.policy import PolicyLearner
        from gyre.workloads.learner.trained_model import trained_model

        actor = spec.roles["actor"].entrypoint if "actor" in spec.roles and reads_sections(spec) else None
        kind = load_class(actor, spec.python_path, path="roles.actor.entrypoint") if actor else None
        if kind is None or not issubclass(kind, PolicyLearner):
            raise ConfigError(
                f"The actor of job {spec.name} is not Gyre's, so no weights can be given to it.",
                hint="Have your own class read them, from a key of its own in config.",
            )
        try:
            model = trained_model(spec.config)
        except NotComputed:
            if not issubclass(kind, FsdpActor):
                raise
            folder = WorkloadSettings.read(spec.config).model_path
            return cls(read_config(Path(folder)), folder, None)
        return cls(model.config, str(model.folder or ""), model.architecture)

    def refuse_other(self, config: Mapping[str, Any], where: Path) -> None:
        """Raises ConfigError for another model than this one, with what differs. `config` is the content of its
        `config.json`."""
        refuse_differences(self._differences(config, where), where, self.said_in)

    def _differences(self, config: Mapping[str, Any], where: Path) -> list[str]:
        if self.architecture is None:
            from gyre.workloads.fsdp.same_model import config_differences

            return config_differences(config, self.config)
        from gyre.models.architecture import architecture_of
        from gyre.models.support import differences

        theirs = architecture_of(dict(config), str(where))
        return differences(theirs, self.architecture, of_folder=bool(self.folder))

    @property
    def said_in(self) -> str:
        """Where the job's model is described."""
        return f"{self.folder}/config.json" if self.folder else "config.model"


def refuse_differences(found: list[str], where: Path, said_in: str) -> None:
    """Raises ConfigError that names the first of what differs, if anything does; the job says it in `said_in`."""
    if found:
        more = f", and {len(found) - 4} more" if len(found) > 4 else ""
        raise ConfigError(
            f"The model in {where} is not this job's: {', '.join(found[:4])}{more}.",
            hint=f"The job's model is that of {said_in}: give it the model of its weights, by config.model_path or "
            "config.model.",
        )


def _copy_whole(source: WeightsSource, out: Path, wanted: Wanted, *, trust: bool) -> tuple[Path, list[str]]:
    """Copy the first folder that is whole. Returns it, and what was wrong with those before it."""
    from gyre.workloads.learner.errors import CheckpointMismatch, NoPolicy

    notes: list[str] = []
    for folder in source.folders:
        try:
            _copy(folder, out, wanted, trust=trust)
            return folder, notes
        except NoPolicy as error:
            raise ConfigError(error.message, hint=error.hint) from None
        except CheckpointMismatch as error:  # damaged: the one before it may be whole
            if folder == source.folders[-1]:
                raise
            notes.append(f"{folder.name} is passed over: {error.message}")
    raise AssertionError("a source has folders")


def _copy(folder: Path, out: Path, wanted: Wanted, *, trust: bool) -> None:
    """Write the policy of a checkpoint or of a model's folder to `out`, with the tokenizer and the defaults of
    generation of the job's model where the source has none. Raises CheckpointMismatch where it is damaged, and
    ConfigError where it is another model, or none."""
    from gyre.models.saving import add_beside
    from gyre.workloads.learner.errors import CheckpointMismatch
    from gyre.workloads.trainer.learning.checkpoints import problem_with

    if problem := problem_with(folder):
        raise CheckpointMismatch(
            f"The checkpoint {folder} is damaged: {problem}.", hint="The one before it may be whole."
        )
    back_end = written_by(folder)
    if back_end is not None and not back_end.model_in:
        _copy_of_torchs(folder, out, wanted)
    elif back_end is not None:
        _copy_of_ranks(folder, out, wanted, back_end, trust=trust)
    elif (folder / "config.json").is_file():
        _copy_of_model(folder, out, wanted)
    else:
        raise ConfigError(
            f"{folder} is neither a checkpoint nor a model's folder.",
            hint="A job's checkpoints are GYRE_HOME/jobs/JOB/checkpoints/step_…; a model's folder has a config.json.",
        )
    if wanted.folder:
        add_beside(out, Path(wanted.folder))


def _copy_of_ranks(folder: Path, out: Path, wanted: Wanted, back_end: Backend, *, trust: bool) -> None:
    """In a process of its own, for Megatron on a CPU changes what torch says of CUDA, and transformers is large."""
    from gyre.workloads.learner.errors import CheckpointMismatch, NoPolicy

    model = called(back_end.model_in)(folder, trust=trust)
    if model is None:
        raise NoPolicy.at(folder)
    wanted.refuse_other(model["config"], folder)
    refuse_missing(folder, back_end)
    command = [sys.executable, "-m", "gyre.api", "export", str(folder), str(out)]
    try:
        done = subprocess.run(
            [*command, *(["--trust"] if trust else [])], capture_output=True, text=True, timeout=_EXPORT_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{folder} could not be read within {_EXPORT_S:g} s.", hint="Is its disk failing?"
        ) from None
    if done.returncode:
        said = done.stderr.strip().removeprefix("error: ")
        kind: type[GyreError] = (
            ConfigError if done.returncode == ConfigError.exit_code else CheckpointMismatch
        )
        raise kind(said or f"Reading {folder} ended with {done.returncode}.")


def _copy_of_torchs(folder: Path, out: Path, wanted: Wanted) -> None:
    from gyre.models.saving import save_model_folder
    from gyre.workloads.torch.saved_policy import read_policy

    found = read_policy(folder)
    if found.config is not None:
        wanted.refuse_other(found.config, folder)
    if wanted.architecture is None:
        raise ConfigError(
            f"{folder} is of Gyre's small decoder, and the job's model is that of {wanted.said_in}."
        )
    refuse_differences(found.differences(wanted.architecture), folder, wanted.said_in)
    save_model_folder(
        out, found.config or wanted.config, found.named(wanted.architecture), beside=found.beside
    )


def _copy_of_model(folder: Path, out: Path, wanted: Wanted) -> None:
    from gyre.models.architecture import read_config
    from gyre.models.first_weights import given_weights
    from gyre.models.saving import save_model_folder
    from gyre.models.tensor_names import expected_shapes

    config = read_config(folder)
    wanted.refuse_other(config, folder)
    if wanted.architecture is None:
        from gyre.workloads.fsdp.same_model import given_weights_of

        tensors = given_weights_of(folder, wanted.config)
    else:
        source = given_weights(folder, wanted.architecture)
        tensors = ((name, source(name)) for name in expected_shapes(wanted.architecture))
    save_model_folder(out, config, tensors, beside=folder)
