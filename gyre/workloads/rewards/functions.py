"""Reward functions, and how a job names one.

Invariant *scores once, the same way*: a reward depends on the texts and the group's meta alone, so a repeated call
gives the same reward.

The pool's processes import this module, so it must not import numpy, torch or a job's engine.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from gyre.errors import ConfigError

RewardFunction = Callable[[str, str, Mapping[str, Any]], float]
"""The reward for the prompt's text, the completion's text and the group's meta."""


def exact_match(prompt_text: str, completion_text: str, meta: Mapping[str, Any]) -> float:
    """1.0 if the completion is `meta["answer"]` to the character, else 0.0."""
    return 1.0 if completion_text == meta["answer"] else 0.0


def math_verify(prompt_text: str, completion_text: str, meta: Mapping[str, Any]) -> float:
    """1.0 if the completion's last answer equals `meta["answer"]` as mathematics, else 0.0. Needs `[math]`.

    The answer is in `\\boxed{}`, or else the last expression; `1/2`, `0.5` and `\\frac12` are equal. An answer that
    cannot be read is wrong. Of a completion with a thinking part, only the text after `</think>` is read.
    """
    from math_verify import parse, verify

    answer = str(meta["answer"])
    said = completion_text.rpartition("</think>")[2]
    # math-verify's own time limits are signals, and the pool has a limit: they stay off.
    gold = parse(answer if "\\boxed" in answer or "$" in answer else f"${answer}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the answer {answer!r} of the data set cannot be read as mathematics")
    return 1.0 if verify(gold, parse(said, parsing_timeout=None), timeout_seconds=None) else 0.0


BUILTIN: dict[str, RewardFunction] = {"exact_match": exact_match, "math_verify": math_verify}


def load_function(path: str) -> RewardFunction:
    """The built-in function of this name, or the one at `package.module:function` or `path/to/file.py:function`.
    Raises ConfigError that names what cannot be found."""
    if path in BUILTIN:
        if path == "math_verify" and importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "config.reward.function 'math_verify' needs the package math-verify.",
                hint="Install gyre-rl[math].",
            )
        return BUILTIN[path]
    module_name, _, name = path.rpartition(":")
    if not module_name or not name:
        raise ConfigError(
            f"config.reward.function is {path!r}.",
            hint=f"Write it as 'package.module:function', or take one of {', '.join(BUILTIN)}.",
        )
    try:
        module = _from_file(Path(module_name)) if module_name.endswith(".py") else import_module(module_name)
        function: RewardFunction = getattr(module, name)
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(f"config.reward.function {path!r} cannot be loaded: {error}.") from error
    if not callable(function):
        raise ConfigError(f"config.reward.function {path!r} is not callable.")
    return function


def _from_file(path: Path) -> Any:
    where = path.resolve()
    name = f"gyre_reward_{hashlib.blake2b(str(where).encode(), digest_size=6).hexdigest()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, where)
        if spec is None or spec.loader is None:
            raise ImportError(f"{where} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
