"""docs/security.md tells the truth: each claim names a test, and those that no room shows are shown here."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from gyre.api.cli import main
from gyre.api.rest import RestServer, create_app
from gyre.config import ROLLOUT_MANAGER
from gyre.errors import Unauthorized
from gyre.rollouts.manager.join_tokens import JoinTokens
from gyre.rollouts.protocol.credentials import digest_of, new_secret, weights_key
from gyre.rollouts.protocol.endpoint import read_endpoint, read_join_endpoint, write_endpoint
from gyre.rollouts.protocol.frames import KINDS, Assignment, FinishedSample, Held, Keep, Prompt
from gyre.rollouts.protocol.progress import End, ReportBody
from tests.doubles.standing_job import StandingJob, small_spec

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text()


@dataclass(frozen=True)
class Claim:
    number: str
    sentence: str
    tests: tuple[str, ...]


def claims() -> list[Claim]:
    """Every item of the page that begins with a number in bold."""
    found = []
    for item in re.split(r"\n(?=- \*\*|\n|- )", PAGE):
        begun = re.match(r"- \*\*([A-Z]\d+)\*\* (.*)", item.strip(), re.DOTALL)
        if begun is not None:
            tests = tuple(re.findall(r"`(tests/[^`]+::[^`]+)`", begun[2]))
            found.append(Claim(begun[1], re.sub(r"`tests/[^`]*`", "", begun[2]).strip(), tests))
    return found


CLAIMS = claims()


@cache
def functions_of(path: Path) -> frozenset[str]:
    """The functions of a test file that pytest collects, and that are not skipped always."""
    functions = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )
    return frozenset(
        node.name
        for node in functions
        if not any(
            "mark.skip(" in ast.unparse(mark) or "xfail" in ast.unparse(mark) for mark in node.decorator_list
        )
    )


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim.number for claim in CLAIMS])
def test_a_claim_names_tests_that_there_are(claim: Claim) -> None:
    assert claim.tests, f"{claim.number} names no test"
    assert claim.sentence.endswith(".")
    for test in claim.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), f"{claim.number} names {path}, which is not there"
        assert name in functions_of(ROOT / path), f"{claim.number} names {test}, which is not there"


def test_no_claim_is_overlooked_and_no_number_is_used_twice() -> None:
    numbers = [claim.number for claim in CLAIMS]
    assert len(numbers) == len(set(numbers))
    assert len(numbers) == PAGE.count("- **"), "an item in bold is no claim"
    named = sum(len(claim.tests) for claim in CLAIMS) + len(ROWS)
    assert named == PAGE.count("::"), "a test is named outside of a claim and of the table"


# -- the table of what peers say --------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    frame: str
    fields: tuple[str, ...]
    checker: str
    test: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 5 and cells[4].startswith("`tests/"):
            fields = tuple(name.strip() for name in cells[1].split(",") if name.strip() != "–")
            found.append(Row(cells[0], fields, cells[3].strip("`"), cells[4].strip("` ")))
    return found


ROWS = rows()


def said_by_peers() -> set[tuple[str, str]]:
    """(frame, field) of all that comes over a connection, as the code reads it."""
    parts = [*KINDS.values(), Held, Keep, Assignment, Prompt, FinishedSample]
    said = {(kind.__name__, one.name) for kind in parts for one in msgspec.structs.fields(kind)}
    said |= {("GenerationProgress", one.name) for one in msgspec.structs.fields(ReportBody)}
    said |= {("End", one.name) for one in msgspec.structs.fields(End)}
    folder = ROOT / "gyre" / "weights" / "transfer"
    said |= {("chunk request", key) for key in keys_read(folder / "server.py", {"request"})}
    for name in ("fetch", "receiver", "chunk_transports"):
        said |= {("chunk reply", key) for key in keys_read(folder / f"{name}.py", {"told", "reply"})}
    said |= {("drain request", key) for key in ("instance", "deadline_s", "reason")}
    return said


def keys_read(path: Path, variables: set[str]) -> set[str]:
    """The texts that are got of these variables, or of attributes of these names."""
    keys = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            of = node.func.value
            name = of.id if isinstance(of, ast.Name) else of.attr if isinstance(of, ast.Attribute) else ""
            if name in variables and node.args and isinstance(node.args[0], ast.Constant):
                keys.add(str(node.args[0].value))
    return keys


def test_every_field_of_every_frame_stands_in_the_table() -> None:
    listed = [(row.frame, name) for row in ROWS for name in row.fields]
    assert len(listed) == len(set(listed)), "a field stands there twice"
    assert said_by_peers() == set(listed)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.frame}.{row.fields[0] if row.fields else ''}")
def test_a_field_names_who_checks_it_and_a_test(row: Row) -> None:
    found: object = None
    module, _, name = row.checker.rpartition(".")
    while found is None:
        try:
            found = attrgetter(name)(import_module(module))
        except ModuleNotFoundError:
            module, _, front = module.rpartition(".")
            name = f"{front}.{name}"
    assert callable(found)
    path, _, test = row.test.partition("::")
    assert test in functions_of(ROOT / path), f"{row.frame} names {row.test}, which is not there"


# -- claims that no room shows ----------------------------------------------------------------------


def test_the_endpoint_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.json"
    path.write_text("{}")
    path.chmod(0o644)
    write_endpoint(tmp_path, {"url": "http://127.0.0.1:1", "token": "joins", "secret": "all"})
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_endpoint(tmp_path) == ("http://127.0.0.1:1", "all")
    assert read_join_endpoint(tmp_path) == ("http://127.0.0.1:1", "joins")


def test_the_weights_key_opens_nothing_else() -> None:
    secret = new_secret()
    key = weights_key(secret)
    tokens = JoinTokens(secret, new_secret())
    assert tokens.caller(f"Bearer {secret}", 0.0).is_ours
    for given in (key, digest_of(secret), "", "*"):
        with pytest.raises(Unauthorized):
            tokens.caller(f"Bearer {given}", 0.0)
    assert secret not in key
    assert weights_key(new_secret()) != key


def test_a_created_token_is_in_no_file() -> None:
    spec = small_spec()
    spec.roles[ROLLOUT_MANAGER] = spec.roles["reward"].model_copy()
    with StandingJob(spec) as job:
        server = RestServer(create_app(job.master, token=None))
        try:
            arguments = ["--url", server.start(), "token", "create", "standing-1", "--name", "spot", "--json"]
            made = json.loads(CliRunner().invoke(main, arguments).stdout)["token"]
        finally:
            server.stop()
        told = json.dumps([job.master.tokens(), job.view(), job.master.events()])
        stored = b"".join(path.read_bytes() for path in job.directory.rglob("*") if path.is_file())
    assert digest_of(made).encode() in stored
    assert made.encode() not in stored
    assert made not in told
