"""From a described job to a running one: check everything, connect, write it down, start its master.

Invariants:
- *checked first*: the graph, the classes, the store, the name, the port and the cluster's room, before anything
  starts, and what takes no time before what does;
- *seen*: the job is in the directory before its master is asked for, so that a driver killed in between leaves a
  job that is seen and can be stopped;
- *all or nothing*: a submission that fails or is interrupted leaves no process, and its name free.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gyre.api.checks import judge
from gyre.api.checks.findings import WeightsDrawn
from gyre.api.first_weights import first_weights
from gyre.api.handle import JobHandle
from gyre.api.home import home
from gyre.api.orphaned_jobs import end_lost_job, is_lost
from gyre.api.ray_session import NAMESPACE, connect, owns_cluster, prepare_local
from gyre.api.terminal.signals import interrupts_kept, signals_held
from gyre.api.tls import Certificate
from gyre.config import JobSpec, parse_job
from gyre.errors import ConfigError, Conflict, NotFound, Unreachable
from gyre.failover.events import StopRequested
from gyre.graph import can_come_later, compile_job, fit_to_cluster
from gyre.graph.compile import CompiledJob
from gyre.store import Labels, Store, open_store

_WITH_TORCH = ("gyre.workloads.torch", "gyre.workloads.megatron", "gyre.workloads.fsdp")

MASTER_START_S = 60.0
"""From asking Ray for the master to its first answer: a fresh cluster on a busy machine takes 20 s of it."""


def submit_job(
    spec: JobSpec,
    name: str | None = None,
    *,
    ray_address: str | None = None,
    start_local: bool = True,
    home_path: str | Path | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    tls_cert: str | Path = "",
    tls_key: str | Path = "",
    plain_http: bool = False,
    from_: str | Path | None = None,
    trust: bool = False,
    no_wait: bool = False,
) -> JobHandle:
    """Start the job and return its handle, once the master answers.

    `from_` names what its first weights are copied from: a job, for its last whole checkpoint, or the folder of a
    checkpoint or of a model (`gyre.api.first_weights`). One in Megatron's own format is unpickled, and wants `trust`.

    Off loopback its REST interface needs a token and speaks TLS, with the certificate of these PEM files or else one
    that the master signs; `plain_http` leaves it in clear.

    Where the cluster has no room for what the job needs to begin, the job waits for it, at most
    `failover.wait_for_room_s`, and a note of the handle says what is required and available. GraphError is raised
    instead with `no_wait`, and on a cluster that is started for it, where no room will come.

    It runs on the cluster that this process is connected to, else on `ray_address` or RAY_ADDRESS, else, with
    `start_local`, on a Ray cluster that is started for it and ends with this process. Raises ConfigError,
    GraphError, StoreError, Conflict (the name is taken) and Unreachable; with `from_` NotFound and CheckpointMismatch.
    """
    spec = spec.model_copy(deep=True)
    if name is not None:
        spec = parse_job({**spec.model_dump(mode="json"), "name": name})
    spec, notes = checked(spec, ray_address, start_local=start_local, has_weights=from_ is not None)
    place = home(home_path)
    place.check_writable()
    store_url = spec.store.url or place.database_url()
    rest = Rest(host, port, token, str(tls_cert), str(tls_key), plain_http)
    rest.check(here=store_url.startswith("sqlite"))
    with open_store(store_url) as store:
        _check_name(store, spec.name)
        job_id = f"{spec.name}-{uuid.uuid4().hex[:8]}"
        with first_weights(store, place, spec, job_id, from_, trust=trust) as (spec, taken):
            address = connect(ray_address, start_local=start_local, place=place)
            from gyre.master.ray_cluster import living_nodes

            plan = fit_to_cluster(
                compile_job(spec).plan,
                living_nodes(),
                can_come_later(spec),
                waits=may_wait(no_wait=no_wait),
            )
            store.create_job(
                job_id=job_id,
                name=spec.name,
                spec=spec.model_dump(mode="json"),
                now=time.time(),
                ray_address=address,
                namespace=NAMESPACE,
                labels=Labels(tuple(spec.tags), spec.notes),
            )
            try:
                directory = place.job_directory(job_id)
                start_master(spec, job_id, store_url, directory, rest)
            except BaseException as error:
                with signals_held():
                    take_back(store, job_id, error)
                raise
    placed = [note for note in plan.notes if note not in notes]
    notes = [*notes, *placed, *taken]
    return JobHandle(job_id, store_url, token, home_path=str(place.path), notes=tuple(notes))


def may_wait(*, no_wait: bool) -> bool:
    """Whether a job may wait for room on the cluster: none comes to one that this process has started for itself."""
    return not no_wait and not owns_cluster()


def checked(
    spec: JobSpec, ray_address: str | None, *, start_local: bool, has_weights: bool
) -> tuple[JobSpec, list[str]]:
    """The resolved job, and warnings and notes on it, after everything that can be checked without its store and its
    cluster. `has_weights`: they are another job's, or its own of before. Raises ConfigError and GraphError."""

    def begin(compiled: CompiledJob) -> None:
        if start_local:  # it loads modules beside the checks
            prepare_local(ray_address, _loaded_by(compiled.spec))

    with interrupts_kept():
        judged = judge(spec, ray_address, must_import=True, before_code=begin)
    drawn = WeightsDrawn if has_weights else ()
    return judged.compiled.spec, [each for each in judged.findings if not isinstance(each, drawn)]


