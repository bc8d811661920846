"""The protocols say what is called: the trainer has no other calls, and the documents show their signatures."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre.config import FLEET, parse_job
from gyre.graph import RECIPES, compile_job
from gyre.graph.elements import Dispatch
from gyre.workloads import protocols
from gyre.workloads.gang.learner_gang import ActorGang, LearnerGang
from gyre.workloads.protocols import OPTIONAL, REQUIRED, methods_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "writing-workloads.md"
GANGS = {ActorGang: ("actor",), LearnerGang: ("actor", "critic")}
"""The classes by whose methods the trainer calls ranks, with the roles of these."""
OWN = {"take_policy", "fire"}
"""Methods of a gang that are no method of a protocol."""


def protocols_of(role: str) -> list[type]:
    return [REQUIRED[role], *OPTIONAL.get(role, ())]


def signatures(role: str) -> dict[str, inspect.Signature]:
    """By name. A later protocol of a role may widen a method of an earlier one."""
    return {
        name: inspect.signature(getattr(protocol, name))
        for protocol in protocols_of(role)
        for name in methods_of(protocol)
    }


def called_on(gang: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(value)
        for cls in gang.__mro__
        if issubclass(cls, LearnerGang)
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and not name.startswith("_") and name not in OWN
    }


@pytest.mark.parametrize("gang", GANGS, ids=lambda gang: gang.__name__)
def test_what_the_trainer_calls_is_declared_with_these_parameters(gang: type) -> None:
    every = [protocol for role in GANGS[gang] for protocol in protocols_of(role)]
    for name, signature in called_on(gang).items():
        having = [protocol for protocol in every if hasattr(protocol, name)]
        declared = {key for one in having for key in inspect.signature(getattr(one, name)).parameters}
        given = {key.replace("shares", "groups") for key in signature.parameters}
        assert given <= declared, name


def quoted(source: str) -> Iterator[str]:
    """The texts that are given to a call as its first or second argument, as `method` is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            for argument in node.args[:2]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def test_nobody_calls_a_method_of_a_protocol_by_its_name_in_quotes() -> None:
    """A misspelt one would be found by the job alone, and another argument not even by that."""
    methods = {name for role in REQUIRED for name in signatures(role)}
    assert set(quoted('gang.call("state", 1); rank.submit(member, "begin")')) == {"state", "begin"}
    for folder in ("trainer", "gang", "vertex"):
        paths = sorted((ROOT / "gyre" / "workloads" / folder).rglob("*.py"))
        assert paths, folder
        for path in paths:
            assert not methods & set(quoted(path.read_text())), path


@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - {FLEET}))
def test_what_a_recipe_calls_is_declared(recipe: str) -> None:
    spec = parse_job(
        {
            "name": "any",
            "recipe": recipe,
            "roles": {
                "actor": {},
                "rollout": {"entrypoint": "gyre.workloads.torch:TorchRollout"},
                "reward": {},
                "reference": {},
                **({"critic": {}} if "critic" in RECIPES[recipe].required else {}),
            },
        }
    )
    operators = [one for one in compile_job(spec).dcg.operators if one.dispatch is not Dispatch.CONTROLLER]
    assert operators
    for operator in operators:
        assert operator.method in signatures(operator.role), operator.ref


def shown(name: str, signature: inspect.Signature) -> str:
    """As a document writes it: `accumulate(groups, *, step, index)`, defaults left out."""
    parts: list[str] = []
    for parameter in list(signature.parameters.values())[1:]:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(parameter.name)
    return f"{name}({', '.join(parts)})"


@pytest.mark.parametrize("protocol", sorted({p for role in REQUIRED for p in protocols_of(role)}, key=str))
def test_the_page_has_a_protocol_s_methods_with_their_signatures(protocol: type) -> None:
    """In a row of a table: a method that a user has to write and cannot read of is not there for them."""
    rows = {
        found[1]
        for line in PAGE.read_text().splitlines()
        if (found := re.match(r"\| (?:\w+ \| )?`(\w+\([^`]*\))`", line))
    }
    inherited = {name for base in protocol.__mro__[1:] for name in vars(base)}
    for name in methods_of(protocol):
        if name in inherited and protocol is not protocols.Learner:
            continue
        assert shown(name, inspect.signature(getattr(protocol, name))) in rows


def test_every_method_says_what_it_does_when_it_is_called_again() -> None:
    words = re.compile(r"\bagain\b|second time|^As `", re.IGNORECASE)
    for role in REQUIRED:
        for protocol in protocols_of(role):
            for name in methods_of(protocol):
                text: Any = inspect.getdoc(getattr(protocol, name))
                assert words.search(text or ""), f"{protocol.__name__}.{name}"
