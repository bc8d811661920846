"""The forms of a reward function that Gyre can call, and which of them a function has.

| form | names of its parameters | gets |
| --- | --- | --- |
| `sample` | `completion`; `prompt`, `meta`, columns | one sample |
| `batch` | `completions`, `metas`; `prompts`, columns | lists |
| `verl` | `solution_str`; `data_source`, `ground_truth`, `extra_info` | one sample; lists where all names are plural |
| `trl` | `completions`; `prompts`, columns, `completion_ids`, … | lists |
| `openrlhf` | `queries`; `prompts`, `labels` | lists |

Invariant *called by name*: a function is recognised by the names of its parameters, and gets its arguments by these
names; what cannot be recognised is refused, unless the job says the form. Only then, or where its names are Gyre's own,
may it be called by position.

This module must not know how a function is found or called.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gyre.errors import ConfigError

FORMS = ("sample", "batch", "verl", "trl", "openrlhf")
WANTED = (
    "(prompt, completion, meta), verl's (data_source, solution_str, ground_truth, extra_info), TRL's (prompts, "
    "completions, **columns), OpenRLHF's (queries, prompts, labels), or (prompts, completions, metas) for a batch"
)

_SAMPLE = {
    "prompt": {"prompt", "prompt_text", "prompt_str", "question", "query", "p", "q"},
    "completion": {
        "completion",
        "completion_text",
        "completion_str",
        "response",
        "response_str",
        "response_text",
        "output",
        "text",
        "c",
        "r",
    },
    "meta": {"meta", "metadata", "m"},
}
_BATCH = {"prompts": {"prompts"}, "completions": {"completions"}, "metas": {"metas", "meta"}}
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_TRL = ("prompts", "completions")
_OPENRLHF = ("queries", "prompts", "labels")
GIVEN = frozenset(
    ("finish_reason", "prompt_ids", "completion_ids", "trainer_state", "log_extra", "log_metric")
)
"""What a function may name besides the columns of the data."""

TOKENS = frozenset(("prompt_ids", "completion_ids"))
GROUND_TRUTH = "ground_truth"
"""Among `needs`: `reward_model.ground_truth` of the data, or its `answer`."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """`kind` is `position` (cannot be given by name), `name`, `rest` (`*args`) or `named_rest` (`**kwargs`)."""

    name: str
    kind: str = "name"
    required: bool = True


@dataclass(frozen=True, slots=True)
class Form:
    """How a function is called.

    `arguments` are pairs of a parameter and what it gets: one of the form's own values, or a column. With `by_position`
    they are given in this order. `rest`: the columns that no parameter names are given too.
    """

    name: str
    batch: bool
    arguments: tuple[tuple[str, str], ...]
    rest: bool = False
    by_position: bool = False
    needs: tuple[str, ...] = ()
    """Columns without which it cannot be called; `GROUND_TRUTH` among them."""
    optional: tuple[str, ...] = ()
    """Parameters with a default that get a column of that name where the data has one."""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Form:
        """From what `asdict` made of one, after msgpack."""
        pairs = tuple((parameter, value) for parameter, value in told["arguments"])
        return cls(
            **{**told, "arguments": pairs, "needs": tuple(told["needs"]), "optional": tuple(told["optional"])}
        )

    @property
    def tokens(self) -> frozenset[str]:
        """Those of `TOKENS` that it names."""
        return TOKENS & ({value for _, value in self.arguments} | set(self.optional))


def as_text(name: str, parameters: Sequence[Parameter]) -> str:
    """The signature as its author wrote it, without annotations."""
    marks = {"rest": "*", "named_rest": "**"}
    shown = [
        f"{marks.get(one.kind, '')}{one.name}{'' if one.required or one.kind in marks else '=…'}"
        for one in parameters
    ]
    return f"{name}({', '.join(shown)})"


def form_of(name: str, parameters: Sequence[Parameter], signature: str = "auto", where: str = "") -> Form:
    """The form in which this function is called. `signature` is the form that the job says, or `auto`. `where` is the
    function's file and line, for the error. Raises ConfigError where it has no form, or not the one that is said."""
    named = {one.name for one in parameters if one.kind == "name"}
    kinds = {one.kind for one in parameters}
    shown = f"{where}: {as_text(name, parameters)}" if where else as_text(name, parameters)

    def refused(why: str) -> ConfigError:
        return ConfigError(
            f"config.reward.function: {shown} {why}.",
            hint=f"Wanted: {WANTED}. config.reward.signature says by hand which of them it is.",
        )

    if signature == "auto":
        found = _recognised(parameters, named)
        if not found:
            raise refused("is no reward that can be called: the names of its parameters are of no known form")
        if len(found) > 1:
            raise refused(f"may be {' or '.join(found)}: its parameters have names of both")
        signature = found[0]
    if signature == "verl":
        plural = "solution_strs" in named and "solution_str" not in named
        own = dict.fromkeys(_VERL_BATCH if plural else _VERL)
        made = _by_name("verl", plural, {one: one for one in own}, parameters, columns=False)
    elif signature == "trl":
        made = _by_name("trl", True, {one: one for one in _TRL}, parameters, columns=True)
    elif signature == "openrlhf":
        made = _by_name("openrlhf", True, {one: one for one in _OPENRLHF}, parameters, columns=False)
    else:
        roles = _SAMPLE if signature == "sample" else _BATCH
        own_names = {alias: role for role, aliases in roles.items() for alias in aliases if alias in named}
        positional = [one for one in parameters if one.kind in ("name", "position")]
        mine = [own_names.get(one.name) for one in positional]
        main = "completion" if signature == "sample" else "completions"
        unnamed = any(one.required and not _bare(one.name) for one in positional)
        if (
            not unnamed
            and main in mine
            and "position" not in kinds
            and len(set(own_names.values())) == len(own_names)
        ):
            made = _by_name(signature, signature == "batch", own_names, parameters, columns=True)
        else:
            made = _by_position(signature, tuple(roles), parameters)
    if isinstance(made, str):
        raise refused(f"is not called as {signature}: {made}")
    return made


