"""Preparation of a data set: rows become messages, messages become text, text becomes tokens.

Invariants:
- *nothing in silence*: a row becomes a prompt, or is left out and counted by its reason, or is refused with its number
  and column;
- *no option without effect*: an option that cannot change anything is refused by name.

This module must not know what is trained on the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from gyre.data.columns import ANSWER, Columns, check_size
from gyre.data.folder import FolderWriter, meta_line
from gyre.data.layouts import ColumnLayout, columns_of, layout_for
from gyre.data.messages import Messages, Unsupported, messages_of, refuse_columns, without_last_answer
from gyre.data.readers import Row
from gyre.data.sources import read_rows
from gyre.data.tokenizer import TextTokenizer, copy_tokenizer, tokenizer_identity
from gyre.data.tokenizer_check import refuse_another_than_transformers
from gyre.data.values import Unholdable, whole_text
from gyre.errors import ConfigError

_BLOCK = 1024
"""Rows tokenised at once: enough to keep the library's threads busy. The layout is chosen by the first of them."""
_NO_ANSWER = "without an answer"
_TOO_LONG = "too long"


@dataclass(frozen=True, slots=True)
class PromptRecipe:
    """How rows become prompts."""

    split: str = "train"
    subset: str = ""
    """One subset of a data set with several: a name from its card, or a folder in it."""
    layout: str = "auto"
    prompt: str = ""
    """The column of the prompt, or a place in it such as `extra_info.question`."""
    answer: str = ""
    """The column of the answer, or a place in it."""
    keep: tuple[str, ...] = ()
    """The only columns that go to the reward, beside the answer."""
    drop: tuple[str, ...] = ()
    """Columns that do not go to the reward."""
    rename: dict[str, str] = field(default_factory=dict)
    """Other names for columns."""
    keep_prompt: bool = False
    """Whether the columns of the prompt go along as they are: agents ask in messages of their own."""
    keep_unanswered: bool = False
    """Whether rows without an answer are kept, of a data set that has answers."""
    skip_unsupported: bool = False
    """Whether rows that cannot become a prompt are left out and counted, instead of refused."""
    max_meta_bytes: int = 65536
    """The most that goes with a prompt to the reward. It is sent and stored with every group: at this size a step of
    256 prompts has 16 MiB of it."""
    system: str = ""
    """The system message of every conversation, in the place of its own."""
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


def prepare(
    source: Path, out: Path, tokenizer: Path, recipe: PromptRecipe = PromptRecipe()
) -> dict[str, Any]:
    """Writes the folder `out` and returns its manifest; see `gyre.data.folder`. The same input gives the same digest.

    Raises ConfigError if the source, the layout, the tokenizer or its template cannot be used.
    """
    text = TextTokenizer(tokenizer)
    refuse_another_than_transformers(tokenizer, text)
    _check_options(text, tokenizer, recipe)
    rows = read_rows(source, recipe.split, recipe.subset)
    if recipe.limit:
        rows = islice(rows, recipe.limit)
    first = list(islice(rows, _BLOCK))
    if not first:
        raise ConfigError(f"{source} holds no rows.")
    preparation = _Preparation(text, recipe, first)
    with FolderWriter(out) as folder:
        for block in _blocks(chain(first, rows)):
            for token_ids, line in preparation.prompts(block):
                folder.add(token_ids, line)
        if not folder.rows:
            raise preparation.nothing_left()
        about = {
            **preparation.counted(),
            "source": source.name,
            "recipe": asdict(recipe),
            "tokenizer": tokenizer_identity(tokenizer),
            "vocab_size": text.vocab_size,
            "stop_token_ids": list(text.stop_token_ids),
        }
        return folder.finish(about, partial(copy_tokenizer, tokenizer))


@dataclass(frozen=True, slots=True)
class _Problem:
    """A question, and what goes with it to the reward."""

    messages: Messages
    meta: dict[str, Any]
    system_replaced: bool
    """Whether the recipe's system message is in the place of another."""
    ended_with_an_answer: bool
    """Whether the row's conversation had an assistant's turn at its end."""


