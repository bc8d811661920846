"""What the methods of a role's class must return to the built-in trainer, checked in the process that made it.

A user's method may return anything. It is checked at once, where the method is known with its file and line, so that
neither the trainer nor the ledger nor another role meets what cannot be used; what is refused is the class's failure.
Numbers and arrays become the types of the protocols: a torch scalar as a reward, say, a float.

This module must not know of vertices, calls or the trainer.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from gyre.errors import UserCodeError
from gyre.rollouts.sample_checks import (
    OF_TOKENS,
    problem_with_extras,
    problem_with_reward,
    problem_with_rollouts,
    problem_with_sample,
    real_number,
    shown,
)
from gyre.rollouts.samples import Group, Sample
from gyre.workloads.protocols import Actor, Learner, PublishesInBackground, PublishesModel, Rollout

EVALUATE = Rollout.evaluate.__name__
EXPORT_WEIGHTS = Actor.export_weights.__name__


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known to the caller of what a method returns: the protocol's `method`, the size of the vocabulary, the
    newest policy version, and how many rollouts a generated group has (each None where it is not known); whether
    samples must have their rewards; and the extras that the method must add."""

    method: str
    vocabulary: int | None = None
    newest: int | None = None
    samples: int | None = None
    rewards: bool = False
    extras: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Given:
    """The groups that a method was given, as they were before, since it may change the objects: ids, prompts, and the
    tokens of each sample."""

    ids: tuple[int, ...]
    prompts: tuple[Any, ...]
    tokens: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, groups: Any) -> Given | None:
        """None where `groups` is no list of groups."""
        if not isinstance(groups, list) or not all(isinstance(group, Group) for group in groups):
            return None
        return cls(
            tuple(group.id for group in groups),
            tuple(group.prompt_ids for group in groups),
            tuple(tuple(sample.token_ids for sample in group.samples) for group in groups),
        )


def checked(
    expected: Expected,
    given: Given | None,
    value: Any,
    function: Callable[..., Any],
    *,
    version: int | None = None,
) -> Any:
    """The value that `function` returned, its numbers made plain; `version` is the policy version that it was asked
    for, if any. Raises UserCodeError, which names the method with its file and line, what it returned and what was
    expected."""
    answered = expected.method == EVALUATE and isinstance(value, list)  # with samples, which others score
    check = None if answered else _CHECKS.get(expected.method)
    problem = ""
    if check is not None:
        problem = check(value) or _other_version(expected.method, value, version)
    elif given is not None:
        value, problem = _groups(expected, given, value)
    if not problem:
        return value
    method, place = named(function)
    raise UserCodeError(
        f"{method} ({place}) returned {problem}.",
        details={"method": method, "place": place, "returned": True},
    )


