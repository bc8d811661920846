"""What `gyre doctor` says of load, extras, engine and GPU build: what was found, and what to do."""

from __future__ import annotations

import os
import re
from importlib.metadata import metadata
from pathlib import Path

import pytest

from gyre.api.cli import doctor, packages
from gyre.api.cli.imports import import_errors
from gyre.api.cli.packages import EXTRAS, engines, extras, gpu_build, package, requirement, torch_cuda
from gyre.api.cluster_checks import Check
from gyre.rollouts.engines import known_engine


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed, by distribution."""
    found: dict[str, str] = {}
    monkeypatch.setattr(packages, "installed", found.get)
    monkeypatch.setattr(packages, "_import_errors", dict)
    return found


@pytest.mark.parametrize(
    ("torch", "driver", "status", "found"),
    [
        ("", None, "ok", "for CPUs; no NVIDIA driver is loaded"),
        ("12.6", None, "ok", "for CUDA 12.6, but no NVIDIA driver is loaded"),
        ("", "12.4", "warn", "for CPUs, and the NVIDIA driver supports CUDA 12.4"),
        ("13.0", "12.4", "fail", "for CUDA 13.0, and the NVIDIA driver supports CUDA 12.4 at most"),
        ("12.6", "12.4", "ok", "for CUDA 12.6; the NVIDIA driver supports CUDA 12.4"),  # one major version
        ("12.6", "13.0", "ok", "for CUDA 12.6; the NVIDIA driver supports CUDA 13.0"),
    ],
)
def test_torchs_build_and_the_driver(
    versions: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    torch: str,
    driver: str | None,
    status: str,
    found: str,
) -> None:
    versions["torch"] = "2.9.0"
    monkeypatch.setattr(packages, "torch_cuda", lambda: torch)
    monkeypatch.setattr(packages, "driver_cuda", lambda: driver)
    check = gpu_build()
    assert (check.status, check.found) == (status, found)
    assert status == "ok" or "build of torch for CUDA" in check.advice


def test_what_torch_was_built_for_is_read_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    file = tmp_path / "torch" / "version.py"
    monkeypatch.setattr(
        packages, "find_spec", lambda name: type("Spec", (), {"origin": str(tmp_path / name / "__init__.py")})
    )
    file.write_text(
        "from typing import Optional\n__version__ = '2.9.0+cu126'\ncuda: Optional[str] = '12.6'\n"
    )
    assert torch_cuda() == "12.6"
    file.write_text("cuda: Optional[str] = None\nhip: Optional[str] = '6.0'\n")
    assert torch_cuda() == ""


def test_a_missing_extra_says_what_it_is_for(versions: dict[str, str]) -> None:
    checks = {check.name: check for check in extras()}
    assert checks.keys() == {f"extra [{extra.name}]" for extra in EXTRAS}
    megatron = checks["extra [megatron]"]
    assert (megatron.status, megatron.found) == ("ok", "not installed")
    assert megatron.advice == "Only to train a model's folder with Megatron: pip install 'gyre-rl[megatron]'"
    versions.update({"tokenizers": "0.23.0", "megatron-core": "0.11.0"})
    versions["mooncake-transfer-engine-non-cuda"] = "0.3.13"
    checks = {check.name: check for check in extras()}
    assert checks["extra [data]"].found == "jinja2 not installed"
    assert checks["extra [megatron]"].status == "warn"
    assert checks["extra [megatron]"].found.startswith("megatron-core 0.11.0, wanted ")
    assert checks["extra [mooncake]"].found == "mooncake-transfer-engine 0.3.13"


def test_every_extra_is_one_of_the_distributions() -> None:
    known = set(metadata("gyre-rl").get_all("Provides-Extra") or [])
    assert {extra.name for extra in EXTRAS} | {"sglang", "postgres"} <= known
    assert all(requirement(one) for extra in EXTRAS for one in extra.packages)


def test_the_engines_that_are_installed_apart(versions: dict[str, str]) -> None:
    def engine(name: str = "sglang") -> Check:
        return {check.name: check for check in engines()}[f"engine {name}"]

    for name in ("sglang", "vllm"):
        assert engine(name).status == "ok"
        assert "rollouts.engine_python" in engine(name).advice
    assert known_engine("sglang").requires == requirement("sglang"), "the record says what the extra does"
    versions["sglang"] = "0.4.1"
    check = engine()
    assert check.status == "warn"
    assert re.match(r"0\.4\.1; Gyre knows >=0\.5", check.found)


def test_a_package_that_is_missing_or_old(versions: dict[str, str]) -> None:
    assert package("ray").status == "fail"
    assert re.match(r"pip install 'ray>=2\.\d+'", package("ray").advice)
    versions["ray"] = "1.0"
    assert re.match(r"1\.0, wanted >=2\.", package("ray").found)


@pytest.mark.parametrize(("load", "status"), [(1.9, "ok"), (5.7, "warn")])
def test_a_busy_machine(monkeypatch: pytest.MonkeyPatch, load: float, status: str) -> None:
    monkeypatch.setattr(doctor, "_usable_cores", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert doctor._load() == Check(
        "load", status, f"{load} over the last minute, on 2 cores", doctor._load().advice
    )
    assert bool(doctor._load().advice) == (status == "warn")


def test_what_is_called_ok_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an import does: it raises, ends its process, or does not end."""
    for name, code in {
        "good_one": "print('hello')",
        "raises_one": "raise ImportError('libibverbs.so.1: cannot open')",
        "exits_one": "import os; os._exit(3)",
        "leaves_one": "raise SystemExit(0)",
        "good_two": "",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "hangs_one.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ["good_one", "raises_one", "exits_one", "missing_one", "leaves_one", "good_two"]
    assert import_errors(names) == {
        "good_one": "",
        "raises_one": "ImportError: libibverbs.so.1: cannot open",
        "exits_one": "its import ended the process with status 3",
        "missing_one": "ModuleNotFoundError: No module named 'missing_one'",
        "leaves_one": "SystemExit: 0",
        "good_two": "",
    }
    assert import_errors(["hangs_one"], within_s=2.0) == {"hangs_one": "its import did not end within 2 s"}


def test_a_package_that_cannot_be_imported_is_not_ok(
    versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions |= {"mooncake-transfer-engine-non-cuda": "0.3.13", "ray": "2.60.0"}
    monkeypatch.setattr(packages, "requirement", lambda name: "")
    failed = {"mooncake-transfer-engine": "ImportError: no libcudart", "ray": "ImportError: x"}
    monkeypatch.setattr(packages, "_import_errors", lambda: failed)
    checks = {check.name: check for check in packages.extras()}
    assert checks["extra [mooncake]"].status == "warn"
    assert "no libcudart" in checks["extra [mooncake]"].found
    assert packages.package("ray").status == "fail"


def test_every_package_of_an_extra_has_a_module() -> None:
    assert {one for extra in packages.EXTRAS for one in extra.packages} <= {*packages._MODULES}
