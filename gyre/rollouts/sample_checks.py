"""What a sample must be before anything is trained on it, whoever made it.

Tokens are in the vocabulary, log-probs are finite, not above 0 and as many as the tokens, version runs cover the
tokens, a reward is a finite real number, and what operators added is finite and of the sample's length. A mask has a
token that was drawn, and log-probs of 0 where none was; rows of one rollout earned the same.

Each function returns a sentence's part that says what was found and what was expected, or "" where nothing is wrong.
This module must not know who made a sample, or what becomes of one that is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from gyre.engines.replies import LOGPROB_SLACK
from gyre.rollouts.samples import Group, InstanceRun, Sample, VersionRun

MOST_TOKENS = 1 << 31
"""Token ids are int32; where the vocabulary is not known they are below this."""

FINISH_REASONS = ("stop", "length")

OF_TOKENS = ("ref_logprobs", "values")
"""The extras that the built-in learners read: float32, one a token."""

_NUMBERS = (bool, int, float, Fraction)
_WHOLE = (int, np.integer)
"""Named, for a union that is written where it is asked for is made anew each time: there is one a token run."""

_REAL_MAX = float(np.finfo(np.float32).max)
"""Learners compute in float32, where a larger reward is infinite."""


def real_number(value: Any) -> float | None:
    """The value as a finite float; None where it is no finite real number. Scalars and one-element arrays of numpy and
    torch are numbers, as are bools; texts are none."""
    if isinstance(value, _NUMBERS):
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if abs(number) <= _REAL_MAX else None  # NaN compares as False
    if hasattr(value, "item") and hasattr(value, "shape"):
        if math.prod(value.shape) != 1:
            return None
        inner = value.item()
        return real_number(inner) if isinstance(inner, bool | int | float) else None
    return None


def shown(value: Any) -> str:
    """The value for a sentence: short, and whatever its repr does."""
    try:
        text = repr(value)
    except Exception as error:  # a user's object
        text = f"an object whose repr raised {type(error).__name__}"
    return text if len(text) <= 80 else f"{text[:79]}…"


def problem_with_reward(reward: Any) -> str:
    if real_number(reward) is not None:
        return ""
    kind = type(reward).__name__
    return f"a reward that is {shown(reward)} ({kind}), expected a finite real number"


def problem_with_tokens(token_ids: Any, vocabulary: int | None) -> str:
    if not isinstance(token_ids, np.ndarray) or token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        return f"token_ids that are {_kind_of(token_ids)}, expected an int32 array of one dimension"
    if not token_ids.size:
        return ""
    most = MOST_TOKENS if vocabulary is None else vocabulary
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= most:
        return f"token id {low if low < 0 else high}, expected ids of the vocabulary, 0 to {most - 1}"
    return ""


def problem_with_logprobs(logprobs: Any, count: int) -> str:
    """`count` is how many tokens there are."""
    if not isinstance(logprobs, np.ndarray) or logprobs.ndim != 1 or logprobs.dtype.kind != "f":
        return f"logprobs that are {_kind_of(logprobs)}, expected a float32 array of one dimension"
    if len(logprobs) != count:
        return f"{len(logprobs)} log-probs for {count} tokens, expected one for each"
    return _problem_with_values("log-prob", logprobs, most=LOGPROB_SLACK)


def problem_with_versions(versions: Any, count: int, *, newest: int | None) -> str:
    """`newest` is the newest policy version that there is, None where that is not known."""
    if type(versions) is tuple and len(versions) == 1 and _made_all(versions[0], count, newest):
        return ""
    runs = versions if isinstance(versions, tuple) else ()
    if not isinstance(versions, tuple) or not all(isinstance(run, VersionRun) for run in runs):
        return f"versions that are {shown(versions)}, expected a tuple of VersionRun"
    covered = 0
    for run in runs:
        if not all(_is_whole(number) for number in (run.version, run.start, run.end)):
            return f"the version run {shown(run)}, expected three integers"
        if run.start != covered or run.end < run.start:
            return f"version runs that leave a gap at token {covered}, expected runs that cover the tokens"
        covered = run.end
        if run.version < 0 or (newest is not None and run.version > newest):
            known = f"0 to {newest}" if newest is not None else "0 and newer"
            return f"tokens of policy version {run.version}, expected a version that exists: {known}"
    if covered != count:
        return f"version runs that cover {covered} of {count} tokens"
    return ""


def _made_all(run: Any, count: int, newest: int | None) -> bool:
    """Whether one version made all tokens, as of nearly every sample: seen at once, for a step has thousands."""
    return (
        type(run) is VersionRun
        and type(run.version) is type(run.start) is type(run.end) is int
        and run.start == 0
        and run.end == count
        and 0 <= run.version <= (run.version if newest is None else newest)
    )


def problem_with_instances(instances: Any, count: int) -> str:
    """`count` is how many tokens there are; nobody need know who generated them."""
    runs = instances if isinstance(instances, tuple) else ()
    if not isinstance(instances, tuple) or not all(isinstance(run, InstanceRun) for run in runs):
        return f"instances that are {shown(instances)}, expected a tuple of InstanceRun"
    covered = 0
    for run in runs:
        if not isinstance(run.name, str) or not is_whole_text(run.name):
            return f"tokens of the instance {shown(run.name)}, expected a name"
        if not _is_whole(run.start) or not _is_whole(run.end) or not covered <= run.start <= run.end <= count:
            return f"the instance run {shown(run)}, expected runs one after another within {count} tokens"
        covered = run.end
    return ""


def problem_with_mask(mask: Any, logprobs: NDArray[np.float32]) -> str:
    """`logprobs` are those of all tokens, which nothing is wrong with."""
    if mask is None:
        return ""
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != logprobs.shape:
        return f"a mask that is {_kind_of(mask)}, expected a bool array of {len(logprobs)} elements"
    if not mask.any():
        return "a mask by which no token was drawn, expected one at least: there is nothing to train on"
    others = np.flatnonzero(~mask & (logprobs != 0.0))
    if len(others):
        first = int(others[0])
        return (
            f"a log-prob of {logprobs[first]:g} at token {first}, which by the mask was not drawn, expected 0"
        )
    return ""


def problem_with_rollouts(samples: Sequence[Sample]) -> str:
    """Of the samples of a group, each of which is right by itself."""
    numbers = [sample.rollout for sample in samples]
    if all(number is None for number in numbers):
        return ""
    for index, number in enumerate(numbers):
        if number is None or not _is_whole(number) or number < 0:
            return (
                f"sample {index} that is a row of rollout {shown(number)}, expected the rollout's number, as other "
                "samples have it"
            )
    earned: dict[int, tuple[int, Any]] = {}
    for index, sample in enumerate(samples):
        first, reward = earned.setdefault(sample.rollout or 0, (index, sample.reward))
        if sample.reward != reward:
            return (
                f"samples {first} and {index}, rows of rollout {sample.rollout}, with the rewards {shown(reward)} and "
                f"{shown(sample.reward)}, expected one reward of a rollout"
            )
    return ""


def problem_with_extras(extras: Any, count: int, *, needed: Iterable[str] = ()) -> str:
    """`needed` are names that must be there."""
    if not isinstance(extras, dict) or not all(isinstance(key, str) for key in extras):
        return f"extras that are {_kind_of(extras)}, expected a dict with names as keys"
    for name in extras:
        if not is_whole_text(name):
            return f"an extra with the name {shown(name)}, expected a text without half characters"
    for name in needed:
        if name not in extras:
            return f"no extras[{name!r}], expected a float32 array of {count} elements"
    for name, value in extras.items():
        problem = _problem_with_extra(name, value, count)
        if problem:
            return problem
    return ""


def _problem_with_extra(name: str, value: Any, count: int) -> str:
    where = f"extras[{name!r}]"
    if name in OF_TOKENS:
        if not isinstance(value, np.ndarray) or value.shape != (count,) or value.dtype.kind != "f":
            return f"{where} that is {_kind_of(value)}, expected a float32 array of {count} elements"
        return _problem_with_values(where, value, most=LOGPROB_SLACK if name == "ref_logprobs" else math.inf)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufSU":
            return f"{where} that is {_kind_of(value)}, expected an array of numbers or texts"
        return _problem_with_values(where, value, most=math.inf) if value.dtype.kind == "f" else ""
    if isinstance(value, float | np.floating):
        return "" if math.isfinite(value) else f"{where} that is {value}, expected a finite number"
    try:
        msgpack.packb(value.item() if isinstance(value, np.generic) else value)
    except (TypeError, ValueError, OverflowError):  # what msgpack says of a value that it cannot hold
        return f"{where} that is {_kind_of(value)}, expected a number, a text or a numpy array"
    return ""


def problem_with_sample(
    sample: Any, *, vocabulary: int | None, newest: int | None = None, needed: Iterable[str] = ()
) -> str:
    """All of a generated sample; its reward only where it has one."""
    if not isinstance(sample, Sample):
        return f"a sample that is {_kind_of(sample)}, expected a Sample"
    problem = problem_with_tokens(sample.token_ids, vocabulary)
    if problem:
        return problem
    count = len(sample.token_ids)
    if sample.finish_reason not in FINISH_REASONS:
        return f"the finish_reason {shown(sample.finish_reason)}, expected one of {', '.join(FINISH_REASONS)}"
    return (
        problem_with_logprobs(sample.logprobs, count)
        or problem_with_versions(sample.versions, count, newest=newest)
        or (problem_with_reward(sample.reward) if sample.reward is not None else "")
        or problem_with_extras(sample.extras, count, needed=needed)
        or problem_with_instances(sample.instances, count)
        or problem_with_mask(sample.mask, sample.logprobs)
    )


def problem_with_group(group: Group, *, vocabulary: int | None, newest: int | None = None) -> str:
    """The first problem of a group's samples, with the sample's number, of its rollouts, or of its prompt."""
    if not len(group.prompt_ids):  # rows of sessions that begin with different tokens
        return f"group {group.id} has no token with which all of its samples begin"
    if _is_plainly_right(group.samples, vocabulary, newest):
        return ""
    for index, sample in enumerate(group.samples):
        problem = problem_with_sample(sample, vocabulary=vocabulary, newest=newest)
        if problem:
            return f"sample {index} of group {group.id} has {problem}"
    problem = problem_with_rollouts(group.samples)
    return f"group {group.id} has {problem}" if problem else ""


def _is_plainly_right(samples: list[Sample], vocabulary: int | None, newest: int | None) -> bool:
    """Whether no sample has a problem, seen at all of their tokens together: a reduction for each array of some tokens
    would take longer than all else. False also where that cannot be seen so; then each is looked at."""
    if not samples or not all(_is_plain(sample, newest) for sample in samples):
        return False
    most = MOST_TOKENS if vocabulary is None else vocabulary
    token_ids = np.concatenate([sample.token_ids for sample in samples])
    logprobs = np.concatenate([sample.logprobs for sample in samples])
    if not token_ids.size:
        return True
    right = token_ids.min() >= 0 and token_ids.max() < most
    return bool(right and math.isfinite(logprobs.min()) and logprobs.max() <= LOGPROB_SLACK)


def _is_plain(sample: Any, newest: int | None) -> bool:
    """Whether a sample has arrays of the usual types and nothing else that has a problem; what is in the arrays is not
    looked at."""
    if not isinstance(sample, Sample):
        return False
    token_ids, logprobs = sample.token_ids, sample.logprobs
    if not isinstance(token_ids, np.ndarray) or token_ids.dtype != np.int32 or token_ids.ndim != 1:
        return False
    if not isinstance(logprobs, np.ndarray) or logprobs.dtype != np.float32:
        return False
    count = len(token_ids)
    return (
        logprobs.shape == (count,)
        and sample.finish_reason in FINISH_REASONS
        and not problem_with_versions(sample.versions, count, newest=newest)
        and (sample.reward is None or real_number(sample.reward) is not None)
        and not (sample.extras and problem_with_extras(sample.extras, count))
        and isinstance(sample.extras, dict)
        and not problem_with_instances(sample.instances, count)
        and not sample.is_row
    )


def _problem_with_values(what: str, values: np.ndarray[Any, Any], *, most: float) -> str:
    """Of a float array. Two reductions find NaN, infinities and what is above `most`."""
    if not values.size:
        return ""
    low, high = float(values.min()), float(values.max())  # either is NaN where any value is
    if math.isfinite(low) and math.isfinite(high) and high <= most:
        return ""
    found = low if not math.isfinite(low) else high
    bound = " and at most 0" if most == LOGPROB_SLACK else ""
    return f"a {what} of {found:g}, expected finite numbers{bound}"


def is_whole_text(text: str) -> bool:
    """Whether it can be written as UTF-8: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_whole(value: Any) -> bool:
    return isinstance(value, _WHOLE) and not isinstance(value, bool)


def _kind_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} and shape {value.shape}"
    return f"{shown(value)} ({type(value).__name__})"
