"""Layouts: which column of a row is its prompt, and where its answer is.

| layout | prompt | answer |
| --- | --- | --- |
| `verl` | `prompt`, a list of messages | `reward_model.ground_truth` |
| `openr1-math` | `problem` | `answer` |
| `math` | `problem` | the last `\\boxed{}` of `solution` |
| `gsm8k` | `question` | `answer`, what follows the last `####` |
| `qa` | `question` | `answer` |
| `search-r1` | `question` | `golden_answers` |
| `instruction` | `instruction`, with `input` below it | none |
| `messages` | `messages`, a list of them | `ground_truth` or `answer`, where there is one |
| `plain` | the columns that are named | |

One rule chooses: the prompt is the first of `PROMPTS` that is a column, the answer is in the first of `ANSWERS`. A name
of either replaces the rule for it. A name with dots is looked up in mappings: `extra_info.answer`.

This module must not know of tokens or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gyre.data.messages import Unsupported
from gyre.data.values import answer_of, holds_nothing
from gyre.errors import ConfigError, nearest

Row = Mapping[str, Any]

PROMPTS = ("prompt", "problem", "question", "instruction", "messages", "conversations")
ANSWERS = ("reward_model", "answer", "golden_answers", "ground_truth", "solution")

MARK = "####"
AS_IT_IS = ""
AFTER_MARK = f"after the last {MARK}"
LAST_BOX = "the last \\boxed{}"


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """Where a row's prompt and answer are. `answer` is "" where the data set has none."""

    name: str
    prompt: str
    answer: str = ""
    reading: str = AS_IT_IS
    """How the answer is found in its column."""
    below: str = ""
    """A column whose text stands below the prompt's, where it has any."""

    def prompt_of(self, row: Row) -> Any:
        """The prompt's cell. Raises KeyError if the row has none."""
        prompt, below = looked_up(row, self.prompt), row.get(self.below)
        if not self.below or not isinstance(prompt, str) or holds_nothing(below):
            return prompt
        if not isinstance(below, str):
            raise Unsupported("no text", f"its {self.below} is {below!r:.100}, not a text")
        return f"{prompt}\n\n{below}"

    def answer_of(self, row: Row) -> Any:
        """The row's answer, None where it has none. Raises Unholdable."""
        if not self.answer:
            return None
        try:
            found = looked_up(row, self.answer)
        except KeyError:
            return None
        if isinstance(found, str) and self.reading == AFTER_MARK:
            found = found.rpartition(MARK)[2].strip().replace(",", "") if MARK in found else None
        elif isinstance(found, str) and self.reading == LAST_BOX:
            found = last_box(found)
        elif isinstance(found, str) and self.name == "openr1-math":
            found = found.strip()
        return answer_of(found)

    @property
    def prompt_columns(self) -> frozenset[str]:
        """The columns that are the prompt, and nothing else."""
        return frozenset({self.prompt, self.below} - {""})

    def described(self) -> dict[str, str]:
        """What a manifest says of the layout."""
        reading = f", {self.reading}" if self.reading else ""
        return {
            "name": self.name,
            "prompt": f"{self.prompt}, {self.below}" if self.below else self.prompt,
            "answer": f"{self.answer}{reading}" if self.answer else "",
        }


_KNOWN = {
    layout.name: layout
    for layout in (
        ColumnLayout("verl", "prompt", "reward_model.ground_truth"),
        ColumnLayout("openr1-math", "problem", "answer"),
        ColumnLayout("math", "problem", "solution", LAST_BOX),
        ColumnLayout("gsm8k", "question", "answer", AFTER_MARK),
        ColumnLayout("qa", "question", "answer"),
        ColumnLayout("search-r1", "question", "golden_answers"),
        ColumnLayout("instruction", "instruction", below="input"),
        ColumnLayout("messages", "messages"),
        ColumnLayout("plain", "prompt", "answer"),
    )
}
NAMES = ("auto", *_KNOWN)


def layout_for(name: str, rows: Sequence[Row], *, prompt: str = "", answer: str = "") -> ColumnLayout:
    """The layout of this name; `auto` follows the rule above. `rows` are the first of the data set. Raises ConfigError
    if none fits, or if a name and columns are given that contradict each other."""
    columns = columns_of(rows)
    if name not in NAMES:
        raise ConfigError(f"--layout: {name!r} is not a layout; {nearest(name, NAMES)}")
    given = [option for option, column in (("--prompt", prompt), ("--answer", answer)) if column]
    if given and name not in ("auto", "plain"):
        raise ConfigError(
            f"--layout {name} and {' and '.join(given)} are both given, and {name} has columns of its own.",
            hint="Leave one of them out.",
        )
    for option, column in (("--prompt", prompt), ("--answer", answer)):
        if column and not any(_has(row, column) for row in rows):
            raise _no_column(option, column, rows, columns)
    if name not in ("auto", "plain"):
        return _named(name, columns)
    found = prompt or next((one for one in PROMPTS if one in columns), "")
    if not found:
        raise ConfigError(
            f"no column is known to be the prompt; there are {', '.join(columns)}.",
            hint="Name it with --prompt, and the answer's with --answer.",
        )
    return _chosen(name, found, answer, rows, columns, named=name == "plain" or bool(given))


