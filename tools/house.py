"""Count what the house is made of: lines, long functions, callbacks handed to constructors, names with two meanings.

    python tools/house.py [FOLDER] [--list KIND]

`--list` prints each of a kind, with its place. A callback is a parameter of an `__init__`, or a field of a dataclass,
whose type has a `Callable`. A name has two meanings where two modules define a public class of it.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

LONG = 50
"""Lines of a function, from its `def` to its end, beyond which it is counted."""

KINDS = ("lines", "files", "long functions", "callbacks", "lambdas", "getattr", "twice named classes")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1] / "gyre")
    parser.add_argument("--list", choices=KINDS[2:], metavar="KIND")
    given = parser.parse_args()
    found = count(given.folder)
    for place in found[given.list] if given.list else ():
        print(place)
    for kind in KINDS if not given.list else ():
        number = found[kind][0] if kind in ("lines", "files") else len(found[kind])
        print(f"{kind:20} {number:>8,}")


def count(folder: Path) -> dict[str, list[str | int]]:
    """Of each kind the places, as `file:line what`, and of `lines` and `files` the number."""
    found: dict[str, list[str | int]] = defaultdict(list)
    classes: dict[str, list[str]] = defaultdict(list)
    files = sorted(folder.rglob("*.py"))
    lines = 0
    for file in files:
        text = file.read_text()
        lines += text.count("\n")
        below = file.relative_to(folder.parent)
        for node in ast.walk(ast.parse(text)):
            for kind, what in _kinds(node):
                found[kind].append(f"{below}:{getattr(node, 'lineno', 0)} {what}")
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(f"{below}:{node.lineno}")
    found["lines"], found["files"] = [lines], [len(files)]
    found["twice named classes"] = [
        f"{name}: {', '.join(places)}" for name, places in sorted(classes.items()) if len(places) > 1
    ]
    return found


def _kinds(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Lambda):
        yield "lambdas", ""
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        yield "getattr", ""
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > LONG:
            yield "long functions", f"{node.name} ({length})"
        if node.name == "__init__":
            every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            yield from (("callbacks", one.arg) for one in every if _is_callback(one.annotation))
    elif isinstance(node, ast.ClassDef) and any(
        "dataclass" in ast.unparse(one) for one in node.decorator_list
    ):
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and _is_callback(one.annotation):
                yield "callbacks", f"{node.name}.{ast.unparse(one.target)}"


def _is_callback(annotation: ast.expr | None) -> bool:
    return annotation is not None and "Callable" in ast.unparse(annotation)


if __name__ == "__main__":
    main()
