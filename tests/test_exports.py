"""What packages export: every name is there, whether it is imported at once or on first use."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import gyre

_ROOT = Path(gyre.__file__).parent


def _exporting() -> list[str]:
    """The packages that say what they export, or have exports that are resolved on first use."""
    found = []
    for file in sorted(_ROOT.rglob("__init__.py")):
        names = {
            target.id
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        if names & {"__all__", "_EXPORTS"}:
            found.append(".".join(("gyre", *file.parent.relative_to(_ROOT).parts)))
    return found


@pytest.mark.parametrize("package", _exporting())
def test_every_exported_name_is_there(package: str) -> None:
    module = import_module(package)
    assert set(getattr(module, "_EXPORTS", ())) <= set(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
