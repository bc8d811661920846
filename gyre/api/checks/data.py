"""The prepared data set that a job names, or its file of rows: folder, digest, lengths, held-out prompts. Whether its
tokens are those of the model is in `gyre.api.checks.models`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gyre.api.checks.findings import JobWarning, Note, elsewhere
from gyre.api.checks.learning import check_session_length
from gyre.config import JobSpec
from gyre.config.sections import DataSettings, WorkloadSettings
from gyre.errors import ConfigError
from gyre.graph.rollout_roles import is_instance, rollouts_of

if TYPE_CHECKING:
    from gyre.data.prepared import PreparedData

_PREPARED = "gyre.data.prepared:PreparedData"


def check(spec: JobSpec, *, here: bool) -> Iterator[str]:
    """Yields warnings; raises ConfigError or GraphError for the first mistake."""
    settings = WorkloadSettings.read(spec.config)
    if settings.task is not None and settings.task.name == "rows" and not settings.data and not spec.run.data:
        yield from _check_rows(spec, settings, here=here)
    if settings.data is None or spec.run.data not in (None, _PREPARED):
        return
    missing = list(_missing_folders(settings.data))
    for error in missing:
        if here:
            raise error
        yield elsewhere(error.message)
    if missing:
        return
    from gyre.data.prepared import PreparedData

    try:
        data = PreparedData(spec.config)  # format, digest, one tokenizer
    except ConfigError as error:
        key = "" if error.message.startswith("config.") else "config.data: "
        raise ConfigError(f"{key}{error.message}", hint=error.hint) from error
    if settings.agent is not None:
        _check_sessions(spec, data, settings.agent.max_tokens)
    else:
        yield from _check_lengths(spec, data, settings.sampling.max_new_tokens)
    _check_held_out(spec, data)
    if never := data.never_trained:  # raises where every prompt is held out
        yield JobWarning(f"config.data: {never}.")
    if data.settings.held_out_every:
        rows = data.folders[0].rows
        yield _held_out_note(spec, rows, data.training_count, str(data.folders[0].path))


def _check_rows(spec: JobSpec, settings: WorkloadSettings, *, here: bool) -> Iterator[str]:
    """The file of the task `rows`: its rows, the held-out ones, and the room that they leave in the small decoder."""
    from gyre.workloads.tasks.rows import RowsTask

    assert settings.task is not None
    if not here and not Path(settings.task.file).is_file():
        yield elsewhere(f"config.task.file: {settings.task.file} is no file on this machine.")
        return
    task = RowsTask(spec.config)
    if spec.recipe is not None and spec.run.evaluate_every:
        task.held_out(spec.run.held_out or 1)  # raises where there are fewer
    new, model = settings.sampling.max_new_tokens, settings.model
    if settings.agent is not None:
        of = f"the longest prompt of {task.file}, {task.longest_prompt} tokens"
        room = model.max_positions if model is not None and not settings.first_policy else None
        check_session_length(
            settings.agent.max_tokens, task.longest_prompt, of, room, "config.model.max_positions"
        )
    elif model is not None and not settings.first_policy and task.longest_prompt + new > model.max_positions:
        raise ConfigError(
            f"config.sampling.max_new_tokens: {new} given, which with the longest prompt of {task.file}, "
            f"{task.longest_prompt} tokens, is more than config.model.max_positions, {model.max_positions}.",
            hint=f"Raise config.model.max_positions to {task.longest_prompt + new}.",
        )


def _held_out_note(spec: JobSpec, rows: int, trained: int, where: str) -> Note:
    """What is held out by a share of the rows, of which only so many are evaluated."""
    held = rows - trained
    asked = min(spec.run.most_held_out, held) if spec.recipe is not None and spec.run.evaluate_every else 0
    return Note(
        f"{trained} of the {rows} rows of {where} are trained; {held} are held out by held_out_every, {asked} of which "
        "are evaluated (run.held_out)."
    )


def _missing_folders(data: DataSettings) -> Iterator[ConfigError]:
    from gyre.data.readers import download_hint

    for key, folder in {"config.data.path": data.path, **data.held_out_keys}.items():
        if folder and not Path(folder).is_dir():
            yield ConfigError(
                f"{key}: {folder} is no prepared data set on this machine.",
                hint=f"Make one with `gyre data prepare`. {download_hint(folder, 'dataset')}".strip(),
            )


def _check_lengths(spec: JobSpec, data: PreparedData, longest_answer: int) -> Iterator[str]:
    """Whether each prompt leaves room for an answer: in the model some, in an engine's own limit all of it."""
    from gyre.data.positions import positions_of

    positions = positions_of(spec.config)
    for prepared in data.folders:
        lengths = prepared.lengths
        row, longest = int(lengths.argmax()), int(lengths.max())
        if positions is not None and longest >= positions.count:
            raise ConfigError(
                f"config.data: row {row} of {prepared.path} has {longest} tokens, which leave no room for an answer in "
                f"{positions.where} ({positions.count}).",
                hint=f"Prepare it with --max-prompt-tokens {max(positions.count - longest_answer, 1)}.",
            )
        shortened = 0 if positions is None else int((lengths + longest_answer > positions.count).sum())
        if positions is not None and shortened:
            yield (
                f"config.sampling.max_new_tokens: {shortened} of {prepared.rows} prompts of {prepared.path} leave less "
                f"than {longest_answer} tokens of {positions.where} ({positions.count}); their answers are cut off "
                "there."
            )
        for role in spec.roles:
            context = rollouts_of(spec, role).context_length
            if is_instance(spec, role) and context is not None and longest + longest_answer > context:
                raise ConfigError(
                    f"config.data: row {row} of {prepared.path} has {longest} tokens, and with the {longest_answer} of "
                    f"config.sampling.max_new_tokens that is more than rollouts.context_length of {role} ({context}).",
                    hint=f"Raise it, lower max_new_tokens, or prepare with --max-prompt-tokens "
                    f"{max(context - longest_answer, 1)}.",
                )


def _check_sessions(spec: JobSpec, data: PreparedData, longest: int) -> None:
    """Raises ConfigError where a prompt leaves a session of `longest` tokens no room for an answer, or the model or an
    engine has none for such a session."""
    from gyre.data.positions import positions_of

    positions = positions_of(spec.config)
    rooms = [] if positions is None else [(positions.count, positions.where)]
    for role in spec.roles:
        context = rollouts_of(spec, role).context_length
        if is_instance(spec, role) and context is not None:
            rooms.append((context, f"rollouts.context_length of {role}"))
    room, key = min(rooms, default=(None, ""))
    for prepared in data.folders:
        row, prompt = int(prepared.lengths.argmax()), int(prepared.lengths.max())
        of = f"row {row} of {prepared.path}, a prompt of {prompt} tokens"
        check_session_length(longest, prompt, of, room, key)


def _check_held_out(spec: JobSpec, data: PreparedData) -> None:
    trainer = spec.roles["trainer"].entrypoint if "trainer" in spec.roles else None
    if trainer is not None and not trainer.module.startswith("gyre."):
        return  # it may hold prompts out by itself
    if not isinstance(data.settings.held_out, str):
        return  # of a set with a name that has fewer, all are answered
    run, there = spec.run, data.held_out_count
    if spec.recipe is not None and run.evaluate_every and there < (run.held_out or 1):
        raise ConfigError(
            f"run.held_out: {run.most_held_out} prompts are to be evaluated every {run.evaluate_every} steps, and "
            f"config.data holds {there} out.",
            hint="Give config.data.held_out or config.data.held_out_every, lower run.held_out, or set "
            "run.evaluate_every to 0.",
        )