class _Preparation:
    """Makes prompts of rows, and counts what it leaves out. The layout is chosen by the `first` rows."""

    def __init__(self, text: TextTokenizer, recipe: PromptRecipe, first: list[Row]) -> None:
        self._text = text
        self._recipe = recipe
        self._layout: ColumnLayout = layout_for(
            recipe.layout, first, prompt=recipe.prompt, answer=recipe.answer
        )
        self._columns = Columns(
            columns_of(first),
            prompt=() if recipe.keep_prompt else self._layout.prompt_columns,
            answer=self._layout.answer,
            keep=recipe.keep,
            drop=recipe.drop,
            rename=recipe.rename,
        )
        self._read = 0
        self._left_out: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        """Of the rows that are kept, how many have a column, and in how many something is not as in the file."""
        self._meta_columns: dict[str, None] = {}
        self._has_system = False
        """Whether it was seen that the template writes the recipe's system message."""
        if recipe.keep_unanswered and not self._layout.answer:
            raise ConfigError(
                "--keep-unanswered: no column has answers, so every row is kept.", hint="Leave it out."
            )

    def prompts(self, block: list[Row]) -> Iterator[tuple[list[int], bytes]]:
        """The tokens of each prompt, and what goes with it."""
        found: list[tuple[str, bytes, _Problem]] = []
        for row in block:
            self._read += 1
            try:
                problem = self._problem(row)
                if problem is not None:
                    found.append((self._prompt(problem), self._line(problem), problem))
            except Unsupported as error:
                if not self._recipe.skip_unsupported:
                    hint = "Leave such rows out with --skip-unsupported; they are counted."
                    raise self._refused(f"{error.sentence}.", hint) from None
                self._left_out[error.reason] += 1
            except ConfigError as error:
                raise self._refused(error.message, error.hint) from error
        encoded = self._text.encode([prompt for prompt, _, _ in found], special=not self._recipe.chat)
        for (_, line, problem), token_ids in zip(found, encoded, strict=True):
            if self._recipe.max_prompt_tokens and len(token_ids) > self._recipe.max_prompt_tokens:
                self._left_out[_TOO_LONG] += 1
            elif not token_ids:
                self._left_out["without a token"] += 1
            else:
                self._count(problem)
                yield token_ids, line

    def counted(self) -> dict[str, Any]:
        """What the manifest says of the rows."""
        return {
            "read": self._read,
            "left_out": dict(sorted(self._left_out.items())),
            "layout": self._layout.described(),
            "columns": sorted(self._meta_columns),
            "without_answer": self._kept["without an answer"],
            "answers_by_type": {
                kind: count
                for kind in ("text", "truth value", "list", "mapping")
                if (count := self._kept[kind])
            },
            "ended_with_an_answer": self._kept["ended with an answer"],
            "system_replaced": self._kept["system replaced"],
        }

    def nothing_left(self) -> ConfigError:
        """The error of a data set of which every row was left out."""
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(self._left_out.items()))
        hints = []
        if _NO_ANSWER in self._left_out:
            hints.append(
                f"The answer is read from {self._layout.described()['answer']}: name another column with --answer, or "
                "keep such rows with --keep-unanswered, for a reward that needs no answer."
            )
        if _TOO_LONG in self._left_out:
            hints.append(f"Raise --max-prompt-tokens, which is {self._recipe.max_prompt_tokens}.")
        return ConfigError(f"no row is left of the {self._read} that were read: {why}.", hint=" ".join(hints))

    def _problem(self, row: Row) -> _Problem | None:
        """The row's question with its answer; None for a row that is left out for want of one."""
        refuse_columns(row, self._columns.dropped)
        try:
            answer = self._layout.answer_of(row)
        except Unholdable as error:
            raise Unsupported(
                "a broken text", f"column {self._layout.answer}: the answer holds {error}"
            ) from None
        if answer is None and self._layout.answer and not self._recipe.keep_unanswered:
            self._left_out[_NO_ANSWER] += 1
            return None
        try:
            messages, reference = without_last_answer(messages_of(self._layout.prompt_of(row)))
        except KeyError:
            raise ConfigError(f"it has no column {self._layout.prompt!r}, which others have.") from None
        except Unholdable as error:
            raise Unsupported(
                "a broken text", f"column {self._layout.prompt}: the prompt holds {error}"
            ) from None
        except Unsupported as error:
            raise Unsupported(error.reason, f"column {self._layout.prompt}: {error.sentence}") from None
        return _Problem(
            self._asked(messages),
            self._columns.meta(row, answer, reference),
            system_replaced=bool(self._recipe.system) and any(one["role"] == "system" for one in messages),
            ended_with_an_answer=reference is not None,
        )

    def _asked(self, messages: Messages) -> Messages:
        """The messages with the recipe's own text."""
        asked = [dict(one) for one in messages]
        if self._recipe.suffix:
            last = next((one for one in reversed(asked) if one["role"] == "user"), None)
            if last is None:
                raise Unsupported(
                    "no question", "no message is the user's, so there is no question for --suffix"
                )
            last["content"] += self._recipe.suffix
        if self._recipe.system:
            asked = [one for one in asked if one["role"] != "system"]
            asked.insert(0, {"role": "system", "content": self._recipe.system})
        return asked

    def _prompt(self, problem: _Problem) -> str:
        if not self._recipe.chat:
            return "\n".join(one["content"] for one in problem.messages)
        assert self._text.template is not None
        prompt = self._text.template.render(problem.messages, **self._recipe.template)
        if self._recipe.system and not self._has_system:
            asked = problem.messages[1:]
            self._has_system = prompt != self._text.template.render(asked, **self._recipe.template)
            if not self._has_system:
                raise ConfigError(
                    "the chat template does not write system messages.", hint="Leave --system out."
                )
        try:
            return whole_text(prompt)
        except Unholdable as error:
            raise ConfigError(f"the chat template writes {error}.") from None

    def _line(self, problem: _Problem) -> bytes:
        line = meta_line(problem.meta)
        check_size(line, problem.meta, self._recipe.max_meta_bytes)
        return line

    def _count(self, problem: _Problem) -> None:
        self._meta_columns |= dict.fromkeys(problem.meta)
        self._kept["ended with an answer"] += problem.ended_with_an_answer
        self._kept["system replaced"] += problem.system_replaced
        if ANSWER not in problem.meta:
            self._kept["without an answer"] += 1
            return
        kinds = {str: "text", bool: "truth value", list: "list", dict: "mapping"}
        self._kept[kinds[type(problem.meta[ANSWER])]] += 1

    def _refused(self, sentence: str, hint: str) -> ConfigError:
        between = "," if sentence.startswith("column ") else ":"
        return ConfigError(f"row {self._read}{between} {sentence}", hint=hint)


def _check_options(text: TextTokenizer, folder: Path, recipe: PromptRecipe) -> None:
    """Raises ConfigError for an option that would change nothing, or that cannot be."""
    for option, told in (("--system", recipe.system), ("--suffix", recipe.suffix), *recipe.template.items()):
        if isinstance(told, str):
            try:
                whole_text(told)
            except Unholdable as error:
                raise ConfigError(f"{option} holds {error}.") from None
    if not recipe.chat:
        for option, given in (("--system", recipe.system), ("--template", recipe.template)):
            if given:
                raise ConfigError(
                    f"{option} and --no-chat are both given, and without a chat template {option} changes nothing.",
                    hint="Leave one of them out.",
                )
        return
    if text.template is None:
        raise ConfigError(
            f"the tokenizer in {folder} has no chat template.",
            hint="Take the tokenizer of an instruction-tuned model, or give --no-chat.",
        )
    text.template.check_options(list(recipe.template))


def _blocks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while block := list(islice(rows, _BLOCK)):
        yield block
