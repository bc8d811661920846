"""What this machine must have for the job: packages of extras, engines, GPUs.

Where the job runs here, what is missing is a mistake; otherwise it is a note, for the machines that run the job may
have it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gyre.api.checks.findings import elsewhere
from gyre.config import JobSpec, port_range
from gyre.config.secrets import is_address, is_header_value, referenced, resolved
from gyre.config.sections import WorkloadSettings
from gyre.errors import ConfigError, GraphError
from gyre.extras import how_to_install, installed
from gyre.graph import NodeCapacity, can_come_later, fit_to_cluster
from gyre.graph.backends import back_end_of, back_ends
from gyre.graph.compile import CompiledJob
from gyre.graph.integrations import reads_sections
from gyre.graph.rollout_roles import is_instance, rollouts_of
from gyre.observe.sinks.kinds import PACKAGES as SINK_PACKAGES
from gyre.rollouts.engines import known_engine

ENGINE_PYTHON_S = 20.0
"""Within which another Python must say whether an engine is installed in it."""

_GPU_FILES = ("nvidia[0-9]*", "nvidiactl", "kfd", "dxg", "nvhost-gpu", "davinci[0-9]*", "dri/renderD*")


def trains_elsewhere(spec: JobSpec) -> bool:
    """Whether a role of the job needs torch and this installation has none: it plans and submits for machines that
    have it."""
    return any(back_end_of(module) for module in _modules(spec)) and not installed("torch")


def check(spec: JobSpec, *, here: bool) -> Iterator[str]:
    """Yields notes; raises ConfigError for the first thing that is missing where the job runs `here`."""
    for problem in _missing(spec):
        if here:
            raise problem
        yield elsewhere(problem.message)


def _missing(spec: JobSpec) -> Iterator[ConfigError]:
    if spec.device_type == "GPU" and not has_gpu() and not _all_is_on_cpus(spec):
        yield ConfigError(
            "device_type: GPU given, but this machine has none, and the job runs on it alone.",
            hint="Give device_type CPU; or --ray-address of a cluster that has some.",
        )
    yield from _packages(spec)
    yield from _engines(spec)
    yield from _network(spec)
    yield from _notify(spec)


def check_room(compiled: CompiledJob, *, here: bool) -> None:
    """Raises GraphError where the job runs `here` and this machine has not the cores, the memory or the GPUs that it
    reserves. Resources and labels of the user's own naming are Ray's to know."""
    spec = compiled.spec
    if not here or any(role.resources.custom or role.resources.labels for role in spec.roles.values()):
        return
    gpus = gpu_count()
    if spec.device_type == "GPU" and gpus is not None and (spec.device_per_node or 0) > gpus:
        raise GraphError(
            f"device_per_node: {spec.device_per_node} given, but this machine has {gpus} GPU{'s' * (gpus != 1)}.",
            hint="Lower it, or leave it out.",
        )
    machine = NodeCapacity(
        node_id="this machine",
        ip="127.0.0.1",
        cpu=float(os.cpu_count() or 1),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu=float("inf") if gpus is None else float(gpus),
    )
    try:
        fit_to_cluster(compiled.plan, [machine], can_come_later(spec))
    except GraphError as error:
        found = re.match(r"cluster: (\w+)", error.message)
        if found is None or found[1] not in spec.roles:
            raise
        message = error.message.replace("cluster:", f"roles.{found[1]}.resources:", 1)
        raise GraphError(message, hint=error.hint, details=error.details) from None


def gpu_count() -> int | None:
    """How many GPUs this process may use; None where that cannot be seen without their driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return found if found or not has_gpu() else None


def has_gpu() -> bool:
    """Whether there is any sign of a GPU. Its driver is not asked, for that takes seconds."""
    return any(next(Path("/dev").glob(pattern), None) is not None for pattern in _GPU_FILES)


def _all_is_on_cpus(spec: JobSpec) -> bool:
    return all(
        role.resources.accelerator == 0 or name in ("trainer", "rollout_manager")
        for name, role in spec.roles.items()
    )


def _packages(spec: JobSpec) -> Iterator[ConfigError]:
    """What Gyre's own classes import of the extras."""
    for role, given in spec.roles.items():
        back_end = back_end_of(given.entrypoint.module) if given.entrypoint is not None else None
        needs = back_end.needs if back_end is not None else {}
        absent = next((module for module in needs if not installed(module)), "")
        if absent:
            yield _absent(f"roles.{role}.entrypoint", f"{given.entrypoint} needs {needs[absent]}", absent)
            break
    for sink in spec.observe.sinks:
        package = SINK_PACKAGES.get(sink.kind)
        if package is not None and not installed(package):
            yield _absent("observe.sinks", f"{sink.kind} needs {package}", package)
        if sink.kind == "otlp" and not sink.to and not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
            yield ConfigError(
                "observe.sinks: otlp has no collector.",
                hint='Give one with `to`, such as "http://collector:4318", or set OTEL_EXPORTER_OTLP_ENDPOINT.',
            )
    if "mooncake" in spec.weights.transports:
        from gyre.rollouts.weight_peer import check_transports

        try:
            check_transports(spec.weights)
        except ConfigError as error:
            yield error
    if not reads_sections(spec):
        return
    settings = WorkloadSettings.read(spec.config)
    used = [back_end_of(module) for module in _modules(spec)]
    for one in back_ends():
        section = getattr(settings, one.section) if one.section else None
        if section is not None and section.device == "cuda" and not has_gpu() and one in used:
            yield ConfigError(
                f"config.{one.section}.device: cuda given, but this machine has no GPU.",
                hint='Give "auto" or "cpu".',
            )
    reward = spec.roles.get("reward")
    is_python = (
        reward is not None and reward.entrypoint is not None and reward.entrypoint.name == "PythonReward"
    )
    functions = [part.function for part in settings.reward.parts]
    if is_python and "math_verify" in functions and not installed("math_verify"):
        key = settings.reward.in_place(functions.index("math_verify"), "config.reward.function")
        yield _absent(key, "math_verify needs math-verify", "math_verify")
    if settings.data is not None and spec.run.data is None and not installed("tokenizers"):
        yield _absent("config.data", "a prepared data set needs tokenizers", "tokenizers")


