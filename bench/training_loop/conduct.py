"""A run of `loop_gpu.py`: its parts in order, each with what it needs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from dataclasses import asdict, replace
from pathlib import Path

from gpu_plane.follow import now
from gpu_plane.machine import gpu_used_mib
from gpu_plane.run import end_all, gather_logs, run_part, write_results
from training_loop.parts.actor_alone import ActorAlone
from training_loop.parts.colocated import Colocated
from training_loop.parts.faults import Faults
from training_loop.parts.loading import Loading
from training_loop.parts.more import More
from training_loop.parts.overlapped import Overlapped
from training_loop.parts.start import Start
from training_loop.parts.tp2 import TensorParallel
from training_loop.scales import DRY, DRY_BIG, GPU, GPU_BIG
from training_loop.table import table

PARTS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    (
        "model",
        20.0,
        (
            "bare",
            "loop",
            "loading",
            "sync",
            "faults",
            "layouts",
            "colocated",
            "big",
            "tp2",
            "critic",
            "memory",
        ),
    ),
    ("start", 120.0, ("bare", "loop", "loading", "sync", "faults")),
    ("bare", 150.0, ("bare", "loop", "loading", "sync", "faults")),
    ("served", 200.0, ("served", "loop", "loading", "sync", "faults")),
    ("loop", 150.0, ("loop",)),
    ("loading", 40.0, ("loading",)),
    ("sync", 60.0, ("sync",)),
    ("faults", 280.0, ("faults",)),
    ("colocated", 310.0, ("colocated",)),
    ("layouts", 230.0, ("layouts",)),
    ("big", 230.0, ("big",)),
    ("tp2", 230.0, ("tp2",)),
    ("critic", 110.0, ("critic",)),
    ("memory", 200.0, ("memory",)),
    ("more", 400.0, ("more",)),
)
"""Steps with their deadlines, and the parts that need them."""

NAMES = (
    *("bare", "served", "loop", "loading", "sync", "faults", "colocated", "layouts", "big"),
    *("tp2", "critic", "memory", "more"),
)


class Loop(Start, Overlapped, Loading, Faults, Colocated, ActorAlone, TensorParallel, More):
    """Every part."""


def conduct(options: argparse.Namespace) -> int:
    scale, big = (DRY, DRY_BIG) if options.dry_run else (GPU, GPU_BIG)
    if options.steps:
        scale = replace(scale, steps=options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # nothing that was started is left
    began = now()
    seconds = options.seconds or (400.0 if options.dry_run else 480.0) * options.patience
    memory = Path("/dev/shm")
    needed = (1 if options.dry_run else 12) << 30
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > needed
    gpus = 0 if options.dry_run else len(gpu_used_mib() or [])
    with (
        tempfile.TemporaryDirectory(prefix="gyre-loop-") as place,
        tempfile.TemporaryDirectory(prefix="gyre-loop-", dir=memory if roomy else None) as weights,
    ):
        bench = Loop(
            scale,
            options.out.resolve(),
            Path(place),
            [Path(weights, "small"), Path(weights, "big")],
            began + seconds,
            gpus,
            weights=Path(weights),
            big_scale=big,
            loader=not options.no_loader,
            cuda=not options.dry_run,
            sglang_cpu=options.sglang_cpu or "",
            way=options.publish,
            patience=options.patience,
            wanted=tuple(options.part),
        )
        bench.results = {
            "began": began,
            "dry_run": options.dry_run,
            "scale": asdict(scale),
            "big_scale": asdict(big),
            "in_memory": roomy,
            "parts": {},
        }

        def last_resort() -> None:
            bench.results["watchdog"] = True
            write_results(bench)
            gather_logs(bench)
            end_all(bench)
            shutil.rmtree(weights, ignore_errors=True)
            os._exit(3)

        watchdog = threading.Timer(bench.end_at - now() + 15.0, last_resort)
        watchdog.daemon = True
        watchdog.start()
        try:
            for name, limit_s, needed_by in PARTS:
                if set(needed_by) & set(options.part):
                    run_part(bench, name, limit_s * options.patience)
        finally:
            for plane in bench.planes.values():
                with contextlib.suppress(Exception):  # nothing is to be learned from how it ends
                    plane.stop()
            end_all(bench)
            bench.results["seconds"] = round(now() - began, 1)
            write_results(bench)
            gather_logs(bench)
            watchdog.cancel()
    print(json.dumps(bench.results) if options.json else "\n".join(table(bench.results)))
    return 0 if all(part.get("ok") for part in bench.results["parts"].values()) else 1
