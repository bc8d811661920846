"""Layouts: which columns of a row are its messages and its answer.

| layout | columns |
| --- | --- |
| `gsm8k` | `question`, and `answer`, whose last line is `#### 72` |
| `openr1-math` | `problem`, and `answer`; rows without an answer (proofs) are left out |
| `verl` | `prompt` as a list of messages, `reward_model.ground_truth`, `data_source` |
| `plain` | the columns given as `prompt` (text or a list of messages) and `answer` |

This module must not know of tokens or files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gyre.errors import ConfigError

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with its answer. `meta` goes with the group to the reward."""

    messages: Messages
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)


Layout = Callable[[Mapping[str, Any]], Problem | None]
"""Returns None for a row without an answer."""


def layout_for(name: str, columns: list[str], *, prompt: str = "", answer: str = "") -> Layout:
    """The layout of this name; `auto` takes the one whose columns are there. Raises ConfigError if none fits."""
    if prompt or answer:
        return _plain(prompt or "prompt", answer or "answer", columns)
    if name == "auto":
        name = next((known for known, (_, needs) in _KNOWN.items() if needs <= set(columns)), "plain")
    if name == "plain":
        return _plain("prompt", "answer", columns)
    if name not in _KNOWN:
        raise ConfigError(f"layout {name!r} is not one of auto, plain, {', '.join(_KNOWN)}.")
    layout, needs = _KNOWN[name]
    if not needs <= set(columns):
        raise ConfigError(
            f"layout {name!r} needs the columns {', '.join(sorted(needs))}; there are {', '.join(columns)}."
        )
    return layout


def _gsm8k(row: Mapping[str, Any]) -> Problem | None:
    _, mark, answer = str(row["answer"]).rpartition("####")
    return Problem(_asked(row["question"]), answer.strip().replace(",", "")) if mark else None


def _openr1(row: Mapping[str, Any]) -> Problem | None:
    answer = str(row["answer"] or "").strip()
    kept = {key: row[key] for key in ("uuid", "source") if row.get(key) is not None}
    return Problem(_asked(row["problem"]), answer, kept) if answer else None


def _verl(row: Mapping[str, Any]) -> Problem | None:
    told = row["reward_model"] or {}
    if not isinstance(told, Mapping):
        raise ConfigError(f"reward_model is {told!r:.200}, not a mapping with ground_truth.")
    answer = told.get("ground_truth")
    kept = {"data_source": row["data_source"]} if row.get("data_source") else {}
    return Problem(_asked(row["prompt"]), str(answer), kept) if answer not in (None, "") else None


def _plain(prompt: str, answer: str, columns: list[str]) -> Layout:
    for column in (prompt, answer):
        if column not in columns:
            raise ConfigError(
                f"there is no column {column!r}; there are {', '.join(columns)}.",
                hint="Name them with --prompt and --answer.",
            )

    def layout(row: Mapping[str, Any]) -> Problem | None:
        found = row[answer]
        return Problem(_asked(row[prompt]), str(found)) if found not in (None, "") else None

    return layout


def _asked(prompt: Any) -> Messages:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and all(
        isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in prompt
    ):
        return [{"role": str(one["role"]), "content": str(one["content"])} for one in prompt]
    raise ConfigError(
        f"a prompt is {prompt!r:.200}, neither text nor a list of messages with role and content."
    )


_KNOWN: dict[str, tuple[Layout, set[str]]] = {
    "verl": (_verl, {"prompt", "reward_model"}),
    "openr1-math": (_openr1, {"problem", "answer"}),
    "gsm8k": (_gsm8k, {"question", "answer"}),
}
