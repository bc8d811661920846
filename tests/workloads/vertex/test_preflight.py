"""What would end every vertex on a machine is found before any is placed there."""

from __future__ import annotations

import os
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from gyre.workloads.vertex import preflight
from gyre.workloads.vertex.preflight import Needs, examine, needs_of


@pytest.fixture
def needs(tmp_path: Path) -> Needs:
    return needs_of(tmp_path, gpus=0)


def test_a_machine_like_the_masters_is_fit(needs: Needs) -> None:
    assert examine(needs) == []


def test_another_gyre_or_python_cannot_read_what_the_master_sends(needs: Needs) -> None:
    gyre, python = examine(replace(needs, version="0.0.1", python="2.7"))
    assert gyre.endswith("here and 0.0.1 at the master.")
    assert python.endswith("here and 2.7 at the master.")


def test_a_directory_that_is_not_shared(needs: Needs, tmp_path: Path) -> None:
    (found,) = examine(replace(needs, directory=str(tmp_path / "job")))
    assert found == f"The job's directory {tmp_path}/job is not there: GYRE_HOME must be a shared folder."


def test_a_directory_of_another_user(needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (found,) = examine(needs)
    assert "cannot be written by user" in found


def test_a_full_disk(needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage(3 << 20))
    (found,) = examine(needs)
    assert found.endswith("has 3 MiB left.")


GPUS = {
    "healthy": ("echo '0, 0'; echo '1, [N/A]'", []),
    "one is gone": ("echo '0, 0'", ["1 of 2 GPUs are there."]),
    "memory errors": ("echo '0, 0'; echo '1, 7'", ["GPU 1 has 7 uncorrected memory errors."]),
    "the driver fails": (
        "echo 'No devices were found' >&2; exit 6",
        ["nvidia-smi failed: No devices were found"],
    ),
    "the driver hangs": ("exec sleep 60", ["nvidia-smi did not answer within 0.5 s."]),
}


@pytest.mark.parametrize("case", GPUS)
def test_gpus_as_the_driver_tells_of_them(
    case: str, needs: Needs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, expected = GPUS[case]
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(preflight, "GPUS_ANSWER_S", 0.5)
    assert examine(replace(needs, gpus=2)) == expected


def test_gpus_of_another_vendor_are_not_asked(needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.shutil, "which", lambda tool: None)
    assert examine(replace(needs, gpus=2)) == []