def _no_column(option: str, name: str, rows: Sequence[Row], columns: list[str]) -> ConfigError:
    """The mistake in the name: the column, or the key of a mapping that its dots lead to."""
    above, _, key = name.rpartition(".")
    if above:
        cells = [looked_up(row, above) for row in rows if _has(row, above)]
        keys = {str(key) for cell in cells if isinstance(cell, Mapping) for key in cell}
        if keys:
            return ConfigError(f"{option}: {above} has no key {key!r}; {nearest(key, keys)}")
    return ConfigError(f"{option}: there is no column {name!r}; {nearest(name, columns)}")


def columns_of(rows: Iterable[Row]) -> list[str]:
    """The columns of all these rows, in the order in which they first appear."""
    return list(dict.fromkeys(column for row in rows for column in row))


def looked_up(row: Row, name: str) -> Any:
    """The cell of a column, or of a place in mappings that dots lead to. Raises KeyError with the name."""
    if name in row:
        return row[name]
    found: Any = row
    for part in name.split("."):
        if found is None:  # a mapping that this row leaves empty
            return None
        if not isinstance(found, Mapping) or part not in found:
            raise KeyError(name)
        found = found[part]
    return found


def last_box(text: str) -> str | None:
    """What the last `\\boxed{…}` (or `\\fbox{…}`) of a solution holds, with the braces in it; None if there is none.
    Boxes in boxes are one."""
    found, at = None, 0
    while (
        start := min(
            (i for i in (text.find(mark, at) for mark in ("\\boxed", "\\fbox")) if i >= 0), default=-1
        )
    ) >= 0:
        at = start + len("\\boxed" if text.startswith("\\boxed", start) else "\\fbox")
        inside, end = _braced(text, at)
        if inside is not None:
            found, at = inside, end
    return found.strip() if found and found.strip() else None


def _braced(text: str, at: int) -> tuple[str | None, int]:
    """What stands in the braces that begin at or after blanks from `at`, or the one word there; and where it ends."""
    while at < len(text) and text[at] == " ":
        at += 1
    if at < len(text) and text[at] != "{":  # TeX takes `\boxed 5`, too
        end = at
        while end < len(text) and not text[end].isspace() and text[end] not in "$.,;":
            end += 1
        return text[at:end] or None, end
    depth, start = 0, at + 1
    while at < len(text):
        if text[at] == "\\":
            at += 1  # \{ and \} are characters, not braces
        elif text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if not depth:
                return text[start:at], at + 1
        at += 1
    return None, at


def _named(name: str, columns: list[str]) -> ColumnLayout:
    layout = _KNOWN[name]
    needs = [layout.prompt, layout.answer.partition(".")[0]] if layout.answer else [layout.prompt]
    if any(column not in columns for column in needs):
        raise ConfigError(
            f"layout {name!r} needs the columns {', '.join(needs)}; there are {', '.join(columns)}."
        )
    if name == "messages":
        answer = next((one for one in ("ground_truth", "answer") if one in columns), "")
        return ColumnLayout(name, layout.prompt, answer)
    return ColumnLayout(
        name, layout.prompt, layout.answer, layout.reading, layout.below if layout.below in columns else ""
    )


def _chosen(
    name: str, prompt: str, answer: str, rows: Sequence[Row], columns: list[str], *, named: bool
) -> ColumnLayout:
    reading = AS_IT_IS
    if not answer and name == "plain":
        answer = "answer" if "answer" in columns else ""
    elif not answer:
        answer, reading = _answer_of_rule(rows, columns, prompt)
    below = "input" if prompt == "instruction" and "input" in columns and not named else ""
    known = (
        one for one in _KNOWN.values() if (one.prompt, one.answer, one.reading) == (prompt, answer, reading)
    )
    name = "plain" if named else next((one.name for one in known), "plain")
    if prompt == "messages" and not named:
        name = "messages"
    return ColumnLayout(name, prompt, answer, reading, below)


def _answer_of_rule(rows: Sequence[Row], columns: list[str], prompt: str) -> tuple[str, str]:
    for column in ANSWERS:
        if column not in columns or column == prompt:
            continue
        cells = [row.get(column) for row in rows]
        if column == "reward_model":
            if any(isinstance(cell, Mapping) and "ground_truth" in cell for cell in cells):
                return "reward_model.ground_truth", AS_IT_IS
        elif column == "answer":
            texts = [cell for cell in cells if isinstance(cell, str) and cell.strip()]
            marked = sum(MARK in text.strip().splitlines()[-1] for text in texts)
            return column, AFTER_MARK if marked and 2 * marked >= len(texts) else AS_IT_IS
        elif column == "solution":
            if any(isinstance(cell, str) and last_box(cell) for cell in cells):
                return column, LAST_BOX
        else:
            return column, AS_IT_IS
    return "", AS_IT_IS


def _has(row: Row, name: str) -> bool:
    try:
        looked_up(row, name)
    except KeyError:
        return False
    return True
