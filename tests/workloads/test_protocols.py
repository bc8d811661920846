"""The protocols say what is called: every call by name is one of theirs, and the documents show their signatures."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre.config import parse_job
from gyre.graph import RECIPES, compile_job
from gyre.graph.elements import Dispatch
from gyre.workloads import protocols
from gyre.workloads.protocols import OPTIONAL, REQUIRED, methods_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "writing-workloads.md"
CALLERS = sorted((ROOT / "gyre" / "workloads" / "trainer").rglob("*.py"))
BY_NAME = {"call": 0, "call_rank0": 0, "submit": 0}
"""How a gang or a vertex is called with a method's name: the position of the name among the arguments."""
OURS = {"timeout_s", "bundle", "policy", "control", "info"}
"""Keyword arguments of the call itself, which no method gets."""


def protocols_of(role: str) -> list[type]:
    return [REQUIRED[role], *OPTIONAL.get(role, ())]


def signatures(role: str) -> dict[str, inspect.Signature]:
    """By name. A later protocol of a role may widen a method of an earlier one."""
    return {
        name: inspect.signature(getattr(protocol, name))
        for protocol in protocols_of(role)
        for name in methods_of(protocol)
    }


EVERY = {name: found for role in REQUIRED for name, found in signatures(role).items()}


def calls_by_name(source: str) -> Iterator[tuple[str, list[str], int]]:
    """Each call of `.call("method", …)` and its like: the method, the keyword arguments it may be given, the line."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr not in BY_NAME:
            continue
        for argument in node.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                info = [one.value for one in node.keywords if one.arg == "info"]
                given = [
                    *node.keywords,
                    *(one for it in info if isinstance(it, ast.Call) for one in it.keywords),
                ]
                keywords = [one.arg for one in given if one.arg is not None]
                yield argument.value, [name for name in keywords if name not in OURS], node.lineno


FOUND = [(path, *call) for path in CALLERS for call in calls_by_name(path.read_text())]


def test_the_calls_are_found() -> None:
    """Else the next test proves nothing."""
    assert {name for _, name, _, _ in FOUND} >= {
        "begin",
        "checkpoint",
        "checkpoint_written",
        "export_weights",
        "fetch_weights",
        "forget_memory",
        "publish_model",
        "restore",
        "restore_from_memory",
        "restore_weights",
        "state",
        "warm_start",
    }


@pytest.mark.parametrize(
    ("path", "method", "keywords", "line"),
    FOUND,
    ids=[f"{path.name}:{line}-{method}" for path, method, _, line in FOUND],
)
def test_what_the_trainer_calls_by_name_is_declared(
    path: Path, method: str, keywords: list[str], line: int
) -> None:
    assert method in EVERY, f"{path.name}:{line} calls {method}(), which no protocol has"
    known = set(EVERY[method].parameters)
    assert set(keywords) <= known, f"{path.name}:{line} passes {keywords} to {method}"


@pytest.mark.parametrize("recipe", sorted(RECIPES))
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
