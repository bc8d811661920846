"""A run of `rollouts_gpu.py`: its parts in order, and the table of what they found."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

from gpu_plane.children import Child
from gpu_plane.follow import Row, now
from gpu_plane.machine import gpu_used_mib, machine
from gpu_plane.parts.one import OneInstance
from gpu_plane.parts.pair import Pair
from gpu_plane.parts.seeded import Seeded
from gpu_plane.parts.transcript import Transcript
from gpu_plane.run import end_all, gather_logs, run_part, write_results
from gpu_plane.scale import DRY, GPU

PARTS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    ("start_one", 210.0, ("single", "updates", "transcript")),
    ("single", 220.0, ("single",)),
    ("updates", 45.0, ("updates",)),
    ("start_pair", 15.0, ("two", "crash", "drain", "ends")),
    ("transcript", 60.0, ("transcript",)),
    ("stop_one", 25.0, ("single", "updates", "transcript")),
    ("two", 190.0, ("two",)),
    ("crash", 90.0, ("crash",)),
    ("drain", 30.0, ("drain",)),
    ("ends", 45.0, ("ends",)),
    ("seeded", 100.0, ("seeded",)),
)
"""Steps with their deadlines, and the parts that need them."""

NAMES = ("single", "updates", "transcript", "two", "crash", "drain", "ends", "seeded")


class RolloutBench(OneInstance, Transcript, Pair, Seeded):
    """Every part."""


def conduct(options: argparse.Namespace) -> int:
    scale = DRY if options.dry_run else GPU
    scale = replace(
        scale, absent_s=scale.absent_s * options.patience, total_s=scale.total_s * options.patience
    )
    if options.rounds:
        scale = replace(scale, rounds=options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # nothing that was started is left
    began = now()
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 6 << 30
    gpus = 0 if options.dry_run else len(gpu_used_mib() or [])
    with (
        tempfile.TemporaryDirectory(prefix="gyre-gpu-") as place,
        tempfile.TemporaryDirectory(prefix="gyre-gpu-", dir=memory if roomy else None) as weights,
    ):
        bench = RolloutBench(
            scale,
            options.out.resolve(),
            Path(place),
            [Path(weights, "first"), Path(weights, "second")],
            began + (options.seconds or scale.total_s),
            gpus,
        )
        (bench.place / "cache").mkdir()
        bench.results = {"began": began, "dry_run": options.dry_run, "scale": vars(scale), "parts": {}}

        def last_resort() -> None:
            bench.results["watchdog"] = True
            write_results(bench)
            gather_logs(bench)
            end_all(bench)
            os._exit(3)

        watchdog = threading.Timer(bench.end_at - now() + 20.0, last_resort)
        watchdog.daemon = True
        watchdog.start()
        try:
            writers = [
                Child(
                    "model",
                    {
                        "folder": str(folder),
                        "shape": scale.shape,
                        "seed": seed,
                        "bf16": not options.dry_run,
                        "threads": 1 if options.dry_run else 4,
                    },
                    bench.place / "models.out",
                )
                for seed, folder in enumerate(bench.models)
            ]
            bench.results["machine"] = machine()
            bench.results["gpu_used_mib_before"] = gpu_used_mib()
            if any(writer.process.wait(120) for writer in writers):
                raise SystemExit((bench.place / "models.out").read_text()[-2000:])
            bench.results["models_written_s"] = round(now() - began, 2)
            for name, limit_s, needed_by in PARTS:
                if set(needed_by) & set(options.part):
                    run_part(bench, name, limit_s * options.patience)
        finally:
            end_all(bench)
            bench.results["seconds"] = round(now() - began, 1)
            bench.results["gpu_used_mib_after"] = gpu_used_mib()
            write_results(bench)
            gather_logs(bench)
            watchdog.cancel()
    print("\n".join(summary(bench.results)))
    return 0 if all(part.get("ok") for part in bench.results["parts"].values()) else 1


def summary(results: Row) -> list[str]:
    lines = []
    for name, part in results["parts"].items():
        state = "ok" if part.get("ok") else f"FAILED {part.get('failed', '')[:160]}"
        lines.append(f"{name:<11}{part.get('part_seconds', 0):7.1f} s  {state}")
    parts = results["parts"]
    wanted = {
        "start_one": ("engine_start_s",),
        "single": tuple(
            f"gyre_over_{way}_{kind}" for way in ("bare", "bare_over") for kind in ("fixed", "varied")
        ),
        "two": ("rate_of_both", "rate_of_one", "of_ideal", "generated_again", "killed", "account"),
        "crash": ("detected_s", "working_again_s", "elsewhere_first_s", "elsewhere_last_s", "processes_left"),
        "drain": ("samples_held", "handed_over_s", "agent_and_engine_ended_s"),
        "ends": ("engine_gone_s", "gpu_used_mib"),
        "seeded": ("alike_alone_and_in_a_full_batch", "alike_whole_and_continued", "throughput"),
    }
    for name, keys in wanted.items():
        lines += [f"{name}.{key} = {parts[name][key]}" for key in keys if key in parts.get(name, {})]
    for key in (
        "bare_fixed",
        "gyre_fixed",
        "bare_varied",
        "gyre_varied",
        "bare_over_fixed",
        "bare_over_varied",
        "bare_few",
    ):
        rows = parts.get("single", {}).get(key, [])
        for row in rows:
            lines.append(
                f"single.{key}: {row['tokens_s']:.0f} tok/s  {row['cores']} held {row.get('held', '')}"
            )
    lines += [
        f"updates.{key} = {row}" for key, row in parts.get("updates", {}).items() if isinstance(row, dict)
    ]
    return lines
