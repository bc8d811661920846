"""The documentation's site and the moving picture: what they are made of is there. `make docs` builds the site."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "demo.svg"
SVG = "{http://www.w3.org/2000/svg}"


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"^ +- .*: ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= named


def test_what_the_python_reference_names_is_there() -> None:
    tree = ast.parse((ROOT / "tools" / "docs_site.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PYTHON"
    )
    for name in (name for group in names.values() for name in group):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name


def test_the_picture_is_small_and_runs_nothing() -> None:
    text = PICTURE.read_text()
    root = ElementTree.fromstring(text)
    assert len(text) < 200_000
    assert not list(root.iter(f"{SVG}script"))
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "0 prompts lost, 0 trained twice" in text


@pytest.fixture
def demo_picture(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("demo_picture")


def test_a_command_in_a_terminal_is_recorded(demo_picture: ModuleType, tmp_path: Path) -> None:
    code = "import os, sys; print(sys.stderr.isatty(), os.get_terminal_size().columns); sys.exit(3)"
    status = demo_picture.record([sys.executable, "-c", code], "python", tmp_path / "new" / "a.cast")
    header, *events = (tmp_path / "new" / "a.cast").read_text().splitlines()
    assert status == 3
    assert json.loads(header)["width"] == demo_picture.COLUMNS
    assert (
        "".join(text for _, _, text in map(json.loads, events))
        == f"$ python\r\nTrue {demo_picture.COLUMNS}\r\n"
    )


def test_a_film_shows_each_screen_for_its_time_and_ends_with_the_last(demo_picture: ModuleType) -> None:
    first = (((0, "a <b>", ""),), ())
    second = (((0, "a <b>", ""),), ((2, "done", "g s"),))
    drawn = demo_picture.Film([(1.0, first), (3.0, second)], "two screens").svg()
    root = ElementTree.fromstring(drawn)
    height = demo_picture.ROWS * demo_picture.CELL_HEIGHT
    rows = {text.attrib["id"]: "".join(text.itertext()) for text in root.iter(f"{SVG}text")}
    places = [(rows[use.attrib["href"][1:]], int(use.attrib["y"])) for use in root.iter(f"{SVG}use")]
    assert places == [("a <b>", 0), ("a <b>", height), ("done", height + demo_picture.CELL_HEIGHT)]
    (style,) = (found.text or "" for found in root.iter(f"{SVG}style"))
    assert (
        f"@keyframes film{{0.00%{{transform:translateY(0px)}}25.00%{{transform:translateY({-height}px)}}}}"
        in style
    )
    assert f".f{{transform:translateY({-height}px);animation:film 4.00s" in style
