"""How SGLang is launched: what its graphs hold, by the GPUs of the machine."""

from __future__ import annotations

import importlib.util
import subprocess
from types import ModuleType
from typing import Any

import pytest

from gyre.engines.weight_loading import LOADER_PATH


@pytest.fixture
def launcher() -> ModuleType:
    """Loaded as SGLang's Python runs it: from a folder, without Gyre."""
    spec = importlib.util.spec_from_file_location("launched", LOADER_PATH / "gyre_launch_server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_gpus(monkeypatch: pytest.MonkeyPatch, *mib: int) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if not mib:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0, "".join(f"{one}\n" for one in mib))

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize(
    ("gpus", "given", "more"),
    [
        ((143771, 143771), [], ["--cuda-graph-max-bs", "512"]),
        ((143771, 24000), [], []),
        ((), [], []),
        ((143771,), ["--cuda-graph-max-bs", "64"], []),
        ((143771,), ["--cuda-graph-bs=1"], []),
        ((143771,), ["--disable-cuda-graph"], []),
    ],
    ids=["large", "one is small", "no GPU", "told", "told otherwise", "no graphs"],
)
def test_graphs_are_as_large_as_the_gpus_allow(
    launcher: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[int, ...],
    given: list[str],
    more: list[str],
) -> None:
    with_gpus(monkeypatch, *gpus)
    assert launcher.graph_arguments(["--model-path", "m", *given]) == more
