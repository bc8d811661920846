"""`rollouts.json` when it is damaged: there is no address, and nobody dials with what can be no header."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from gyre.rollouts.protocol.endpoint import (
    ENDPOINT_FILE,
    JobEndpoint,
    read_endpoint,
    read_join_endpoint,
    read_trust,
    read_weights_endpoint,
    write_endpoint,
)

GOOD = {"url": "http://127.0.0.1:1", "secret": "s", "token": "t"}


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", "[" * 100_000, json.dumps("text")])
def test_what_is_no_object_is_no_address(tmp_path: Path, text: str) -> None:
    (tmp_path / ENDPOINT_FILE).write_text(text)
    for read in (read_endpoint, read_join_endpoint, read_weights_endpoint, read_trust):
        assert read(tmp_path) is None


@pytest.mark.parametrize("change", [{"secret": 7}, {"token": "a\nb"}, {"url": None}, {"secret": "\ud800"}])
def test_what_can_be_no_header_is_no_secret(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / ENDPOINT_FILE).write_text(json.dumps(GOOD | change))
    assert read_endpoint(tmp_path) is None
    assert read_weights_endpoint(tmp_path) is None


@pytest.mark.parametrize("certificate", ["no PEM", 7, ["a"], "\ud800", "é"])
def test_what_is_no_certificate_is_not_trusted(tmp_path: Path, certificate: Any) -> None:
    (tmp_path / ENDPOINT_FILE).write_text(json.dumps({**GOOD, "certificate": certificate}))
    assert read_endpoint(tmp_path) == ("http://127.0.0.1:1", "s")
    assert read_trust(tmp_path) is None


def test_a_job_s_endpoint_is_what_stands_there_at_each_dial(tmp_path: Path) -> None:
    own, joins = JobEndpoint(tmp_path), JobEndpoint(tmp_path, joins=True)
    assert own.where() is None
    assert joins.where() is None
    for url in ("http://127.0.0.1:1", "http://127.0.0.1:2"):  # it has moved
        write_endpoint(tmp_path, GOOD | {"url": url})
        assert own.where() == (url, "s")
        assert joins.where() == (url, "t")


def test_what_is_given_is_trusted_instead_of_what_stands_there(tmp_path: Path) -> None:
    given = ssl.create_default_context()
    assert JobEndpoint(tmp_path).trust() is None
    assert JobEndpoint(tmp_path, context=given).trust() is given
