r"""Answers of mathematical data sets: how they are read, and when a completion gives the same one.

A gold answer is text as data sets have it: `\$18.90`, `32,\!348`, `50\%`, `\text{Evelyn}`, `1010_2`, `9:30`, `(C)`.
Words are compared as words, times of day and repeating decimals exactly, and everything else as mathematics by the
package math-verify.

Invariants:
- *the last answer counts*: of several boxes in a completion the last is its answer. A gold of several values takes as
  many boxes from the end;
- *the answer itself is right*: the gold in a box earns 1;
- *no two answers in one*: a gold of one value is not met by a box of several.

A pool's process imports this module; math-verify is imported when the first answer is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{}$\\][^\s{}$]*))")
_HASHES = re.compile(r"^\s*####\s*(.+?)\s*$", re.MULTILINE)
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|textrm|operatorname)\s*\{([^{}]*)\}")
_SPACED = re.compile(r"\\[!,;:> ]|~|\\quad|\\qquad|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_THIN_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\!,|\\,|\\ |\\;)(?=\d{3}(?!\d))")
_REPEATING = re.compile(r"(?P<sign>-?)(?P<whole>\d*)\.(?P<fixed>\d*)\\overline\s*\{(?P<repeated>\d+)\}")
_UNIT_IN_TEXT = re.compile(r"\\text\{\s*(-?[\d.,]+)\s+([^{}]*)\}")
_UNIT_IN_WORDS = re.compile(r"^(-?[\d.,]+)(?:\s+[A-Za-z]{2,})+$")
_SCIENTIFIC = re.compile(r"(?<![\w.])(-?\d+(?:\.\d+)?)[eE]\+?(-?\d+)(?![\w.])")
_TIME = re.compile(r"\d{1,2}:\d{2}(:\d{2})?( ?[ap]\.?m\.?)?", re.IGNORECASE)
_BASE = re.compile(r"(?P<digits>[0-9A-Fa-f]+)_\{?(?P<base>\d+)\}?")
_WORD = re.compile(r"[^\W\d_]{2,}")
_FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "pi", "arcsin", "arccos", "arctan")
)
_LONGEST_WORD_OF_LETTERS = 3
"""A longer run of letters is a word; a shorter one of small letters may be a product, such as `xy`."""


def same_answer(gold: str, completion: str) -> bool:
    """Whether the completion's answer equals the gold one. Raises ValueError if the gold cannot be read."""
    wanted = _bare(gold)
    if not wanted:
        raise ValueError(f"the answer {gold!r} of the data set cannot be read as mathematics")
    marked = _marked(completion)
    said = _bare(completion if marked is None else marked)
    if _plain(said) == _plain(wanted):
        return True
    if _is_words(wanted) or _TIME.fullmatch(_plain(wanted)):
        return False
    if marked is not None and _BASE.fullmatch(_plain(wanted)) and _BASE.fullmatch(_plain(said)):
        return False  # in another base, or other digits
    parse, verify = _library()
    values = _values(wanted)
    if not values:
        raise ValueError(f"the answer {gold!r} of the data set cannot be read as mathematics")
    if marked is None:
        answers = [parse(_readable(completion), parsing_timeout=None)]
    else:
        answers = [list(_values(one)) for one in _candidates(completion, values, said)]
    return any(bool(answer) and verify(list(values), answer, timeout_seconds=None) for answer in answers)


def readable(gold: str) -> bool:
    """Whether a gold answer can be read. Needs `[math]` for what is neither a word nor a number."""
    wanted = _bare(gold)
    if not wanted:
        return False
    return bool(re.fullmatch(r"-?[\d.,]*\d", wanted)) or _is_words(wanted) or bool(_values(wanted))


@lru_cache(maxsize=1)
def _library() -> tuple[Callable[..., list[Any]], Callable[..., bool]]:
    from math_verify import parse, verify

    # math-verify's own time limits are signals, and the pool has a limit: they stay off, and so do its warnings of it.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return parse, verify


