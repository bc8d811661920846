"""The master as a Ray actor: detached, named, restarted by Ray without limit.

Its constructor only starts a thread: Ray restarts an actor whose process dies, but never one whose constructor
raised. Everything else runs on that thread's own event loop, which Ray's machinery cannot stall.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.malloc_tuning import stay_small
from gyre.master.master import FAULT_EXIT, JobMaster

NAMESPACE = "gyre"


def master_name(job_id: str) -> str:
    return f"{job_id}/master"


@dataclass(frozen=True, slots=True)
class MasterSettings:
    """The settings that a master gets at its first start, and again at every restart."""

    job_id: str
    store_url: str
    directory: str
    device_type: str
    store_lost_timeout_s: float = 300.0
    surface: str = ""
    """`module:function` that serves a MasterApi: called with the master and what is below, returns the url."""
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    tls_cert: str = ""
    tls_key: str = ""
    plain_http: bool = False


class MasterActor:
    def __init__(self, settings: MasterSettings) -> None:
        import ray

        self._settings = settings
        self._self = ray.get_runtime_context().current_actor
        self._master: JobMaster | None = None
        threading.Thread(target=self._main, name="gyre-master", daemon=True).start()

    def pid(self) -> int:
        return os.getpid()

    def _main(self) -> None:
        from gyre.logs.output import redirect_output
        from gyre.master.ray_cluster import RayCluster
        from gyre.workloads.vertex.host import own_places

        settings = self._settings
        directory = Path(settings.directory)
        stay_small()
        redirect_output(directory / "logs" / f"master-0.{os.getpid()}.log")
        try:
            self._master = JobMaster(
                job_id=settings.job_id,
                store_url=settings.store_url,
                directory=directory,
                cluster=RayCluster(
                    settings.job_id,
                    device_type=settings.device_type,
                    master=self._self,
                    writers_stay_here=settings.store_url.startswith("sqlite"),
                ),
                serve=self._serve if settings.surface else None,
                places=[directory, *_store_folder(settings.store_url), *own_places()],
                store_lost_timeout_s=settings.store_lost_timeout_s,
            )
            asyncio.run(self._master.run())
        except BaseException:
            # The process ends and Ray starts a new one, which reads the journal afresh.
            import time
            import traceback

            traceback.print_exc()
            time.sleep(1.0)
            os._exit(FAULT_EXIT)

    def _serve(self, master: JobMaster, earlier_port: int) -> str:
        module, _, function = self._settings.surface.partition(":")
        serve: Any = getattr(importlib.import_module(module), function)
        url: str = serve(
            master,
            host=self._settings.host,
            port=self._settings.port or earlier_port,
            token=self._settings.token,
            restarted=earlier_port != 0,
            directory=Path(self._settings.directory),
            tls_cert=self._settings.tls_cert,
            tls_key=self._settings.tls_key,
            plain_http=self._settings.plain_http,
        )
        return url


def _store_folder(store_url: str) -> list[Path]:
    """The folder of a store that is a file."""
    from sqlalchemy import make_url

    url = make_url(store_url)
    is_file = url.get_backend_name() == "sqlite" and url.database
    return [Path(str(url.database)).parent] if is_file else []
