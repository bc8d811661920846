"""What `doctor` says of installed packages: versions, extras, the engine, and torch's build against the GPU's driver.

Invariant *ok means imported*: a package that is called ok was imported, in a process of its own. Versions are those of
the installed distributions, and what torch was built for is read from its file `version.py`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from gyre.api.cli.imports import import_errors
from gyre.api.cluster_checks import Check
from gyre.engines.kind import EngineKind
from gyre.extras import how_to_install
from gyre.graph.backends import back_ends
from gyre.rollouts.engines import engines as known_engines

DISTRIBUTION = "gyre-rl"


@dataclass(frozen=True, slots=True)
class Extra:
    """An extra of the distribution that a job may need, the packages that it brings, and what for."""

    name: str
    packages: tuple[str, ...]
    purpose: str


EXTRAS = (
    Extra("data", ("tokenizers", "jinja2"), "to prepare data sets and train on them"),
    *(
        Extra(one.extra[0], tuple(name for name in one.needs.values() if name != "torch"), one.extra[1])
        for one in back_ends()
        if one.extra[0]
    ),
    Extra("math", ("math-verify",), "for the reward function math_verify"),
    Extra("mooncake", ("mooncake-transfer-engine",), "to send weights by Mooncake, over RDMA or TCP"),
    Extra("tensorboard", ("tensorboard",), "for the sink tensorboard"),
    Extra("wandb", ("wandb",), "for the sink wandb"),
    Extra("mlflow", ("mlflow-skinny",), "for the sink mlflow"),
    Extra("otel", ("opentelemetry-proto",), "to send spans as protobuf instead of JSON"),
)
"""Besides torch's, engines' and `[postgres]`, which have checks of their own."""

_SAME = {
    "mooncake-transfer-engine": "mooncake-transfer-engine-non-cuda",
    "mlflow-skinny": "mlflow",
}
"""Another distribution of the same package."""


_MODULES = {
    "ray": "ray",
    "torch": "torch",
    "tokenizers": "tokenizers",
    "jinja2": "jinja2",
    "megatron-core": "megatron.core",
    "transformers": "transformers",
    "math-verify": "math_verify",
    "mooncake-transfer-engine": "mooncake.engine",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow-skinny": "mlflow",
    "opentelemetry-proto": "opentelemetry.proto.trace.v1.trace_pb2",
    **{kind.package: kind.package for kind in known_engines() if kind.apart},
    "psycopg": "psycopg",
}
"""What Gyre imports of each distribution."""


@cache
def _import_errors() -> dict[str, str]:
    """By distribution, of those that are installed; all at once, for they share what they import."""
    there = {
        name: module for name, module in _MODULES.items() if installed(name) or installed(_SAME.get(name, ""))
    }
    found = import_errors(list(there.values()))
    return {name: found[module] for name, module in there.items()}


def imported(check: Check, *names: str, status: Literal["warn", "fail"] = "warn") -> Check:
    """The check, if these distributions can be imported as well."""
    for name in names:
        if why := _import_errors().get(name):
            why = why if len(why) <= 300 else f"{why[:300]}…"
            advice = f"Look at `python -c 'import {_MODULES[name]}'`, and install it again."
            return Check(check.name, status, f"{check.found}, but {name} cannot be imported: {why}", advice)
    return check


def package(name: str) -> Check:
    """Installed, and of a version that Gyre's own requirements permit."""
    found = installed(name)
    wanted = requirement(name)
    if found is None:
        return Check(name, "fail", "not installed", f"pip install '{name}{wanted}'")
    if wanted and not _permits(wanted, found):
        return Check(name, "fail", f"{found}, wanted {wanted}", f"pip install '{name}{wanted}'")
    return imported(Check(name, "ok", found), name, status="fail")


def torch() -> Check:
    """As `package`, but an installation that plans, submits and watches does without it."""
    if installed("torch") is not None:
        return package("torch")
    return Check(
        "torch", "ok", "not installed, and not needed to plan, submit and watch", how_to_install("torch")
    )


