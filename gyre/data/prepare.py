"""Preparation of a data set: rows become messages, messages become text, text becomes tokens.

This module must not know what is trained on the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from gyre.data.folder import FolderWriter
from gyre.data.layouts import Layout, Problem, layout_for
from gyre.data.sources import Row, read_rows
from gyre.data.tokenizer import FILES, TextTokenizer, tokenizer_identity
from gyre.errors import ConfigError
from gyre.rollouts.samples import OWN_LIMIT, checked_limit

_BLOCK = 1024
"""Rows tokenised at once: enough to keep the library's threads busy."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How rows become prompts."""

    split: str = "train"
    subset: str = ""
    """One subset of a data set with several: a name from its card, or a folder in it."""
    layout: str = "auto"
    prompt: str = ""
    """The column of the prompt, for the `plain` layout."""
    answer: str = ""
    """The column of the answer, for the `plain` layout."""
    system: str = ""
    """A system message before every conversation."""
    suffix: str = ""
    """Text after every question, such as how to answer."""
    chat: bool = True
    """Whether the tokenizer's chat template is applied; otherwise the question is the prompt."""
    template: dict[str, Any] = field(default_factory=dict)
    """The chat template's own options, such as `enable_thinking`."""
    max_prompt_tokens: int = 0
    """Longer prompts are left out; 0 keeps all."""
    limit: int = 0
    """Rows to read; 0 reads all."""


def prepare(source: Path, out: Path, tokenizer: Path, recipe: Recipe = Recipe()) -> dict[str, Any]:
    """Writes the folder `out` and returns its manifest; see `gyre.data.folder`. The same input gives the same digest.

    Raises ConfigError if the source, the layout, the tokenizer or its template cannot be used.
    """
    text = TextTokenizer(tokenizer)
    if recipe.chat and text.template is None:
        raise ConfigError(
            f"the tokenizer in {tokenizer} has no chat template.",
            hint="Take the tokenizer of an instruction-tuned model, or give --no-chat.",
        )
    rows = read_rows(source, recipe.split, recipe.subset)
    if recipe.limit:
        rows = islice(rows, recipe.limit)
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{source} holds no rows.")
    layout = layout_for(recipe.layout, list(first), prompt=recipe.prompt, answer=recipe.answer)
    left_out: Counter[str] = Counter()
    read = 0
    with FolderWriter(out) as folder:
        for block in _blocks(chain([first], rows)):
            read += len(block)
            problems = list(_problems(block, layout, left_out, first=read - len(block) + 1))
            texts = [_text(problem, text, recipe) for problem in problems]
            encoded = text.encode(texts, special=not recipe.chat) if texts else []
            for problem, token_ids in zip(problems, encoded, strict=True):
                if recipe.max_prompt_tokens and len(token_ids) > recipe.max_prompt_tokens:
                    left_out["too long"] += 1
                elif not token_ids:
                    left_out["empty"] += 1
                else:
                    folder.add(token_ids, {**problem.meta, "answer": problem.answer})
        about = {
            "read": read,
            "left_out": dict(sorted(left_out.items())),
            "source": source.name,
            "recipe": asdict(recipe),
            "tokenizer": tokenizer_identity(tokenizer),
            "vocab_size": text.vocab_size,
            "stop_token_ids": list(text.stop_token_ids),
        }
        files = {name: tokenizer / name for name in FILES if (tokenizer / name).exists()}
        return folder.finish(about, files)


def _blocks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while block := list(islice(rows, _BLOCK)):
        yield block


def _problems(block: list[Row], layout: Layout, left_out: Counter[str], *, first: int) -> Iterator[Problem]:
    for number, row in enumerate(block, start=first):
        try:
            problem = layout(row)
        except KeyError as error:
            raise ConfigError(f"row {number} lacks the column {error}, which row 1 has.") from error
        except ConfigError as error:
            raise ConfigError(f"row {number}: {error.message}", hint=error.hint) from error
        if problem is None:
            left_out["without an answer"] += 1
            continue
        if row.get(OWN_LIMIT) is not None:
            try:
                problem.meta[OWN_LIMIT] = checked_limit(row[OWN_LIMIT], f"row {number}")
            except ValueError as error:
                raise ConfigError(f"{error}.") from None
        yield problem


def _text(problem: Problem, text: TextTokenizer, recipe: Recipe) -> str:
    messages = [dict(one) for one in problem.messages]
    if recipe.suffix:
        messages[-1]["content"] += recipe.suffix
    if not recipe.chat:
        return "\n".join(one["content"] for one in messages)
    if recipe.system:
        messages.insert(0, {"role": "system", "content": recipe.system})
    assert text.template is not None
    return text.template.render(messages, **recipe.template)
