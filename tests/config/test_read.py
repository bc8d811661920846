"""Each key of a job is read by somebody: one that nobody reads is accepted, documented, and does nothing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from gyre import config
from gyre.config.sections import WorkloadSettings

GYRE = Path(__file__).parents[2] / "gyre"

CHECKS = "gyre/api/checks"
"""Who reads a key to refuse it or to warn of it does nothing of what it says."""

HANDED_ON = {"PoolSpec": "RolloutsSpec", "NotifySpec": "NotifyOptions"}
"""Sections that are handed on whole, and the class of which they then are."""

NOT_READ = {
    ("FirstWeightsSettings", "source"): "`source_of` reads it of a job's plain data",
    ("JobSpec", "device_memory_gib"): "`gyre plan` foretells by it what does not fit, which is a check",
    ("LoraSettings", "dropout"): "it may be 0 alone, which is what is computed",
    ("MegatronSettings", "model_path"): "it is another name of `config.model_path`, which is read",
}

Names = dict[str, set[str]]
"""Of a name the classes of what it stands for."""


def models_in(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from models_in(part)


@cache
def sections() -> dict[str, type[BaseModel]]:
    """Every class of which a job's configuration is made, by its name."""
    found: dict[str, type[BaseModel]] = {}
    waiting: list[type[BaseModel]] = [config.JobSpec, WorkloadSettings]
    while waiting:
        one = waiting.pop()
        if one.__name__ not in found:
            found[one.__name__] = one
            waiting += [model for field in one.model_fields.values() for model in models_in(field.annotation)]
    return found


@cache
def known_classes() -> set[str]:
    return {*sections(), *HANDED_ON.values()}


def last_name(node: ast.AST | None) -> str:
    """`rollouts` of `self.spec.rollouts`, of `rollouts` and of `rollouts(spec)`, of `rollouts["a"]`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=ast.Attribute(value=of, attr="get" | "values" | "model_copy" | "items" | "read")):
            return last_name(of)
        case ast.Call(func=ast.Name(id="read_section" | "enumerate" | "sorted"), args=[of, *_]):
            return last_name(of)
        case ast.Call(func=inner) | ast.Subscript(value=inner) | ast.Await(value=inner):
            return last_name(inner)
        case ast.BoolOp(values=[first, *_]) | ast.IfExp(body=first) | ast.NamedExpr(value=first):
            return last_name(first)
    return ""


def pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, str]]:
    """Which names are bound to which: those of `a, b = c, d` one by one."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, other in zip(target.elts, value.elts, strict=False):
            yield from pairs(one, other)
    elif isinstance(target, ast.Tuple):
        for one in target.elts:  # of `for name, role in roles.items()`, or of pairs
            yield last_name(one), last_name(value)
    elif isinstance(value, ast.Tuple | ast.List):
        for other in value.elts:
            yield from pairs(target, other)
    else:
        yield last_name(target), last_name(value)


def classes_in(annotation: ast.AST | None) -> set[str]:
    names = {last_name(node) for node in ast.walk(annotation)} if annotation is not None else set()
    return names & known_classes()


def everywhere(trees: list[ast.Module]) -> Names:
    """What attributes and functions are annotated with, of whatever class or module."""
    found: Names = defaultdict(set, {name: {name} for name in known_classes()})
    for tree in trees:
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(body=body):
                    for one in body:
                        if isinstance(one, ast.AnnAssign):
                            found[last_name(one.target)] |= classes_in(one.annotation)
                case ast.FunctionDef(name=name, returns=returns):
                    found[name] |= classes_in(returns)
    return {name: classes for name, classes in found.items() if classes}


def here(tree: ast.Module, known: Names) -> Names:
    """The names of this module: its parameters, and what is assigned or walked over."""
    found: Names = defaultdict(set)
    bindings = []
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=annotation):
                found[name] |= classes_in(annotation)
            case ast.Assign(targets=targets, value=value):
                bindings += [pair for target in targets for pair in pairs(target, value)]
            case ast.For() | ast.comprehension():
                bindings += pairs(node.target, node.iter)
            case ast.NamedExpr():
                bindings += pairs(node.target, node.value)
    before = -1
    while before != (before := sum(map(len, found.values()))):
        for name, other in bindings:
            found[name] |= found[other] | known.get(other, set())
    return found


@cache
def reads() -> set[tuple[str, str]]:
    """Class and field of everything that is read, as far as names say it."""
    trees = {file: ast.parse(file.read_text()) for file in sorted(GYRE.rglob("*.py"))}
    known = everywhere([*trees.values()])
    found: set[tuple[str, str]] = set()
    for tree in [tree for file, tree in trees.items() if CHECKS not in file.as_posix()]:
        names = here(tree, known)
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name=name) if name in sections():
                    found |= {(name, attr) for attr in own_attributes(node)}
                case ast.Attribute(value=of, attr=attr, ctx=ast.Load()):
                    name = last_name(of)
                    found |= {(one, attr) for one in names[name] | known.get(name, set())}
                case ast.Call(func=ast.Name(id="read_section"), args=[_, _, ast.Constant(value=str(key))]):
                    found.add(("WorkloadSettings", key))
    return found


def own_attributes(kind: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(kind):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=attr, ctx=ast.Load()):
                yield attr


def unread(kind: type[BaseModel]) -> set[str]:
    """The fields that nobody reads, neither of the class nor of one that it is, or becomes."""
    of = {one.__name__ for one in kind.__mro__} | {HANDED_ON.get(kind.__name__, kind.__name__)}
    return {*kind.model_fields} - {attr for one, attr in reads() if one in of}


@pytest.mark.parametrize("name", sorted(sections()))
def test_every_key_of_a_section_is_read(name: str) -> None:
    assert unread(sections()[name]) == {key for of, key in NOT_READ if of == name}


def test_a_key_that_nobody_reads_is_found() -> None:
    class RolloutsSpec(config.RolloutsSpec):
        nobody_reads_it: int = 0

    assert unread(RolloutsSpec) == {"nobody_reads_it"}
