"""From a described job to a running one: check everything, connect, write it down, start its master.

Nothing starts before everything that can be checked is checked: the graph, the classes, the store, the cluster's
room. The job is in the directory before its master is asked for, so that a driver killed in between leaves a job
that is seen and can be stopped.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

from gyre.api.entrypoints import check_entrypoints
from gyre.api.handle import JobHandle
from gyre.api.home import home
from gyre.api.ray_session import NAMESPACE, connect
from gyre.config import JobSpec
from gyre.errors import ConfigError, Unreachable
from gyre.graph import NodeCapacity, compile_job, fit_to_cluster
from gyre.store import open_store

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
) -> JobHandle:
    """Start the job and return its handle, once the master answers.

    It runs on the cluster that this process is connected to, else on `ray_address` or RAY_ADDRESS, else, with
    `start_local`, on a Ray cluster that is started for it and ends with this process. Raises ConfigError,
    GraphError, StoreError, Conflict (the name is taken) and Unreachable.
    """
    spec = spec.model_copy(deep=True)
    if name is not None:
        spec = JobSpec.model_validate({**spec.model_dump(), "name": name})
    spec = compile_job(spec).spec
    check_entrypoints(spec)
    _check_bind(host, token)
    place = home(home_path)
    place.check_writable()
    store_url = spec.store.url or place.database_url()
    with open_store(store_url) as store:
        address = connect(ray_address, start_local=start_local, place=place)
        fit_to_cluster(compile_job(spec).plan, _nodes())
        job_id = f"{spec.name}-{uuid.uuid4().hex[:8]}"
        store.create_job(
            job_id=job_id,
            name=spec.name,
            spec=spec.model_dump(mode="json"),
            now=time.time(),
            ray_address=address,
            namespace=NAMESPACE,
        )
        directory = place.job_directory(job_id)
        try:
            _start_master(spec, job_id, store_url, directory, host=host, port=port, token=token)
        except BaseException:
            # Nothing runs, so the name must not stay taken.
            store.update_job(
                job_id,
                phase="failed",
                reason="not_started",
                message="its master did not start",
                ended_at=time.time(),
            )
            raise
    return JobHandle(job_id, store_url, token)


def _nodes() -> list[NodeCapacity]:
    import ray

    return [
        NodeCapacity(
            node_id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            cpu=float(node["Resources"].get("CPU", 0)),
            memory_bytes=int(node["Resources"].get("memory", 0)),
            gpu=float(node["Resources"].get("GPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _check_bind(host: str, token: str | None) -> None:
    from gyre.api.loopback import is_loopback

    if not token and not is_loopback(host):
        raise ConfigError(
            f"host {host!r}: an address off loopback needs a token.", hint="Give --token, or bind 127.0.0.1."
        )


def _start_master(
    spec: JobSpec, job_id: str, store_url: str, directory: Path, *, host: str, port: int, token: str | None
) -> None:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from gyre.master.actor import MasterActor, MasterSettings, master_name

    settings = MasterSettings(
        job_id=job_id,
        store_url=store_url,
        directory=str(directory),
        device_type=spec.device_type,
        surface="gyre.api.rest.surface:serve_master",
        host=host,
        port=port,
        token=token,
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
    with open_store(store_url) as store:
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