def _notify(spec: JobSpec) -> Iterator[ConfigError]:
    """Whom the job notifies: variables that are not set, programs that are not there."""
    known = {**os.environ, **spec.env}
    for at, notify in enumerate(spec.observe.notify):
        for name in referenced([notify.webhook, *notify.headers.values()]):
            if not known.get(name):
                yield ConfigError(
                    f"observe.notify.{at}: ${name} is not set.",
                    hint=f"Set it (export {name}=…), or give it in the job's `env`.",
                )
        for value in (notify.webhook, *notify.headers.values()):
            found = resolved(value, known) if known.get(next(iter(referenced([value])), "")) else ""
            if found and not (is_address(found) if value is notify.webhook else is_header_value(found)):
                yield ConfigError(
                    f"observe.notify.{at}: {value} is set to what is no "
                    f"{'address' if value is notify.webhook else 'value of a header'}.",
                    hint='Expected "https://host/…".' if value is notify.webhook else "Plain ASCII text.",
                )
        if notify.command and shutil.which(notify.command[0]) is None:
            yield ConfigError(
                f"observe.notify.{at}.command: {notify.command[0]} is no program of this machine.",
                hint="Give its path from /, and see that it may be executed (chmod +x).",
            )


def _modules(spec: JobSpec) -> list[str]:
    return [role.entrypoint.module for role in spec.roles.values() if role.entrypoint is not None]


def _absent(key: str, what: str, module: str) -> ConfigError:
    hint = how_to_install(module)
    if module == "torch":
        hint += "; or --ray-address of a cluster whose machines have it."
    return ConfigError(f"{key}: {what}, which is not installed.", hint=hint)


def _network(spec: JobSpec) -> Iterator[ConfigError]:
    """Certificates that are none, and addresses and ports that the weight plane cannot have."""
    rollouts, weights = spec.rollouts, spec.weights
    if rollouts.tls_cert and rollouts.tls_key:
        from gyre.rollouts.protocol.credentials import server_context

        try:
            server_context(Path(rollouts.tls_cert), Path(rollouts.tls_key))
        except ConfigError as error:
            problem = error.message.replace("rollouts.tls_cert ", "rollouts.tls_cert: ", 1)
            yield ConfigError(problem, hint=error.hint)
    if weights.bind and not weights.bind.startswith(("0.0.0.0", "::")):
        from gyre.rollouts.weight_peer import where_to_listen

        try:
            host, _ = where_to_listen(weights.bind, "http://127.0.0.1")
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.bind((host, 0))
        except ConfigError as error:
            yield error
        except OSError as error:
            yield ConfigError(
                f"weights.bind: this machine has not the address {weights.bind} ({error.strerror}).",
                hint="Give a network in CIDR notation, or leave it out.",
            )
    instances = sum(role.total for name, role in spec.roles.items() if is_instance(spec, name))
    if weights.ports and instances and spec.node_num == 1:
        first, last = port_range(weights.ports)
        if last - first + 1 < instances + 1:
            yield ConfigError(
                f"weights.ports: {weights.ports} given, which is {last - first + 1} for the actor and {instances} "
                "instances on one machine.",
                hint=f"Each takes one: give {instances + 1} or more.",
            )


def _engines(spec: JobSpec) -> Iterator[ConfigError]:
    seen = set()
    for role, given in spec.roles.items():
        if not is_instance(spec, role):
            continue
        settings = rollouts_of(spec, role)
        pool = given.pool
        above = (
            f"roles.{role}.pool" if pool is not None and (pool.engine or pool.engine_python) else "rollouts"
        )
        kind = known_engine(settings.engine)
        if kind is None or not kind.apart or (above, kind.name, settings.engine_python) in seen:
            continue
        seen.add((above, kind.name, settings.engine_python))
        if not settings.engine_python:
            if not installed(kind.package):
                yield ConfigError(
                    f"{above}.engine: {kind.name} given, but it is not installed in {sys.executable}.",
                    hint=f"{kind.install}; or name the Python that has it as rollouts.engine_python.",
                )
            continue
        python = shutil.which(settings.engine_python)
        if python is None:
            yield ConfigError(
                f"{above}.engine_python: {settings.engine_python} is no program that can be run.",
                hint=f"Give the path of the Python that {kind.label} is installed in.",
            )
        elif not _has(python, kind.package):
            yield ConfigError(
                f"{above}.engine_python: {kind.label} is not installed in {settings.engine_python}.",
                hint=f"Install it there: pip install '{kind.package}{kind.requires}'.",
            )


def _has(python: str, package: str) -> bool:
    """Whether another Python has a package. An engine's import takes seconds, so that it is only looked for."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    try:
        asked = subprocess.run(
            [python, "-c", code, package],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=ENGINE_PYTHON_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0
