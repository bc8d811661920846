"""docs/security.md tells the truth: each claim names a test, and those that no room shows are shown here."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from gyre.api.cli import main
from gyre.api.rest import RestServer, create_app
from gyre.config import ROLLOUT_MANAGER
from gyre.errors import Unauthorized
from gyre.rollouts.manager.join_tokens import JoinTokens
from gyre.rollouts.protocol.endpoint import read_endpoint, read_join_endpoint, write_endpoint
from gyre.rollouts.protocol.secrets import digest_of, new_secret, weights_key
from gyre.testing.standing_job import StandingJob, small_spec

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
    assert sum(len(claim.tests) for claim in CLAIMS) == PAGE.count("::"), "a test is named outside of a claim"


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
