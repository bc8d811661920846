"""Reward functions, and how a job names one.

Invariant *scores once, the same way*: a reward depends on the texts and the group's meta alone, so a repeated call
gives the same reward.

The pool's processes import this module, so it must not import numpy, torch or a job's engine.
"""

from __future__ import annotations

import hashlib
import importlib.util
import numbers
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from gyre.errors import ConfigError, nearest
from gyre.workloads.file_modules import module_of_file

RewardFunction = Callable[..., Any]
"""In one of the forms of `gyre.workloads.rewards.forms`."""

UNREADABLE = "unreadable_gold"
"""Among what `math_verify` returns of a sample whose gold answer cannot be read."""


def exact_match(prompt: str, completion: str, meta: Mapping[str, Any]) -> float:
    """1.0 if the completion is `meta["answer"]` to the character, or one of the answers of a list; else 0.0."""
    return 1.0 if completion in gold_answers(meta) else 0.0


def math_verify(prompt: str, completion: str, meta: Mapping[str, Any]) -> float | dict[str, float]:
    """1.0 if the completion's last answer equals `meta["answer"]`, or one of a list, as mathematics; else 0.0. Needs
    `[math]`.

    The answer is in `\\boxed{}`, or after `####`, or else the last expression; `1/2`, `0.5` and `\\frac12` are equal.
    An answer that cannot be read is wrong. Of a completion that thinks, only the text after `</think>` is read. A gold
    answer that cannot be read earns every completion 0.0, and is told as `unreadable_gold`.
    """
    from gyre.workloads.rewards.mathematics import same_answer

    said = completion.rpartition("</think>")[2]
    unreadable = 0
    golds = gold_answers(meta)
    for gold in golds:
        try:
            if same_answer(gold, said):
                return 1.0
        except ValueError:
            unreadable += 1
    return {"score": 0.0, UNREADABLE: 1.0} if unreadable == len(golds) else 0.0


def unreadable_gold(answer: Any) -> bool:
    """Whether `math_verify` cannot read this answer of a data set, so that every completion would earn 0."""
    from gyre.workloads.rewards.mathematics import readable

    try:
        return not any(readable(gold) for gold in gold_answers({"answer": answer}))
    except ConfigError:
        return True


def tells_unreadable(more: Mapping[str, float]) -> bool:
    """Whether `math_verify`, alone or one of several functions, says of a sample that its gold answer is unreadable."""
    return any(name.rpartition(".")[2] == UNREADABLE for name in more)


def gold_answers(meta: Mapping[str, Any]) -> list[str]:
    """The answers that count as right, as texts. Raises ConfigError where there is none, or where it is no text, number
    or list of these."""
    answer = meta.get("answer")
    if answer is None:
        raise ConfigError(
            "config.reward.function: the data has a row without an answer, and this reward compares with it.",
            hint="Prepare the data with its column of answers: gyre data prepare … --answer COLUMN.",
        )
    listed = list(answer) if isinstance(answer, list | tuple) else [answer]
    if not listed or not all(isinstance(one, str | numbers.Number) for one in listed):
        raise ConfigError(
            f"config.reward.function: the answer {answer!r:.100} of a row is no text, number or list of these.",
            hint="Prepare the data with the answer itself, or write a reward function that reads this one.",
        )
    return [one if isinstance(one, str) else str(one) for one in listed]


BUILTIN: dict[str, RewardFunction] = {"exact_match": exact_match, "math_verify": math_verify}


def split_path(path: str) -> tuple[str, str]:
    """The file or module, and the name in it. Raises ConfigError."""
    module, _, name = path.rpartition(":")
    if not module or not name.isidentifier():
        near = nearest(path, BUILTIN) if path else ""
        raise ConfigError(
            f"config.reward.function: {path!r} is no reward function{f'; {near}' if near.startswith('did') else '.'}",
            hint="Write it as path/to/file.py:function or package.module:function, or take one of "
            f"{', '.join(BUILTIN)}.",
        )
    return module, name


def load_function(path: str) -> RewardFunction:
    """The built-in function of this name, or the one at `package.module:function` or `path/to/file.py:function`.
    Raises ConfigError that names what cannot be found, and what the module itself raises."""
    if path in BUILTIN:
        check_builtin(path)
        return BUILTIN[path]
    module_name, name = split_path(path)
    try:
        module = (
            _from_file(file_of(module_name)) if module_name.endswith(".py") else import_module(module_name)
        )
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(
            f"config.reward.function: {path!r} cannot be loaded: {error}.", hint=_how_to_import(path, error)
        ) from error
    if not hasattr(module, name):
        raise no_such_function(path, name, [key for key, value in vars(module).items() if callable(value)])
    function: RewardFunction = getattr(module, name)
    if not callable(function):
        raise ConfigError(
            f"config.reward.function: {path!r} cannot be called: it is of type {type(function).__name__}."
        )
    return function


def _how_to_import(path: str, error: Exception) -> str:
    """What to do about an import that a file's place is to blame for, else nothing. A file that is named by its path is
    in no package, and its folder is not on the import path."""
    module, _, name = path.rpartition(":")
    if not module.endswith(".py") or not isinstance(error, ImportError):
        return ""
    file = file_of(module)
    root, parts = file.parent, [file.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    if "no known parent package" in str(error):
        return f"Name it in its package, {'.'.join(parts)}:{name}, with python_path: [{root}]."
    beside = (error.name or "").partition(".")[0]
    if beside and ((file.parent / f"{beside}.py").is_file() or (file.parent / beside).is_dir()):
        return f"{beside} is beside the file: give python_path: [{file.parent}]."
    return ""


def check_builtin(name: str) -> None:
    """Raises ConfigError if the package is missing that a built-in function needs."""
    if name == "math_verify" and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "config.reward.function: 'math_verify' needs the package math-verify.",
            hint="Install gyre-rl[math].",
        )


def file_of(path: str) -> Path:
    return Path(path).expanduser().resolve()


def no_such_function(path: str, name: str, known: list[str]) -> ConfigError:
    near = nearest(name, [one for one in known if not one.startswith("_")])
    return ConfigError(
        f"config.reward.function: {path.rpartition(':')[0]} has no {name!r}"
        + (f"; {near}" if near.startswith("did") else "."),
        hint=near[:1].upper() + near[1:] if near.startswith("known") else "",
    )


def _from_file(where: Path) -> Any:
    name = f"gyre_reward_{hashlib.blake2b(str(where).encode(), digest_size=6).hexdigest()}"
    if name not in sys.modules:
        if not where.is_file():
            raise ImportError(f"there is no file {where}")
        module_of_file(name, where)
    return sys.modules[name]
