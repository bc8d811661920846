"""A trial of a reward function on rows of a data set, without a job: what `gyre reward` prints.

Where no completion is given, each row's own answer is scored, and an empty completion beside it, so that a function
that cannot tell them apart is seen. A function of the user's may want the answer in a form of its own: of `FORMATS` the
one that earns most is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from gyre.config.sections import RewardSettings
from gyre.errors import ConfigError, UserCodeError
from gyre.workloads.rewards.calls import Texts, ground_truth
from gyre.workloads.rewards.forms import form_of
from gyre.workloads.rewards.functions import BUILTIN, tells_unreadable
from gyre.workloads.rewards.pool import RewardPool
from gyre.workloads.rewards.signatures import look_at

FORMATS = ("{answer}", "\\boxed{{{answer}}}", "#### {answer}", "<answer>{answer}</answer>")
"""How an answer may stand in a completion."""
_FORMATS_OF = {"exact_match": FORMATS[:1], "math_verify": FORMATS[1:2]}
Outcome = tuple[float | None, dict[str, float], str]
"""A sample's reward, the further numbers, and the sentence of the error where there is no reward."""
_PROMPTS = ("prompt", "question", "problem", "input", "messages")


@dataclass(slots=True)
class TrialRow:
    """`reward` and `empty` are None where the function failed; `error` is then its sentence."""

    row: int
    prompt: str
    answer: Any
    completion: str = ""
    reward: float | None = None
    empty: float | None = None
    more: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """`own_text`: a completion was given. `format` is how the rows' own answers were put into completions."""

    function: str
    form: str
    rows: list[TrialRow]
    own_text: bool
    format: str

    @property
    def failed(self) -> int:
        return sum(bool(row.error) for row in self.rows)

    def summary(self) -> str:
        count = len(self.rows)
        rows = f"{count} row{'' if count == 1 else 's'}"
        if self.own_text:
            means = f"mean {_mean([row.reward for row in self.rows])}"
        elif self.rows and all(row.answer is None for row in self.rows):
            means = f"mean {_mean([row.empty for row in self.rows])} for an empty completion"
        else:
            its = "" if self.format == FORMATS[0] else f" as {self.format.format(answer='…')}"
            means = (
                f"mean {_mean([row.reward for row in self.rows])} for the answer itself{its}, "
                f"{_mean([row.empty for row in self.rows])} for an empty completion"
            )
        return f"{rows}: {means}; {self.failed} failed"

    def warnings(self) -> Iterator[str]:
        rewards = [row.reward for row in self.rows if row.reward is not None]
        every = rewards + ([] if self.own_text else [row.empty for row in self.rows if row.empty is not None])
        tried = self.own_text or any(row.answer is not None for row in self.rows)
        if tried and rewards and len(every) > 1 and len(set(every)) == 1:
            yield (
                f"every reward is {every[0]:g}; a job learns nothing from rewards that do not differ."
                if not self.own_text
                else f"every reward is {every[0]:g}, whatever the row."
            )
        elif tried and not self.own_text and rewards and all(row.reward == row.empty for row in self.rows):
            yield "each row's own answer earns what an empty completion earns."
        unread = [row for row in self.rows if tells_unreadable(row.more)]
        if unread:
            named = ", ".join(f"{row.row} ({row.answer!r:.40})" for row in unread[:8])
            yield f"{len(unread)} answers of the data cannot be read, and earn 0 whatever is answered: rows {named}."
        unanswered = sum(row.answer is None for row in self.rows)
        if not self.own_text and unanswered:
            which = (
                "No row has an answer"
                if unanswered == len(self.rows)
                else f"{unanswered} rows have no answer"
            )
            yield f"{which} to try, so an empty completion was scored. Give one with --answer TEXT."

    def as_dict(self) -> dict[str, Any]:
        return {
            "function": self.function,
            "form": self.form,
            "format": None if self.own_text else self.format,
            "rows": [asdict(row) for row in self.rows],
            "failed": self.failed,
            "mean": _plain_mean([row.reward for row in self.rows]),
            "mean_empty": None if self.own_text else _plain_mean([row.empty for row in self.rows]),
            "warnings": list(self.warnings()),
        }


