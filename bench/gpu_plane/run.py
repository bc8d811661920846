"""How the parts of a bench are run, each within its deadline, and what is kept of them whatever happens."""

from __future__ import annotations

import contextlib
import json
import signal
import traceback
from collections.abc import Iterator
from typing import Any

import psutil

from gpu_plane.bench import Bench
from gpu_plane.follow import PartFailed, Row, now


def run_part(bench: Bench, name: str, limit_s: float) -> None:
    out: Row = {}
    bench.results["parts"][name] = out
    began = now()
    until = min(began + limit_s, bench.end_at)
    print(f"[{began - bench.results['began']:6.1f} s] {name}", flush=True)
    try:
        if until - began < 5.0:
            raise PartFailed("no time is left for it")
        with alarm(until - began + 3.0):
            getattr(bench, name)(out, until)
        out["ok"] = True
    except Exception as error:
        out["ok"] = False
        out["failed"] = f"{type(error).__name__}: {error}"[:3000]
        out["traceback"] = traceback.format_exc()[-3000:]
        out["tails"] = tails(bench)
        print(f"    FAILED: {out['failed']}", flush=True)
    for plane in bench.planes.values():
        if plane.trainer is not None:
            plane.trainer.no_more()
            plane.trainer.taking = True
    out["part_seconds"] = round(now() - began, 2)
    write_results(bench)


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """For a part that waits where no deadline was thought of."""

    def ring(number: int, frame: Any) -> None:
        raise PartFailed(f"still not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def write_results(bench: Bench) -> None:
    partial = bench.out / ".results.json"
    partial.write_text(json.dumps(bench.results, indent=1) + "\n")
    partial.rename(bench.out / "results.json")


def tails(bench: Bench) -> dict[str, str]:
    return {
        path.name: path.read_text(errors="replace")[-2500:]
        for path in sorted(bench.place.glob("*/*"))
        if path.suffix in (".tail", ".out") and path.stat().st_size
    }


def gather_logs(bench: Bench) -> None:
    """What every process said, in one file of at most some MiB; profiles beside it."""
    with open(bench.out / "logs.txt", "wb") as file:
        for path in sorted(
            [*bench.place.glob("*/*"), *bench.place.glob("*.txt"), *bench.place.glob("*.out")]
        ):
            if path.suffix in (".tail", ".out", ".jsonl", ".txt") and path.is_file():
                data = path.read_bytes()
                if path.suffix == ".jsonl":
                    lines = [line for line in data.splitlines(True) if b'"state"' not in line]
                    data = b"".join(line for line in lines if b'"progress"' not in line)
                file.write(f"\n===== {path.name}\n".encode() + data[-400_000:])


def end_all(bench: Bench) -> None:
    """Whatever is still there of what was started here. Guards first: they end their engines at once when told so, and
    take out of shared memory what these had there."""
    guards = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "guard.py" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGUSR1)
                guards.append(process)
    psutil.wait_procs(guards, timeout=4.0)
    for child in [*bench.instances.values(), *(plane.manager for plane in bench.planes.values())]:
        if child is not None:
            with contextlib.suppress(psutil.Error, OSError):
                child.kill()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
