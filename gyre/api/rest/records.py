"""Types of answers whose fields are a record's, or several records': a record names each field once, and its docstrings
go with it, its own where the class has none.

    class Vertex(Out, of=VertexRecord, without=("avoids",)):
        busy: str = ""

A field that the class declares itself takes the place of the record's, and one without a docstring has the `meaning` of
its metadata. Whatever an enumeration may hold is a text in an answer, for a later Gyre may answer with another value.
This module must not know which records there are.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import BaseModel
from pydantic import Field as Answered

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class FromRecord(ModelMetaclass):
    """Adds the fields of `of`, a record or several, but those in `without`, to those of the class."""

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        of: type | tuple[type, ...] = (),
        without: tuple[str, ...] = (),
        **more: Any,
    ) -> Any:
        own = namespace.get("__annotations__", {})
        there = {*own, *without}.union(*(getattr(base, "model_fields", ()) for base in bases))
        found: dict[str, Any] = {}
        for record in of if isinstance(of, tuple) else (of,):
            taken = [one for one in fields(record) if one.name not in there]
            types, docs = get_type_hints(record), docs_of(record)
            namespace = {"__doc__": docs.get("")} | namespace
            found |= {one.name: _answered(types[one.name]) for one in taken}
            namespace |= {
                one.name: _default(one, docs.get(one.name, one.metadata.get("meaning"))) for one in taken
            }
        if found:
            namespace["__annotations__"] = found | own
        return super().__new__(mcs, name, bases, namespace, **more)


def _answered(kind: Any) -> Any:
    return str if isinstance(kind, type) and issubclass(kind, StrEnum) else kind


def _default(one: Field[Any], doc: str | None) -> Any:
    if one.default_factory is not MISSING:
        return Answered(default_factory=one.default_factory, description=doc)
    if one.default is MISSING:
        return Answered(description=doc)
    default = one.default.value if isinstance(one.default, StrEnum) else one.default
    return Answered(default=default, description=doc)


def docs_of(record: type) -> dict[str, str]:
    """The docstrings below a class's fields, by name, and its own, where it has one, as ""."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(tree, ast.ClassDef)
    own = ast.get_docstring(tree)
    return ({"": own} if own else {}) | {
        field.target.id: inspect.cleandoc(str(said.value.value))
        for field, said in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant)
    }