def named(function: Callable[..., Any]) -> tuple[str, str]:
    """`module:Class.method` of a bound method, and `file.py:12`, where it begins; "" for a file that is not known."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(plain, "__code__", None)
    file = os.path.basename(code.co_filename) if code is not None else ""
    place = f"{file}:{code.co_firstlineno}" if code is not None else ""
    owner = type(function.__self__) if hasattr(function, "__self__") else None
    module = owner.__module__ if owner is not None else getattr(plain, "__module__", "")
    if module == USER_SCRIPT:
        module = file
    name = f"{owner.__qualname__}.{plain.__name__}" if owner is not None else plain.__qualname__
    return f"{module}:{name}", place


USER_SCRIPT = "gyre_user_script"
"""The module that a class given by its file is loaded as."""


# -- groups -----------------------------------------------------------------------------------------


def _groups(expected: Expected, given: Given, value: Any) -> tuple[Any, str]:
    if not isinstance(value, list) or not all(isinstance(group, Group) for group in value):
        return value, f"{_kind_of(value)}, expected the list of groups that it was given"
    ids = [group.id for group in value]
    if ids != list(given.ids):
        return value, f"groups {shown(ids)}, expected those that it was given: {shown(list(given.ids))}"
    for group, prompt, tokens in zip(value, given.prompts, given.tokens, strict=True):
        if group.prompt_ids is not prompt and not _is_same(group.prompt_ids, prompt):
            return value, f"group {group.id} with another prompt, expected it as it was given"
        if not isinstance(group.samples, list):
            return value, f"group {group.id} with samples that are {_kind_of(group.samples)}, expected a list"
        generates = not tokens
        if not generates and len(group.samples) != len(tokens):
            return value, f"{len(group.samples)} samples of group {group.id}, expected {len(tokens)}"
        wanted = expected.samples if generates else None
        if generates and not group.samples and wanted is None:
            return value, f"no samples of group {group.id}, expected at least one"
        for index, sample in enumerate(group.samples):
            problem = _problem_with_sample(expected, sample, None if generates else tokens[index])
            if problem:
                return value, f"{problem} (sample {index} of group {group.id})"
        problem = problem_with_rollouts(group.samples)
        if problem:
            return value, f"{problem} (group {group.id})"
        count = len(group.rollouts)
        if wanted is not None and count != wanted:
            what = "samples" if count == len(group.samples) else "rollouts"
            return value, f"{count} {what} of group {group.id}, expected {wanted} (config.sampling.n)"
    return value, ""


def _problem_with_sample(expected: Expected, sample: Any, tokens: Any) -> str:
    """The problem of a sample, whose numbers are made plain. Of one that was given, with these `tokens`, what may have
    been added is looked at, and whether it is the sample that was given in its place: what was added goes by places."""
    if not isinstance(sample, Sample):
        return f"{_kind_of(sample)}, expected a Sample"
    if isinstance(sample.extras, dict):
        sample.extras = {name: _as_extra(name, value) for name, value in sample.extras.items()}
    if tokens is None:
        sample.token_ids = _as_vector(sample.token_ids, "iu", np.int32)
        sample.logprobs = _as_vector(sample.logprobs, "fiu", np.float32)
        sample.mask = None if sample.mask is None else _as_vector(sample.mask, "b", np.bool_)
        sample.versions = tuple(sample.versions) if isinstance(sample.versions, list) else sample.versions
        problem = problem_with_sample(
            sample, vocabulary=expected.vocabulary, newest=expected.newest, needed=expected.extras
        )
        if not problem and not len(sample.token_ids):
            problem = "no tokens, expected at least one"
    elif sample.token_ids is not tokens and not _is_same(sample.token_ids, tokens):
        problem = "a sample with other tokens, expected the samples as they were given, in their order"
    else:
        problem = problem_with_extras(sample.extras, len(tokens), needed=expected.extras)
    if problem or (sample.reward is None and not expected.rewards):
        return problem
    if sample.reward is None:
        return "no reward (None): set sample.reward, a finite real number"
    problem = problem_with_reward(sample.reward)
    if not problem:
        sample.reward = real_number(sample.reward)
    return problem


def _as_extra(name: Any, value: Any) -> Any:
    """What the learners read as float32, and a tensor as an array or a number."""
    if name in OF_TOKENS:
        return _as_vector(value, "fiu", np.float32)
    if not callable(getattr(value, "detach", None)):
        return value
    array = _array_of(value)
    return value if array is None else array if array.ndim else array.item()


def _as_vector(value: Any, kinds: str, dtype: type[np.generic]) -> Any:
    """A list, a tensor or an array of another width as one of `dtype`; what is no vector of numbers of these kinds, or
    does not fit, as it is, to be refused."""
    if isinstance(value, np.ndarray) and value.dtype == dtype:
        return value
    array = _array_of(value)
    if array is None or array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        return value
    if dtype is np.int32 and array.size and not -(1 << 31) <= int(array.min()) <= int(array.max()) < 1 << 31:
        return array
    with np.errstate(over="ignore"):  # what is infinite in float32 is refused
        return array.astype(dtype)


def _array_of(value: Any) -> np.ndarray[Any, Any] | None:
    try:
        if callable(
            getattr(value, "detach", None)
        ):  # torch's, perhaps on a device, or of a dtype that numpy lacks
            value = value.detach().cpu()
            value = value.float() if value.is_floating_point() else value
        return np.asarray(value)
    except Exception:  # whatever a user's object does when it is asked for its elements
        return None


def _is_same(one: Any, other: Any) -> bool:
    try:
        return bool(np.array_equal(one, other))
    except Exception:  # an object of the user's
        return False


# -- anything else ----------------------------------------------------------------------------------


def _evaluation(value: Any) -> str:
    if isinstance(value, dict) and _is_count(value.get("version")) and _is_count(value.get("count")):
        rest = (value[key] for key in ("accuracy", "reward_mean") if value.get(key) is not None)
        if all(real_number(number) is not None for number in rest):
            return ""
    return f'{_kind_of(value)}, expected {{"version": …, "accuracy": a number, "count": …}}'


def _facts(value: Any) -> str:
    return "" if isinstance(value, dict) else f"{_kind_of(value)}, expected a dict"


def _facts_or_nothing(value: Any) -> str:
    return "" if value is None else _facts(value)


def _state(value: Any) -> str:
    if isinstance(value, dict) and _is_whole(value.get("step")) and isinstance(value.get("digest"), str):
        return ""
    return f'{_kind_of(value)}, expected {{"step": an integer, "digest": a text}}'


def _weights(value: Any) -> str:
    if (
        isinstance(value, Sequence)
        and len(value) == 2
        and isinstance(value[1], bytes | bytearray | memoryview)
    ):
        return _manifest(value[0])
    return f"{_kind_of(value)}, expected a manifest and a buffer of bytes"


def _manifest(value: Any) -> str:
    expected = '{"version": …, "checksum": a text, "size_bytes": …} and plain data'
    if (
        isinstance(value, dict)
        and _is_count(value.get("version"))
        and isinstance(value.get("checksum"), str)
        and _is_count(value.get("size_bytes"))
        and _is_plain(value)
    ):
        return ""
    return f"the manifest {shown(value)}, expected {expected}"


def _other_version(method: str, value: Any, asked: int | None) -> str:
    manifest = value[0] if method == EXPORT_WEIGHTS else value
    if asked is None or method not in _OF_VERSIONS or manifest is None or manifest["version"] == asked:
        return ""
    return f"policy version {manifest['version']}, expected {asked}, which it was asked for"


def _manifest_or_nothing(value: Any) -> str:
    return "" if value is None else _manifest(value)


_CHECKS: Mapping[str, Callable[[Any], str]] = {
    EVALUATE: _evaluation,
    Actor.warm_start.__name__: _facts_or_nothing,
    Learner.begin.__name__: _facts_or_nothing,
    Learner.accumulate.__name__: _facts_or_nothing,
    Learner.apply.__name__: _facts,
    Learner.state.__name__: _state,
    EXPORT_WEIGHTS: _weights,
    PublishesModel.publish_model.__name__: _manifest_or_nothing,
    PublishesInBackground.model_published.__name__: _manifest,
}
"""By method, of those that do not return groups: what is wrong with a value, or ""."""


_OF_VERSIONS = (
    EXPORT_WEIGHTS,
    PublishesModel.publish_model.__name__,
    PublishesInBackground.model_published.__name__,
)
"""Methods that return the manifest of a policy version."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_plain(value: Any) -> bool:
    try:
        msgpack.packb(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _kind_of(value: Any) -> str:
    return "None" if value is None else f"{shown(value)} ({type(value).__name__})"
