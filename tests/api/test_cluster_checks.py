"""What `gyre doctor --cluster` says of a machine by what it found of itself. On Ray: `tests/e2e/test_commands.py`."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from gyre.api.cluster_checks import Check, Findings, judged, look
from gyre.workloads.vertex.preflight import needs_of

WELL = Findings(wrong=[], sees_home=True, reaches="", began_at=100.0, ended_at=101.0)
"""Asked at 99, answered at 103."""


def said(found: Findings) -> Check:
    return judged("machine 10.0.0.7", found, "8 CPUs", 99.0, 103.0)


def test_a_machine_that_is_well_says_what_it_has() -> None:
    assert said(WELL) == Check("machine 10.0.0.7", "ok", "8 CPUs")


@pytest.mark.parametrize(
    ("found", "status", "says", "advice"),
    [
        (
            replace(WELL, wrong=["Gyre is 0.1 here.", "GPU 3 has 2 errors."]),
            "fail",
            "0.1 here. GPU 3",
            "leave",
        ),
        (replace(WELL, sees_home=False), "fail", "a folder of its own", "GYRE_HOME"),
        (replace(WELL, reaches="timed out"), "fail", "cannot be reached from there: timed out", "ports"),
        (replace(WELL, began_at=160.0, ended_at=161.0), "warn", "58 s ahead of", "NTP"),
        (replace(WELL, began_at=40.0, ended_at=41.0), "warn", "59 s behind", "NTP"),
        (
            replace(WELL, wrong=["No disk."], sees_home=False, reaches="timed out"),
            "fail",
            "No disk.",
            "leave",
        ),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(found: Findings, status: str, says: str, advice: str) -> None:
    check = said(found)
    assert check.status == status
    assert says in check.found
    assert advice in check.advice


@pytest.mark.parametrize("off_s", [-2.0, 0.0, 2.0, 3.5])
def test_a_clock_counts_as_wrong_only_where_the_answer_shows_it(off_s: float) -> None:
    """It may have begun as soon as it was asked, and ended just before the answer came."""
    assert said(replace(WELL, began_at=100.0 + off_s, ended_at=101.0 + off_s)).status == "ok"


def test_a_machine_looks_for_the_home_and_for_who_asked(tmp_path: Path) -> None:
    needs, marker = needs_of(tmp_path, gpus=0), tmp_path / "marker"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert not look(needs, str(marker), address).sees_home
        marker.touch()
        found = look(needs, str(marker), address)
    assert (found.wrong, found.sees_home, found.reaches) == ([], True, "")
    assert found.began_at <= found.ended_at
    assert "refused" in look(needs, str(marker), address).reaches


def test_where_there_is_no_home_yet_none_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = look(needs_of("", gpus=0), "", server.getsockname())
    assert (found.wrong, found.sees_home) == ([], True)
