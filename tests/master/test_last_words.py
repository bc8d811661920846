"""The evidence of a death has the end of that process's log, its engine's output included."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from gyre.failover import Cause
from gyre.master import evidence
from gyre.master.cluster import Address, Cluster, ProcessDied
from gyre.master.evidence import BYTES, LINES, death_of, last_words_of

NOT_ASKED = cast(Cluster, None)
"""Without a count of before nobody is asked for the kernel's kills."""


async def test_the_last_lines_of_that_process_alone(tmp_path: Path) -> None:
    (tmp_path / "rollout-0.1.log").write_text("of before\n")
    (tmp_path / "rollout-0.2.log").write_text(
        "".join(f"2026-01-01T00:00:00.000Z I line {number}\n" for number in range(50))
        + "2026-01-01T00:00:01.000Z E [engine] CUDA error: out of memory\n"
        + "terminate called after throwing an instance of 'c10::Error'\n"
    )
    words = (await last_words_of(tmp_path, Address("rollout-0", 2)))["last_words"].split("\n")
    assert len(words) == LINES
    assert words[-2:] == [
        "[engine] CUDA error: out of memory",
        "terminate called after throwing an instance of 'c10::Error'",
    ]
    assert await last_words_of(tmp_path, Address("rollout-0", 3)) == {}
    assert await last_words_of(tmp_path / "none", Address("rollout-0", 1)) == {}


async def test_they_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "rollout-0.1.log").write_text(f"{'x' * 1000}\n" * 50)
    assert len((await last_words_of(tmp_path, Address("rollout-0", 1)))["last_words"]) <= BYTES


async def test_a_folder_that_does_not_answer_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(evidence, "WITHIN_S", 0.01)
    monkeypatch.setattr(asyncio, "to_thread", hangs)
    assert await last_words_of(tmp_path, Address("rollout-0", 1)) == {}


async def test_a_death_has_them_in_its_evidence_beside_its_cause(tmp_path: Path) -> None:
    (tmp_path / "actor-0.1.log").write_text("so it said\n")
    cause, told = await death_of(
        Address("actor-0", 1), ProcessDied("killed"), NOT_ASKED, "there", None, tmp_path
    )
    assert cause is Cause.DIED
    assert told == {"error": "killed", "last_words": "so it said"}
