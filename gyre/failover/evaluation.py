"""An evaluation: each of its numbers in one place, with what it means and how people are shown it.

From `Evaluation` follow the event `Evaluated` and the snapshot's row, REST's schema and the page's types, the table of
`gyre show`, the curves of the page, what sinks are told, and the metrics of Prometheus. A new number is a field here,
made by `number`, and what computes it in `gyre.workloads.trainer.evaluation.results`.

Pure. This module must not know how a number is computed, nor what draws it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

Form = Literal["number", "share"]
"""`share`: from 0 to 1, written in percent."""

_SHOWN = "shown"
"""The key of a `Shown` in a field's metadata."""


@dataclass(frozen=True, slots=True)
class Shown:
    """How people are shown a number: `title` is above its column and beside its curve, `unit` is "" where it has none,
    `meaning` says what it is, as part of a sentence. `column`: it has one in the table of `gyre show`; of those that
    are `dispensable` the greatest goes first on a narrow terminal, and 0 is never left out. `curve`: the page draws it
    by itself; the chart of the whole evaluation has accuracy, reward and pass@k."""

    title: str
    meaning: str
    form: Form = "number"
    unit: str = ""
    column: bool = True
    dispensable: int = 0
    curve: bool = False


def _shown(title: str, meaning: str, form: Form = "number", **more: Any) -> dict[str, Any]:
    """The metadata of a field; REST has the meaning, too."""
    return {_SHOWN: Shown(title, meaning, form, **more), "meaning": meaning}


def number(title: str, meaning: str, form: Form = "number", *, unit: str = "", dispensable: int = 6) -> Any:
    """A number that every evaluation has from now on, None in those of before. It has a column, a curve and a metric of
    its own."""
    shown = _shown(title, meaning, form, unit=unit, dispensable=dispensable, curve=True)
    return field(default=None, metadata=shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a policy version's answers to a held-out set earned. A field has the default that it has in journals of
    before it was there. `pass_at` and `best_of` are by k, as text."""

    version: int
    set: str = "held_out"
    prompts: int = field(metadata=_shown("prompts", "prompts of the set", dispensable=2))
    count: int = field(metadata=_shown("answers", "samples of all prompts", column=False))
    reward_mean: float | None = field(default=None, metadata=_shown("reward", "mean reward of the samples"))
    reward_std: float | None = field(
        default=None,
        metadata=_shown("deviation", "standard deviation of the rewards over all samples", dispensable=1),
    )
    accuracy: float | None = field(metadata=_shown("accuracy", "share of samples that are right", "share"))
    """Null where nothing says what is right: neither a reward (`config.evaluation.threshold`) nor the reward function,
    by the number that `right_by` names."""
    threshold: float | None = None
    pass_at: dict[str, float] = field(
        default_factory=dict,
        metadata=_shown("pass@", "by k, the chance that one of k samples is right", "share", dispensable=3),
    )
    best_of: dict[str, float] = field(
        default_factory=dict,
        metadata=_shown("best of", "by k, the expected largest reward of k samples", dispensable=4),
    )
    by: dict[str, Any] = field(default_factory=dict)
    """By a column's value: `count`, `reward_mean` and `accuracy`."""
    right_by: str = ""
    """The number beside the reward that says which samples are right, as `reward.acc`; "" where the threshold does."""
    distinct: int = 0
    """How many different answers there are, by their tokens; 0 where that is not known."""
    components: dict[str, float] = field(
        default_factory=dict,
        metadata=_shown(
            "components", "the mean of each number that the reward function returned", dispensable=5
        ),
    )
    """The mean of each number that the reward function returned beside the reward, as `reward.NAME`."""

    @property
    def key(self) -> str:
        return f"{self.set}/{self.version}"


SHOWN: dict[str, Shown] = {
    one.name: one.metadata[_SHOWN] for one in fields(Evaluation) if _SHOWN in one.metadata
}
"""What is shown of an evaluation, by name, in the order of its columns."""

_FIRST = (
    *("version", "set", "prompts", "count", "reward_mean", "reward_std", "accuracy", "threshold"),
    *("pass_at", "best_of", "by"),
)
LATER = tuple(one.name for one in fields(Evaluation) if one.name not in _FIRST)
"""The fields since the first release."""
