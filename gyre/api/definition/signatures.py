"""Whether what a user brings can be called as Gyre calls it: its signature against the protocol's, without a call.

Invariant *certain or silent*: what has no signature that Python can read is let pass.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gyre.errors import ConfigError
from gyre.users_code import is_users
from gyre.workloads.protocols import Learner

_OFFERED = frozenset({"step", "index"})
"""Keywords that a method is called without where its signature does not name them; those of `Learner` must."""

_FIRED = frozenset({"generate", "evaluate", "score", "logprobs", "values"})
"""Methods of the graph's operators, which are offered them."""


def check_made_without_arguments(key: str, cls: type) -> None:
    """Raises ConfigError for a class that cannot be constructed as Gyre constructs a workload."""
    if inspect.isabstract(cls):
        missing = ", ".join(f"{name}()" for name in sorted(getattr(cls, "__abstractmethods__", ())))
        raise ConfigError(f"{key}: {cls.__name__}{_at(cls)} is abstract: it has no {missing}.")
    check_call(key, cls, cls.__name__, (), hint="Gyre constructs a workload without arguments; see setup().")


def check_method(key: str, cls: type, protocol: type, method: str) -> None:
    """Raises ConfigError if a class's method cannot be called as the built-in trainer calls the protocol's."""
    named = next((vars(base)[method] for base in protocol.__mro__ if method in vars(base)), None)
    found = inspect.getattr_static(cls, method, None)
    if named is None or found is None:
        return
    positional, keywords = [], []
    for parameter in list(inspect.signature(named).parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY:
            keywords.append(parameter.name)
        elif parameter.default is parameter.empty:
            positional.append(parameter.name)
    inner = inspect.unwrap(getattr(found, "__func__", found))
    for is_such, what in (
        (inspect.iscoroutinefunction, "is async"),
        (inspect.isgeneratorfunction, "is a generator"),
        (inspect.isasyncgenfunction, "is an async generator"),
    ):
        if is_such(inner):
            raise ConfigError(
                f"{key}: {cls.__name__}.{method}(){_at(inner)} {what}, expected a method that returns its result.",
                hint="Write it as `def`, with `return`.",
            )
    must = set(keywords) - (_OFFERED if method not in vars(Learner) else set())
    is_bound = isinstance(found, staticmethod)
    function = getattr(cls, method)
    before = () if is_bound or isinstance(found, classmethod) else ("self",)
    check_call(
        key,
        function,
        f"{cls.__name__}.{method}",
        (*before, *positional),
        must,
        offered=_OFFERED if method in _FIRED else (),
        shown=f"{method}({', '.join([*positional, *(['*'] if keywords else []), *keywords])})",
    )


def check_call(
    key: str,
    function: Callable[..., Any],
    name: str,
    positional: Iterable[str],
    keywords: Iterable[str] = (),
    *,
    offered: Iterable[str] = (),
    shown: str = "",
    hint: str = "",
) -> None:
    """Raises ConfigError if `function` cannot be called with so many positional arguments and these keywords. Those
    that are `offered` are given where its signature names them."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of an extension's class, say
        return
    positional = tuple(positional)
    named = signature.parameters
    given = [*keywords, *(word for word in offered if word in named)]
    problem = ""
    missing = [word for word in keywords if word not in named and word in _OFFERED | _LEARNERS]
    if missing:
        problem = f"it does not name {' and '.join(sorted(missing))}"
    else:
        try:
            signature.bind(*positional, **dict.fromkeys(given))
        except TypeError as error:
            problem = str(error)
    if problem:
        call = shown or f"{re.split('[.:]', name)[-1]}({', '.join([*positional, *given])})"
        raise ConfigError(
            f"{key}: {name}{signature_shown(signature)}{_at(function)} cannot be called as {call}: {problem}.",
            hint=hint or "Give it these parameters; docs/writing-workloads.md has the protocols.",
        )


_LEARNERS = frozenset({"indices", "group_ids"})


def signature_shown(signature: inspect.Signature) -> str:
    """The parameters' names without their annotations: `(groups, *, step)`."""
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _at(found: Any) -> str:
    """` (file.py, line 7)`, where a function or a class of the user's is defined."""
    try:
        function = inspect.unwrap(found)
        file = inspect.getsourcefile(function)
        if file is None or not is_users(file):
            return ""
        line = inspect.getsourcelines(function)[1]
    except (OSError, TypeError, ValueError):
        return ""
    return f" ({file}, line {line})"


BROUGHT: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gyre.losses": (
        ("logprobs", "advantages", "mask", "settings"),
        (
            *("old_logprobs", "rollout_logprobs", "ref_logprobs", "entropies"),
            *("rows", "norm_length"),
        ),
    ),
    "gyre.advantages": (("group", "rewards"), ()),
    "gyre.engines": (("folder",), ("version", "max_running", "kv_tokens", "python", "extra")),
}
"""By a plug-in's group, how its function is called: positional arguments, and keywords (docs/bring-your-own.md)."""

CALLS_OF_A_CODEC: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "encode": (("raw",), ("word",)),
    "decode": (("data", "into"), ("word",)),
}
"""By a codec's method, how it is called."""
