"""The reward function that a job names: its file, its signature, and the answers that it needs.

The function's file is read, not run. Where that does not show what it is, a process of its own loads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.api.checks.findings import elsewhere
from gyre.config import JobSpec
from gyre.config.plugins import on_path
from gyre.config.sections import RewardSettings, WorkloadSettings
from gyre.errors import ConfigError, UserCodeError
from gyre.extras import installed
from gyre.workloads.rewards.forms import Form, form_of, lacking
from gyre.workloads.rewards.functions import BUILTIN, check_builtin, unreadable_gold
from gyre.workloads.rewards.signatures import NoFile, lacks_an_import, look_at

_PYTHON, _EXACT = ("PythonReward", "PythonGroupReward"), "ExactMatchReward"
_LOAD_S = 20.0
"""Longest wait for a function to load that has to be loaded to be seen."""
_ROWS_LOOKED_AT = 64
"""Answers that are read with the eyes of `math_verify`, which takes some milliseconds each."""


def check(spec: JobSpec, *, here: bool) -> Iterator[str]:
    """Yields warnings; raises ConfigError or GraphError for the first mistake."""
    reward = spec.roles.get("reward")
    entrypoint = reward.entrypoint if reward is not None else None
    if entrypoint is None or not entrypoint.module.startswith("gyre.workloads.rewards"):
        return
    settings = WorkloadSettings.read(spec.config)
    folders = _Data.all_of(settings)
    if entrypoint.name == _EXACT:
        for data in folders:
            _check_answers(data, "gyre.workloads.rewards:ExactMatchReward")
    if entrypoint.name not in _PYTHON:
        return
    if not (settings.reward.function or settings.reward.functions):
        raise ConfigError(
            "config.reward.function: is missing.",
            hint=f"Write path/to/file.py:function or package.module:function, or take one of {', '.join(BUILTIN)}.",
        )
    for place, part in enumerate(settings.reward.parts):
        found = _check_function(settings.reward.of(part), folders, spec.python_path, here=here)
        yield from _in_place(found, settings.reward, place)


def _in_place(found: Iterator[str], reward: RewardSettings, place: int) -> Iterator[str]:
    """What is found of the function at this place, with the keys that the job has for it. Raises as `found` does."""
    try:
        for each in found:
            yield type(each)(reward.in_place(place, each))
    except ConfigError as error:
        message, hint = (reward.in_place(place, text) for text in (error.message, error.hint))
        raise type(error)(message, hint=hint, details=error.details) from error.__cause__


def _check_function(
    settings: RewardSettings, folders: list[_Data], python_path: Collection[str], *, here: bool
) -> Iterator[str]:
    """One of the functions: `settings` are of a pool that has it alone."""
    function = settings.function
    if function in BUILTIN:
        if here:  # else a package that is missing is a note, which `machine` has
            check_builtin(function)
        for data in folders:
            _check_answers(data, function)
            if function == "math_verify" and installed(function):
                yield from _unreadable(data)
        return
    try:
        form = _form(settings, python_path, here=here)
    except NoFile as error:
        if here:
            raise
        yield elsewhere(error.message)
        return
    except _NotSeen as error:
        yield str(error)
        return
    if form is not None:
        for data in folders:
            _check_columns(form, data, function)
    if lacks_an_import(function, python_path):
        try:
            _loaded(settings, python_path, here=here)
        except _NotSeen as error:
            yield error.args[0]


class _NotSeen(Exception):
    """A function whose form could not be found out; says why."""


def _form(settings: RewardSettings, python_path: Collection[str], *, here: bool) -> Form | None:
    """How the function is called. Raises ConfigError, NoFile; _NotSeen where it did not load in time."""
    seen = look_at(settings.function, python_path)
    if seen is not None:
        return form_of(seen.name, seen.parameters, settings.signature, seen.where)
    return _loaded(settings, python_path, here=here)


def _loaded(settings: RewardSettings, python_path: Collection[str], *, here: bool) -> Form | None:
    """The form of a function that a process of its own has loaded. Raises as `_form` does."""
    from gyre.workloads.rewards.pool import RewardPool

    limit_s = min(settings.start_timeout_s, _LOAD_S)
    with on_path(python_path):
        pool = RewardPool(settings.model_copy(update={"start_timeout_s": limit_s}))
        try:
            pool.begin()
        except ConfigError as error:
            if here or "cannot be loaded" not in error.message:
                raise
            raise _NotSeen(elsewhere(error.message)) from None
        except UserCodeError as error:
            if "longer than" in error.message:
                raise _NotSeen(
                    f"config.reward.function: {settings.function} did not load within {limit_s:g} s, so that its "
                    "parameters were not looked at."
                ) from None
            raise ConfigError(
                f"config.reward.function: {error.message}", hint=error.hint, details=error.details
            ) from None
        finally:
            pool.close()
    return pool.forms[0]


@dataclass(frozen=True, slots=True)
class _Data:
    """What is known of a prepared folder, or of the file of the task `rows`: its setting, the columns besides the
    prompt, and how many rows have no answer."""

    key: str
    folder: Path
    columns: frozenset[str]
    rows: int
    without_answer: int
    in_file: tuple[str | None, ...] | None = None
    """The answers of a file's rows."""

    @classmethod
    def all_of(cls, settings: WorkloadSettings) -> list[_Data]:
        """The job's folders that are here, or its file of rows; whoever checks the data speaks of the others."""
        if settings.data is None:
            return cls._of_rows(settings)
        from gyre.data.folder import PreparedFolder

        found = []
        for key, path in {"config.data.path": settings.data.path, **settings.data.held_out_keys}.items():
            try:
                manifest: Mapping[str, Any] = PreparedFolder(Path(path)).manifest
                found.append(
                    cls(
                        key,
                        Path(path),
                        frozenset(manifest["columns"]),
                        manifest["rows"],
                        manifest["without_answer"],
                    )
                )
            except (ConfigError, OSError):
                continue
        return found

    @classmethod
    def _of_rows(cls, settings: WorkloadSettings) -> list[_Data]:
        if settings.task is None or settings.task.name != "rows":
            return []
        from gyre.workloads.tasks.rows import RowsTask

        try:
            task = RowsTask({"task": settings.task.own})
        except ConfigError:
            return []
        answers = tuple(task.answers)
        return [
            cls(
                "config.task.file",
                task.file,
                task.columns,
                len(answers),
                answers.count(None),
                in_file=answers,
            )
        ]

    def answers(self, count: int) -> list[Any]:
        """Answers of so many rows, from all over the folder."""
        if self.in_file is not None:
            return list(self.in_file[:: max(1, self.rows // count)][:count])
        from gyre.data.folder import PreparedFolder

        found = PreparedFolder(self.folder)
        step = max(1, self.rows // count)
        return [found.meta(row).get("answer") for row in range(0, self.rows, step)][:count]


def _check_answers(data: _Data, function: str) -> None:
    if data.without_answer:
        raise ConfigError(
            f"{data.key}: {data.without_answer} of the {data.rows} rows in {data.folder} have no answer, and "
            f"{function} compares with it.",
            hint="Give each row an 'answer', or take a reward that needs none."
            if data.in_file is not None
            else "Prepare the data with its column of answers (gyre data prepare … --answer COLUMN), or take a reward "
            "that needs none.",
        )


def _check_columns(form: Form, data: _Data, function: str) -> None:
    missing = lacking(form, data.columns)
    if missing:
        raise ConfigError(
            f"config.reward.function: {function} needs {' and '.join(map(repr, missing))}, and the rows in "
            f"{data.folder} have no such column.",
            hint=f"They have {', '.join(sorted(data.columns)) or 'no column besides the prompt'}; a parameter `meta` "
            "gets all of them.",
        )


def _unreadable(data: _Data) -> Iterator[str]:
    answers = data.answers(_ROWS_LOOKED_AT)
    for answer in answers:
        if isinstance(answer, Mapping):
            raise ConfigError(
                f"{data.key}: the answer {answer!r:.100} of a row in {data.folder} is a mapping, and math_verify "
                "compares with a text, a number, or a list of these.",
                hint="Prepare the data with the answer itself.",
            )
    unread = [answer for answer in answers if unreadable_gold(answer)]
    if unread:
        yield (
            f"{data.key}: math_verify cannot read {len(unread)} of {len(answers)} answers that were looked at, "
            f"such as {unread[0]!r:.60}, and gives 0 for whatever is answered to them; `gyre reward math_verify "
            f"{data.folder} --rows 0` lists them."
        )