def extras() -> Iterator[Check]:
    """A check for each extra: what is installed of it, or what it would be for."""
    for extra in EXTRAS:
        yield _extra(extra)


def _extra(extra: Extra) -> Check:
    name = f"extra [{extra.name}]"
    found = {one: installed(one) or installed(_SAME.get(one, "")) for one in extra.packages}
    missing = [one for one, there in found.items() if there is None]
    advice = f"pip install '{DISTRIBUTION}[{extra.name}]'"
    if missing:
        what = "not installed" if len(missing) == len(found) else f"{', '.join(missing)} not installed"
        return Check(name, "ok", what, f"Only {extra.purpose}: {advice}")
    for one, there in found.items():
        wanted = requirement(one)
        if wanted and there is not None and not _permits(wanted, there):
            return Check(name, "warn", f"{one} {there}, wanted {wanted}", advice)
    ok = Check(name, "ok", ", ".join(f"{one} {there}" for one, there in found.items()))
    return imported(ok, *extra.packages)


def engines() -> Iterator[Check]:
    """Those that are installed apart, in this Python. A job may name another Python for them."""
    for kind in known_engines():
        if kind.apart:
            yield _engine(kind)


def _engine(kind: EngineKind) -> Check:
    name, found, wanted = f"engine {kind.name}", installed(kind.package), kind.requires
    if found is None:
        return Check(
            name,
            "ok",
            "not installed in this Python",
            f"Only for rollouts.engine: {kind.name}, on GPUs: {kind.install}, or name the Python that has it as "
            "rollouts.engine_python. The engine embedded needs nothing.",
        )
    if wanted and not _permits(wanted, found):
        return Check(
            name,
            "warn",
            f"{found}; Gyre knows {wanted}",
            f"pip install '{kind.package}{wanted}' in an environment of its own.",
        )
    if find_spec(kind.package) is None:
        return Check(name, "warn", f"{found}, but there is no module {kind.package}", "Install it again.")
    return imported(Check(name, "ok", found), kind.package)


def gpu_build() -> Check:
    """Whether torch's build can use the GPU's driver."""
    name, built, driver = "gpu build of torch", torch_cuda(), driver_cuda()
    if installed("torch") is None:
        return Check(name, "ok", "torch is not installed")
    if driver is None:
        found = (
            f"for CUDA {built}, but no NVIDIA driver is loaded"
            if built
            else "for CPUs; no NVIDIA driver is loaded"
        )
        return Check(name, "ok", found, "Jobs compute on CPUs here." if built else "")
    if not built:
        return Check(
            name,
            "warn",
            f"for CPUs, and the NVIDIA driver supports CUDA {driver}",
            "To use the GPUs, install a build of torch for CUDA: https://pytorch.org/get-started/locally",
        )
    if _major(built) > _major(driver):
        return Check(
            name,
            "fail",
            f"for CUDA {built}, and the NVIDIA driver supports CUDA {driver} at most",
            f"Install a build of torch for CUDA {_major(driver)}, or a newer driver.",
        )
    return Check(name, "ok", f"for CUDA {built}; the NVIDIA driver supports CUDA {driver}")


def torch_cuda() -> str:
    """The CUDA version that the installed torch was built for, such as `12.6`; "" for a build for CPUs."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return ""
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def driver_cuda() -> str | None:
    """The newest CUDA version that the loaded NVIDIA driver supports, such as `12.4`; None where there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)) != 0 or number.value <= 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _major(cuda: str) -> int:
    return int(cuda.partition(".")[0])


def installed(name: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    try:
        return version(name) if name else None
    except PackageNotFoundError:
        return None


def requirement(name: str) -> str:
    """What Gyre's metadata says of a package, such as `>=2.50`; "" for nothing."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return ""
    for line in lines:
        text = line.partition(";")[0].strip()
        match = re.fullmatch(rf"{re.escape(name)}(?:\[[^\]]*\])?\s*([<>=!~].*)?", text)
        if match:
            return (match[1] or "").strip()
    return ""


def _permits(wanted: str, found: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # comes with Ray; without it nothing can be said
        return True
    return SpecifierSet(wanted).contains(found, prereleases=True)