def _loaded_by(spec: JobSpec) -> list[str]:
    """Gyre's own modules that the job's vertices import. Those with torch are left to the vertices where the job sets
    variables, for some of them count only before torch is imported."""
    modules = {role.entrypoint.module for role in spec.roles.values() if role.entrypoint is not None}
    own = sorted(module for module in modules if module.startswith("gyre."))
    sets_variables = bool(spec.env or any(role.env for role in spec.roles.values()))
    if sets_variables:
        return [module for module in own if not module.startswith(_WITH_TORCH)]
    # An optimizer's first call imports dynamo, which takes as long as torch itself.
    return [*own, *(["torch._dynamo"] if any(module.startswith(_WITH_TORCH) for module in own) else [])]


def _check_name(store: Store, name: str) -> None:
    """Raises Conflict while a job that may still run has the name. One whose cluster is gone loses it."""
    with contextlib.suppress(NotFound):
        holder = store.job(name)
        if holder.name != name or not holder.live:
            return
        if is_lost(store, holder):
            end_lost_job(store, holder)
            return
        raise Conflict(
            f"The name {name!r} is taken by job {holder.job_id}, which is {holder.phase}.",
            hint=f"Stop it (gyre stop {name}), or choose another name.",
            details={"job_id": holder.job_id, "phase": holder.phase},
        )


def take_back(store: Store, job_id: str, error: BaseException) -> None:
    """Nothing of the job may run on, and its name must not stay taken."""
    import ray

    if ray.is_initialized():
        end_processes(job_id)
    row = store.job(job_id)
    why = "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "its master did not start"
    if row.last_seq:
        end_lost_job(store, row, why, first=(StopRequested(why),))
    else:
        store.update_job(job_id, phase="failed", reason="not_started", message=why, ended_at=time.time())


def end_processes(job_id: str) -> None:
    """Kill the master and the vertices that it has started, and give their room back. When this returns the master's
    name is free."""
    import ray
    from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group

    from gyre.master.master_actor import master_name

    def kill(name: str) -> None:
        with contextlib.suppress(ValueError):  # Ray's way of saying that there is none
            ray.kill(ray.get_actor(name, NAMESPACE), no_restart=True)

    kill(master_name(job_id))  # first: it would start the others again
    deadline = time.monotonic() + MASTER_START_S
    while master_name(job_id) in ray.util.list_named_actors(all_namespaces=False):
        if time.monotonic() > deadline:
            raise Unreachable(f"Ray did not end the master of {job_id} within {MASTER_START_S:g} s.")
        time.sleep(0.02)
    for name in ray.util.list_named_actors():
        if name.startswith(f"{job_id}/"):
            kill(name)
    for group in placement_group_table().values():
        if group["name"].startswith(f"{job_id}/") and group["state"] != "REMOVED":
            with contextlib.suppress(ValueError):
                remove_placement_group(get_placement_group(group["name"]))


@dataclass(frozen=True, slots=True)
class Rest:
    """Where and how the master's REST interface is served."""

    host: str
    port: int
    token: str | None
    tls_cert: str
    tls_key: str
    plain_http: bool

    def check(self, *, here: bool) -> None:
        """`here`: the master will run on this machine, so its port and files can be tried. Raises ConfigError."""
        from gyre.api.loopback import is_loopback
        from gyre.api.rest.serve import check_port_is_free

        if not self.token and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host!r}: an address off loopback needs a token.",
                hint="Give --token, or bind 127.0.0.1.",
            )
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key belong together.", hint="Give both, or neither.")
        if self.tls_cert and self.plain_http:
            raise ConfigError("plain_http: a certificate is given as well.", hint="Leave one of them out.")
        if here:
            if self.tls_cert:
                Certificate(Path(self.tls_cert), Path(self.tls_key)).context()
            check_port_is_free(self.host, self.port)


def start_master(spec: JobSpec, job_id: str, store_url: str, directory: Path, rest: Rest) -> None:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from gyre.master.master_actor import MasterActor, MasterSettings, master_name

    settings = MasterSettings(
        job_id=job_id,
        store_url=store_url,
        directory=str(directory),
        device_type=spec.device_type,
        store_lost_timeout_s=spec.store.lost_timeout_s,
        surface="gyre.api.rest.surface:serve_master",
        **asdict(rest),
    )
    # An SQLite journal is a file of this machine, so its master must be here; any other may be anywhere.
    here = store_url.startswith("sqlite")
    options: dict[str, Any] = {
        "name": master_name(job_id),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": 0,
        "enable_task_events": False,
    }
    if here:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
    remote: Any = ray.remote
    actor = remote(MasterActor).options(**options).remote(settings)
    deadline = time.monotonic() + MASTER_START_S
    try:
        ray.get(actor.pid.remote(), timeout=MASTER_START_S)
    except (GetTimeoutError, RayError) as error:
        raise Unreachable(f"the master of {job_id} did not start: {error}") from None
    with open_store(store_url, create=False) as store:
        while time.monotonic() < deadline:
            if store.job(job_id).url:
                return
            time.sleep(0.05)
    ray.kill(actor, no_restart=True)
    log = _tail(directory / "logs")
    raise Unreachable(
        f"the master of {job_id} did not answer within {MASTER_START_S:g} s.", hint=f"Its log ends: {log}"
    )


def _tail(folder: Path) -> str:
    files = sorted(folder.glob("master-*.log"), key=lambda path: path.stat().st_mtime)
    return files[-1].read_text(errors="replace")[-800:] if files else "(there is none)"