@lru_cache(maxsize=4096)
def _values(answer: str) -> tuple[Any, ...]:
    """What math-verify reads in an answer: an expression, and its text."""
    parse, _ = _library()
    return tuple(parse(f"${_readable(answer)}$", parsing_timeout=None))


def _candidates(completion: str, values: tuple[Any, ...], said: str) -> list[str]:
    """The completion's answer; with a gold of several values also its last boxes together."""
    boxes = _boxes(completion)
    count = len(values[0].args) if type(values[0]).__name__ in ("FiniteSet", "Tuple") else 1
    return [said, ", ".join(boxes[-count:])] if 1 < count <= len(boxes) else [said]


def _marked(completion: str) -> str | None:
    """What is in the completion's last box, or after its last `####`; None where there is neither."""
    boxes = _boxes(completion)
    if boxes:
        return boxes[-1]
    after = _HASHES.findall(completion)
    return after[-1] if after else None


def _boxes(text: str) -> list[str]:
    """What is in each whole box, in order; of a box in a box the inner."""
    found = []
    for match in _BOX.finditer(text):
        if match["bare"] is not None:
            found.append(match["bare"].rstrip(".,;"))
            continue
        depth, start = 1, match.end()
        for at in range(start, len(text)):
            if text[at] in "{}" and text[at - 1] != "\\":
                depth += 1 if text[at] == "{" else -1
                if depth == 0:
                    found.append(text[start:at])
                    break
    return found


def _bare(answer: str) -> str:
    """The answer without what is around it: a box, dollar signs of mathematics, a full stop."""
    found = answer.strip()
    boxes = _boxes(found)
    if boxes and found.lstrip("$ ").startswith(("\\boxed", "\\fbox")):
        found = boxes[-1]
    found = re.sub(r"^\\[(\[](.*)\\[)\]]$", r"\1", found.strip(), flags=re.DOTALL)
    found = re.sub(r"(?<!\\)\$", "", found).strip()
    return found.rstrip(".").strip() if not found.endswith("\\.") else found


def _readable(answer: str) -> str:
    r"""As math-verify reads it: `\$` and spaces within numbers are gone, repeating decimals are fractions."""
    answer = _UNIT_IN_WORDS.sub(r"\1", answer.strip().lstrip("€£¥"))
    found = _UNIT_IN_TEXT.sub(r"\1 \\text{\2}", answer.replace("\\$", ""))
    found = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", _THIN_THOUSANDS.sub(",", found))
    found = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), found)
    return _REPEATING.sub(_as_fraction, found)


def _as_fraction(match: re.Match[str]) -> str:
    whole, fixed, repeated = match["whole"] or "0", match["fixed"], match["repeated"]
    top = int(whole + fixed + repeated) - int(whole + fixed)
    return rf"{match['sign']}\frac{{{top}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def _plain(answer: str) -> str:
    """For comparison as text: without spaces, case, marks of currency, and the commands that only set type."""
    found = _readable(answer)
    while (inner := _TEXT.sub(r"\1", found)) != found:
        found = inner
    found = _SPACED.sub("", found).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    found = re.sub(r"([_^])\{(\w)\}", r"\1\2", re.sub(r"_\{(\d+)\}", r"_\1", found))
    return re.sub(r"\s+", "", found).casefold()


def _is_words(answer: str) -> bool:
    r"""Whether it is words and no mathematics: `\text{Evelyn}`, `no solution`, `ABC`."""
    inner = answer
    texts = _TEXT.findall(answer)
    only_text = bool(texts) and not _TEXT.sub("", answer).strip()
    if only_text:
        inner = " ".join(texts)
    words = _WORD.findall(inner)
    if not words or "\\" in inner or re.search(r"[=^_+*/<>|{}\[\]]", inner):
        return False
    if only_text:
        return not re.match(r"\s*[-+.\d]", inner)  # a number with its unit is a number
    if re.search(r"\d", inner) or _FUNCTIONS & set(words):
        return False
    long = [word for word in words if len(word) > _LONGEST_WORD_OF_LETTERS or word != word.lower()]
    return bool(long) or " " in inner.strip()
