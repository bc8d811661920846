"""What a user installs: the wheel's files and metadata, and the versions of `constraints.txt` and `uv.lock`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.waits import GENEROUS_S

ROOT = Path(__file__).parents[1]
INPUTS = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, for a build writes beside its sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in INPUTS:
        shutil.copy(ROOT / name, source)
    for name in ("gyre", "tests", "bench", "docs", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=GENEROUS_S,
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return zipfile.ZipFile(built)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_it_has_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    here = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "gyre").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert inside == here
    assert "gyre/py.typed" in inside
    assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())


def test_none_of_it_is_for_gyres_own_tests(wheel: zipfile.ZipFile) -> None:
    rooms = {
        name.split("/")[2].removesuffix(".py")
        for name in wheel.namelist()
        if name.startswith("gyre/testing/")
    }
    assert rooms == {"__init__", "clock", "contracts", "in_process", "processes"}


def test_an_installer_reads_what_the_project_says(metadata: Message) -> None:
    assert (metadata["Name"], metadata["License-Expression"]) == ("gyre-rl", "Apache-2.0")
    assert metadata["Requires-Python"] == "<3.14,>=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert all(metadata[field] for field in ("Summary", "Author", "Keywords", "License-File"))
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_torch_comes_with_extras_alone(metadata: Message) -> None:
    heavy = ("torch", "megatron", "sglang", "mooncake", "transformers", "tokenizers", "nvidia")
    required = metadata.get_all("Requires-Dist", [])
    plain = [line for line in required if "extra ==" not in line]
    assert not [line for line in plain if line.startswith(heavy)]
    assert any(line.startswith("ray>=") for line in plain)
    assert any(line.startswith("torch>=") and line.endswith('extra == "torch"') for line in required)
    assert 'gyre-rl[torch]; extra == "megatron"' in required


def test_every_extra_that_a_sentence_names_is_there(metadata: Message) -> None:
    from gyre.extras import EXTRA_OF

    assert set(EXTRA_OF.values()) <= set(metadata.get_all("Provides-Extra", []))


# -- versions ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


@pytest.fixture(scope="module")
def lock() -> dict[str, Any]:
    return tomllib.loads((ROOT / "uv.lock").read_text())


@pytest.fixture(scope="module")
def constraints() -> dict[str, str]:
    """By package, its version."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_lock_has_the_versions_that_the_suite_runs_on(
    lock: dict[str, Any], constraints: dict[str, str]
) -> None:
    """Of what SGLang wants in another version, both. Else: uv lock -P NAME==VERSION"""
    locked = {(package["name"], package.get("version")) for package in lock["package"]}
    assert set(constraints.items()) - locked == set()


def test_the_lock_is_of_this_project(lock: dict[str, Any], project: dict[str, Any]) -> None:
    """Else: uv lock"""
    (own,) = (package for package in lock["package"] if package["name"] == project["name"])
    locked = {
        (entry["name"], entry.get("marker", ""), SpecifierSet(entry.get("specifier", "")))
        for entry in own["metadata"]["requires-dist"]
        if entry["name"] != project["name"]
    }
    required = [
        *((Requirement(line), "") for line in project["dependencies"]),
        *(
            (Requirement(line), f"extra == '{extra}'")
            for extra, lines in project["optional-dependencies"].items()
            for line in lines
        ),
    ]
    assert locked == {
        (canonicalize_name(each.name), marker, each.specifier)
        for each, marker in required
        if each.name != project["name"]
    }
    assert own["metadata"]["provides-extras"] == list(project["optional-dependencies"])
    assert SpecifierSet(lock["requires-python"]) == SpecifierSet(project["requires-python"])


def test_the_lock_names_the_public_index_alone() -> None:
    hosts = set(re.findall(r"https?://[^/\"]+", (ROOT / "uv.lock").read_text()))
    assert hosts == {"https://pypi.org", "https://files.pythonhosted.org"}