def try_reward(settings: RewardSettings, data: Path, completion: str | None, count: int) -> Trial:
    """Score the first `count` rows of the data, or all with 0. Raises ConfigError, and UserCodeError where the
    function's module cannot be loaded."""
    samples = list(islice(_samples(data), count or None))
    if not samples:
        raise ConfigError(f"{data} holds no rows.")
    rows = [TrialRow(number, prompt, answer) for number, (prompt, answer, _) in enumerate(samples)]
    for part in settings.parts:
        if part.function not in BUILTIN and (seen := look_at(part.function)) is not None:
            form_of(seen.name, seen.parameters, part.signature, seen.where)
    pool = RewardPool(settings)
    try:
        pool.begin()

        def scored(completions: Sequence[str]) -> list[Outcome]:
            work = [
                (prompt, said, meta | {"finish_reason": "stop"})
                for (prompt, _, meta), said in zip(samples, completions, strict=True)
            ]
            return _scored(pool, work)

        best = [""] * len(rows) if completion is None else [completion] * len(rows)
        outcomes: list[Outcome] | None = None
        failing: tuple[list[Outcome], list[str], str] | None = None
        chosen = FORMATS[0]
        if completion is not None:
            outcomes = scored(best)
        else:
            for form in _formats(settings):
                said = ["" if row.answer is None else form.format(answer=_one(row.answer)) for row in rows]
                tried = scored(said)
                if outcomes is None or _worth(tried) > _worth(outcomes):
                    outcomes, best, chosen = tried, said, form
                elif failing is None and any(error for _, _, error in tried):
                    failing = tried, said, form
            if failing is not None and outcomes is not None and not _worth(outcomes):
                outcomes, best, chosen = failing  # nothing earns anything, and here is why
        assert outcomes is not None
        empty: list[Outcome] = [(None, {}, "")] * len(rows)
        if completion is None:
            empty = scored([""] * len(rows))
    finally:
        pool.close()
    _note(rows, best, outcomes, empty)
    names = ", ".join(part.function for part in settings.parts)
    forms = ", ".join(form.name for form in pool.forms)
    return Trial(names, forms, rows, completion is not None, chosen)


def _note(
    rows: Sequence[TrialRow], said: Sequence[str], outcomes: Sequence[Outcome], empty: Sequence[Outcome]
) -> None:
    """Put what came of each row into it: of what was `said`, and of an empty completion."""
    for row, text, (reward, more, error), (nothing, _, other) in zip(
        rows, said, outcomes, empty, strict=True
    ):
        row.completion, row.reward, row.more, row.empty = text, reward, more, nothing
        row.error = error or other


def _formats(settings: RewardSettings) -> tuple[str, ...]:
    """The forms of an answer that are worth trying: those of a built-in function, or else all."""
    known = [_FORMATS_OF.get(part.function, FORMATS) for part in settings.parts]
    return known[0] if all(one == known[0] for one in known) else FORMATS


def _scored(pool: RewardPool, work: Sequence[Texts]) -> list[Outcome]:
    """The rewards; where the function fails on one of them, each by itself."""
    try:
        return [(reward, more, "") for reward, more in pool.scored(work)]
    except UserCodeError:
        found: list[Outcome] = []
        for one in work:
            try:
                ((reward, more),) = pool.scored([one])
                found.append((reward, more, ""))
            except UserCodeError as error:
                found.append((None, {}, error.message))
        return found


def _worth(outcomes: list[Outcome]) -> float:
    return sum(reward for reward, _, _ in outcomes if reward is not None)


def _one(answer: Any) -> str:
    """An answer as text; of several, in a list or in a mapping such as Search-R1's `{"target": […]}`, the first."""
    first = answer
    while first and isinstance(first, list | Mapping):
        first = first[0] if isinstance(first, list) else next(iter(first.values()))
    return first if isinstance(first, str) else json.dumps(first, ensure_ascii=False)


def _samples(data: Path) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The prompt, the answer and the meta of each row."""
    if data.is_dir() and (data / "manifest.json").is_file():
        yield from _prepared(data)
        return
    if data.is_dir():
        raise ConfigError(f"{data} is no prepared data set.", hint="Make one with `gyre data prepare`.")
    from gyre.data.sources import read_rows

    for row in read_rows(data, "train", ""):
        name = next((one for one in _PROMPTS if one in row), None)
        if name is None:
            raise ConfigError(
                f"{data}: none of the columns {', '.join(row)} is a prompt.",
                hint="Prepare it with `gyre data prepare … --prompt COLUMN`, and give the folder.",
            )
        meta = {key: value for key, value in row.items() if key != name}
        yield _text(row[name]), _answer(meta), meta


def _prepared(folder: Path) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    from gyre.data.folder import TOKENIZER, PreparedFolder
    from gyre.data.tokenizer import TextTokenizer

    found = PreparedFolder(folder)
    tokenizer = TextTokenizer(folder / TOKENIZER)
    for row in range(found.rows):
        meta = found.meta(row)
        yield tokenizer.decode(found.prompt_ids(row).tolist()), _answer(meta), meta


def _answer(meta: Mapping[str, Any]) -> Any:
    try:
        return ground_truth(meta)
    except ConfigError:
        return None


def _text(prompt: Any) -> str:
    """A prompt of messages as the text of its last one."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content", "")
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


def _plain_mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


def _mean(values: Sequence[float | None]) -> str:
    mean = _plain_mean(values)
    return "none" if mean is None else f"{mean:.2f}"
