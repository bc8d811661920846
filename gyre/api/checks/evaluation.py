"""How held-out prompts are to be answered: settings that give nothing to see, and a column that no prompt has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gyre.config import JobSpec
from gyre.config.sections import WorkloadSettings
from gyre.errors import ConfigError, nearest


def check(spec: JobSpec, *, here: bool) -> Iterator[str]:
    """Yields warnings; raises ConfigError for the first mistake."""
    settings = WorkloadSettings.read(spec.config)
    evaluation = settings.evaluation
    if not spec.run.evaluate_every:
        if "evaluation" in spec.config:
            yield "config.evaluation: is given, but run.evaluate_every is 0: nothing is evaluated."
        return
    if evaluation.n > 1 and evaluation.temperature == 0:
        yield (
            f"config.evaluation.n: {evaluation.n} samples of each prompt at temperature 0 are {evaluation.n} times the "
            "same; give config.evaluation.temperature."
        )
    longest, model = evaluation.max_new_tokens or 0, settings.model
    if model is not None and longest >= model.max_positions:
        raise ConfigError(
            f"config.evaluation.max_new_tokens: {longest} leaves no room for a prompt: the model has "
            f"{model.max_positions} positions (config.model.max_positions)."
        )
    if (
        evaluation.by
        and settings.data is not None
        and spec.run.data in (None, "gyre.data.prepared:PreparedData")
    ):
        folders = [settings.data.path, *settings.data.held_out_sets.values()]
        if all(Path(folder).is_dir() for folder in folders):
            _check_column(spec, evaluation.by)


def _check_column(spec: JobSpec, column: str) -> None:
    """Raises ConfigError where no held-out prompt has the column."""
    from gyre.data.prepared import PreparedData

    data = PreparedData(spec.config)
    sets = data.held_out_sets(spec.run.held_out or data.held_out_at_most(spec.run.most_held_out))
    known = {key for prompts in sets.values() for prompt in prompts for key in prompt.meta}
    if column not in known:
        raise ConfigError(
            f"config.evaluation.by: no held-out prompt has a column {column!r}; {nearest(column, sorted(known))}"
        )
