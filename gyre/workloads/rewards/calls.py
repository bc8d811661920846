"""A reward function in its form: called with samples, by name, and what it returned read as numbers.

A pool's process imports this module, so it must import neither numpy nor torch.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gyre.errors import ConfigError
from gyre.observe.samples.right_answer import right_answer_in
from gyre.workloads.rewards.forms import GROUND_TRUTH, Form, Parameter, form_of
from gyre.workloads.rewards.results import Scored, read_batch, read_one

Texts = tuple[str, str, Mapping[str, Any]]
"""A prompt, its completion, and the group's meta."""

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "position",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "name",
    inspect.Parameter.KEYWORD_ONLY: "name",
    inspect.Parameter.VAR_POSITIONAL: "rest",
    inspect.Parameter.VAR_KEYWORD: "named_rest",
}


class BoundReward:
    """A function and its form. `name` is what the job calls it, for errors."""

    def __init__(self, function: Callable[..., Any], name: str, signature: str = "auto") -> None:
        """Raises ConfigError if the function has no form, or not the one that is said."""
        self.name = name
        self.where = place_of(function)
        """Its file and line, "" where they cannot be seen."""
        self._function = function
        self.form: Form = form_of(
            getattr(function, "__name__", type(function).__name__),
            parameters_of(function, name),
            signature,
            self.where,
        )

    def __call__(self, samples: Sequence[Texts]) -> list[Scored]:
        """A reward for each sample; a function of one sample is called with each. Raises NoReward, ConfigError where
        the data lacks what the function needs, and whatever the function raises."""
        if GROUND_TRUTH in self.form.needs and self.form.name in (
            "sample",
            "batch",
            "trl",
        ):  # there it is a column
            samples = [
                (prompt, completion, {**meta, GROUND_TRUTH: ground_truth(meta)})
                for prompt, completion, meta in samples
            ]
        if not self.form.batch:
            return [read_one(self._call(_values(self.form, *sample), sample[2])) for sample in samples]
        columns = {key: [meta.get(key) for _, _, meta in samples] for key in _keys_of(samples)}
        each = [_values(self.form, *sample) for sample in samples]
        together = {key: [one[key] for one in each] for key in each[0]} if each else {}
        return read_batch(self._call(together, columns), len(samples))

    def _call(self, values: Mapping[str, Any], columns: Mapping[str, Any]) -> Any:
        form = self.form
        if form.by_position:
            returned = self._function(*(values[value] for _, value in form.arguments))
        else:
            given = {key: self._value(value, values, columns) for key, value in form.arguments}
            given |= {key: columns[key] for key in form.optional if key in columns}
            if form.rest:
                given = {key: value for key, value in columns.items() if key not in given} | given
            returned = self._function(**given)
        return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned

    def _value(self, key: str, values: Mapping[str, Any], columns: Mapping[str, Any]) -> Any:
        if key in values:
            return values[key]
        if key in columns:
            return columns[key]
        if key in _NOT_HERE:
            return _NOT_HERE[key]
        raise ConfigError(
            f"config.reward.function: {self.name} takes {key!r}, and the data has no column of this name.",
            hint=f"It has {', '.join(map(str, columns)) or 'none'}; a parameter `meta` gets all of them.",
        )


def parameters_of(function: Callable[..., Any], name: str) -> list[Parameter]:
    """The parameters of a function, or of whatever else can be called. Raises ConfigError."""
    if inspect.isclass(function):
        raise ConfigError(
            f"config.reward.function: {name} is a class.",
            hint="Name a function, or an instance that can be called.",
        )
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"config.reward.function: the parameters of {name} cannot be seen: {error}.",
            hint="Write a function around it.",
        ) from error
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    return [
        Parameter(
            one.name,
            _KINDS[one.kind],
            one.default is inspect.Parameter.empty and "rest" not in _KINDS[one.kind],
        )
        for one in found.parameters.values()
        if one.name not in fixed
    ]


def place_of(function: Callable[..., Any]) -> str:
    """`file.py:12`, "" where it cannot be seen."""
    inner: Any = function.func if isinstance(function, functools.partial) else inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    if code is None:  # an instance of a class of the user's
        code = getattr(vars(type(inner)).get("__call__"), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def ground_truth(meta: Mapping[str, Any]) -> Any:
    """The right answer as verl's data have it, or else `meta["answer"]`. Raises ConfigError where there is none."""
    found = right_answer_in(meta)
    if found is not None:
        return found
    raise ConfigError(
        "config.reward.function: the data has no answer for a row, neither 'reward_model.ground_truth' nor 'answer'.",
        hint="Prepare it with its column of answers: gyre data prepare … --answer COLUMN.",
    )


def _values(form: Form, prompt: str, completion: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """The form's own values of one sample, by their names."""
    if form.name == "sample":
        return {"prompt": prompt, "completion": completion, "meta": meta}
    if form.name in ("batch", "trl"):
        return {"prompts": prompt, "completions": completion, "metas": meta}
    wanted = {value for _, value in form.arguments}
    if form.name == "openrlhf":
        values: dict[str, Any] = {"queries": prompt + completion, "prompts": prompt}
        return values | ({"labels": _truth(form, meta)} if "labels" in wanted else {})
    extra = meta.get("extra_info")
    values = {
        "data_source": meta.get("data_source") or "",
        "solution_str": completion,
        # verl sets both itself, for functions of several turns.
        "extra_info": {
            "num_turns": None,
            "rollout_reward_scores": {},
            **(extra if isinstance(extra, Mapping) else {}),
        },
    }
    if wanted & {"ground_truth", "ground_truths"}:
        values["ground_truth"] = _truth(form, meta)
    return {f"{key}s": value for key, value in values.items()} if form.batch else values


def _truth(form: Form, meta: Mapping[str, Any]) -> Any:
    """The right answer; None where there is none and the function has a default for it."""
    try:
        return ground_truth(meta)
    except ConfigError:
        if GROUND_TRUTH in form.needs:
            raise
        return None


def _keys_of(samples: Sequence[Texts]) -> list[str]:
    return list(dict.fromkeys(key for _, _, meta in samples for key in meta))


async def _awaited(returned: Any) -> Any:
    return await returned


_NOT_HERE: dict[str, Any] = {
    "trainer_state": None,
    "log_extra": lambda *_, **__: None,
    "log_metric": lambda *_, **__: None,
}
"""What TRL's trainer gives and Gyre has not: a reward depends on the texts and the data alone."""