def lacking(form: Form, columns: Collection[str]) -> list[str]:
    """What the function needs and the data lacks. `columns` are the data's columns besides the prompt."""
    missing = []
    for need in form.needs:
        if need == GROUND_TRUTH:
            if not {"reward_model", "ground_truth", "answer"} & set(columns):
                missing.append("answer")
        elif need not in columns:
            missing.append(need)
    return missing


def _recognised(parameters: Sequence[Parameter], named: set[str]) -> list[str]:
    found = []
    if {"solution_str", "solution_strs"} & named:
        found.append("verl")
    if "queries" in named:
        found.append("openrlhf")
    if "completions" in named:
        found.append("batch" if "metas" in named or "meta" in named else "trl")
    positional = [one for one in parameters if one.kind in ("name", "position")]
    answers = [one for one in positional if one.name in _SAMPLE["completion"]]
    # An option of another form's function may have such a name too.
    if any(one.required or not found for one in answers) or _is_sample_by_position(positional):
        found.append("sample")
    mixed = (
        "completions" in named and "prompt" in named
    )  # one prompt and many completions: somebody else's form
    return [*found, "sample"] if mixed and "sample" not in found else found


def _is_sample_by_position(parameters: Sequence[Parameter]) -> bool:
    """Whether the first three have Gyre's names in their order, or names that say that they are not used; with one of
    Gyre's names among them."""
    first = [one.name for one in parameters[:3]]
    if len(first) < 3 or any(one.required for one in parameters[3:]):
        return False
    fits = [
        _bare(name) in aliases or not _bare(name)
        for name, aliases in zip(first, _SAMPLE.values(), strict=True)
    ]
    return all(fits) and any(_bare(name) for name in first)


def _bare(name: str) -> str:
    """`_prompt` as `prompt`, and "" for `_` and `_1`."""
    return name.strip("_").rstrip("0123456789")


def _by_name(
    name: str, batch: bool, own: dict[str, str], parameters: Sequence[Parameter], *, columns: bool
) -> Form | str:
    """The form of a function that gets the values of `own` by these names, and with `columns` others; or why not."""
    arguments, needs, optional = [], [], []
    takes_any = any(one.kind == "named_rest" for one in parameters)
    for one in parameters:
        if one.kind == "position" and one.required:
            return f"{one.name} cannot be given by its name"
        if one.kind != "name":
            continue
        if one.name in own:
            value = own[one.name]
            arguments.append((one.name, value))
            if one.required and value in ("ground_truth", "ground_truths", "labels"):
                needs.append(GROUND_TRUTH)
        elif columns and one.required:
            arguments.append((one.name, one.name))
            if one.name not in GIVEN:
                needs.append(one.name)
        elif columns:
            optional.append(one.name)
        elif one.required:
            return f"nothing is known to give for {one.name}"
    if takes_any:
        given = {value for _, value in arguments}
        arguments += [(key, value) for key, value in own.items() if value not in given]
    if not arguments:
        return "it takes none of these by name"
    return Form(
        name,
        batch,
        tuple(arguments),
        rest=takes_any and columns,
        needs=tuple(needs),
        optional=tuple(optional),
    )


def _by_position(name: str, roles: tuple[str, ...], parameters: Sequence[Parameter]) -> Form | str:
    positional = [one for one in parameters if one.kind in ("name", "position")]
    any_number = any(one.kind == "rest" for one in parameters)
    required = [one for one in parameters if one.required and one.kind in ("name", "position")]
    if len(positional) < len(roles) and not any_number:
        return f"it takes {len(positional)} of {', '.join(roles)}"
    if len(required) > len(roles):
        return f"nothing is known to give for {required[len(roles)].name}"
    return Form(name, name == "batch", tuple((role, role) for role in roles), by_position=True)
