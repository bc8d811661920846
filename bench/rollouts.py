"""How much one rollout manager carries: tokens, instances and samples, and how soon it reacts.

    python bench/rollouts.py [--part a ...] [--seconds 20] [--json FILE] [--router-python PYTHON]

The manager is the real one, with its ledger in a real SQLite file, in a process pinned to one core. At the far end
of real WebSockets, in another process on another core, agents and a trainer are SIMULATED: an engine is a function
that gives each sample a token every so often (`bench/rollout_plane/load.py`). Some of what is delivered is compared
with what that function gave, token by token.

    a   tokens per second that are tracked and committed; beside it, on the same core, the same tokens relayed one
        event a token by `sglang-router` (with --router-python) and by a relay on aiohttp
    b   from a slot that frees, or a request that comes, to its assignment written; bytes a token
    c   the cost of an instance, from 10 to 1,000, beside a bare aiohttp server that decodes nothing
    d   an instance that dies, hangs, or joins
    e   the memory of the manager over a million samples: short ones, so that it takes three minutes; 4,096 at once
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout_plane.child import Child, published

PLANE = Path(__file__).resolve().parent / "rollout_plane"

MANAGER_CORE, LOAD_CORE = 0, 1

RATE = 61.1
"""Tokens per second of one sample: 16,384 of them make a million."""


STREAMS = 512
"""Of the baselines of part a, at the same rate each."""


@contextlib.contextmanager
def plane(load: dict[str, Any], **options: Any) -> Iterator[tuple[Child, Child]]:
    """A manager and its load, running. At the end it says whether a token is missing or came wrong."""
    with tempfile.TemporaryDirectory(prefix="gyre-bench-", dir=SETTINGS.folder) as folder:
        weights = published(Path(folder) / "weights")
        manager = Child(PLANE / "plane.py", {"core": MANAGER_CORE, "folder": folder, **options})
        agents: Child | None = None
        try:
            port = manager.hear()["port"]
            defaults = {
                "core": LOAD_CORE,
                "port": port,
                "weights": weights,
                "rate": RATE,
                "interval_s": 0.25,
                "n": 8,
                "tokens": (512, 1536),
                "slots_limit": True,
            }
            options = {**defaults, **load}
            slots = options["slots"] + -(-options["slots"] * 6 // 100)
            options["in_flight"] = (
                options["agents"] * slots if options["slots_limit"] else options["open_groups"] * 8
            )
            agents = Child(PLANE / "load.py", options)
            agents.hear()
            yield manager, agents
            told = agents.ask("stats")
            agents.ask("stop")
            missing, wrong = manager.ask("stop")["missing_tokens"], told["wrong"]
            if missing or wrong:
                raise SystemExit(f"{missing} tokens are missing, {wrong} samples came wrong")
        finally:
            if agents is not None:
                agents.end()
            manager.end()


def measured(
    manager: Child, agents: Child, seconds: float, warm_s: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    time.sleep(warm_s)
    manager.ask("reset")
    agents.ask("reset")
    time.sleep(seconds)
    return manager.ask("stats"), agents.ask("stats")


def for_all(instances: int, in_flight: int) -> tuple[int, int]:
    """`max_running` with which so many instances hold so many samples, the router's overcommit included; and how
    many groups of 8 to ask for so that there is always one that waits."""
    slots = in_flight // instances
    running = next(n for n in range(slots, 0, -1) if n + -(-n * 6 // 100) <= slots)
    return running, in_flight // 2


Row = dict[str, Any]


# -- a -----------------------------------------------------------------------------------------------------


def tokens() -> list[Row]:
    rows: list[Row] = []
    slots, groups = for_all(64, 16_384)
    load = {"agents": 64, "slots": slots, "open_groups": groups}
    for _ in range(SETTINGS.runs):
        with plane(load) as (manager, agents):
            here, there = measured(manager, agents, SETTINGS.seconds, warm_s=15.0)
        rows.append(
            {
                "what": "gyre, 64 instances, 16,384 samples",
                "tokens/s": here["accepted_tokens_s"],
                "committed/s": here["committed_tokens_s"],
                "CPU s/s": here["cpu_share"],
                "tokens/s a core": here["accepted_tokens"] / here["cpu_s"],
                "in flight": here["in_flight"],
                "samples/s": here["finished_s"],
                "reports/s": here["reports_s"],
                "commit p50 ms": here["commit"].get("p50_ms"),
                "commit p99 ms": here["commit"].get("p99_ms"),
                "freed p99 ms": here["freed_to_written"].get("p99_ms"),
                "RSS MiB": here["rss_mib"],
                "load": load_average(),
                "raw": [here, there],
            }
        )
        show_last(rows)
    relays = [("aiohttp", "a relay on aiohttp")]
    if SETTINGS.router_python:
        relays.append(("router", "sglang-router"))
    for which, what in relays:
        rows.append({"what": f"{what}, {STREAMS} streams", **relayed(which), "load": load_average()})
        show_last(rows)
    return rows


def relayed(which: str) -> Row:
    """Events of one token each through a relay on the manager's core."""
    load = Child(PLANE / "relays.py", {"core": LOAD_CORE, "rate": RATE, "streams": STREAMS}, "load")
    relay: subprocess.Popen[Any] | None = None
    child: Child | None = None
    try:
        worker = f"http://127.0.0.1:{load.hear()['port']}"
        if which == "aiohttp":
            child = Child(PLANE / "relays.py", {"core": MANAGER_CORE, "worker": worker}, "aiohttp")
            port, pid = child.hear()["port"], child.process.pid
        else:
            port = free_port()
            relay = subprocess.Popen(
                [
                    *(SETTINGS.router_python, "-m", "sglang_router.launch_router", "--worker-urls", worker),
                    *("--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"),
                    *("--prometheus-port", str(free_port()), "--max-concurrent-requests", str(4 * STREAMS)),
                    *("--log-level", "error"),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=lambda: os.sched_setaffinity(0, {MANAGER_CORE}),
            )
            pid = relay.pid
            wait_ready(port)
        load.ask(f"open {port}")
        time.sleep(3.0)
        load.ask("reset")
        before = cpu_seconds(pid)
        time.sleep(SETTINGS.seconds / 2)
        told, used = load.ask("stats"), cpu_seconds(pid) - before
        load.ask("stop")
        return {
            "tokens/s": told["tokens_s"],
            "CPU s/s": used / told["seconds"],
            "tokens/s a core": told["tokens"] / used,
            "in flight": told["streams"],
            "raw": [told],
        }
    finally:
        load.end()
        if child is not None:
            child.end()
        if relay is not None:
            relay.kill()
            relay.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(port: int) -> None:
    """Until the router has its worker in rotation."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readiness", timeout=2),
        ):
            return
        time.sleep(0.2)
    raise SystemExit("sglang-router was not ready within 60 s")


def cpu_seconds(pid: int) -> float:
    """Of a process and those that it started."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(entry.name) == pid or int(fields[1]) == pid:
                    ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


# -- b -----------------------------------------------------------------------------------------------------


def dispatch() -> list[Row]:
    rows: list[Row] = []
    slots, groups = for_all(40, 10_000)
    ways = (
        (
            "a slot frees",
            {"slots": slots, "open_groups": groups, "slots_limit": True},
            "freed_to_written",
            "freed_to_work",
        ),
        (
            "a group is asked for",
            {"slots": 512, "open_groups": 1250, "slots_limit": False},
            "asked_to_written",
            "asked_to_work",
        ),
    )
    for _ in range(SETTINGS.runs):
        for what, load, here_key, there_key in ways:
            with plane({"agents": 40, **load}) as (manager, agents):
                here, there = measured(manager, agents, SETTINGS.seconds, warm_s=12.0)
            tokens = there["tokens"]
            rows.append(
                {
                    "what": what,
                    "in flight": here["in_flight"],
                    "tokens/s": here["accepted_tokens_s"],
                    "CPU s/s": here["cpu_share"],
                    "n": here[here_key]["n"],
                    "p50 ms": here[here_key].get("p50_ms"),
                    "p99 ms": here[here_key].get("p99_ms"),
                    "max ms": here[here_key].get("max_ms"),
                    "round trip p50 ms": there[there_key].get("p50_ms"),
                    "round trip p99 ms": there[there_key].get("p99_ms"),
                    "agent wire B/token": (there["agent_bytes_out"] + there["agent_bytes_back"]) / tokens,
                    "trainer wire B/token": (there["trainer_bytes_out"] + there["trainer_bytes_back"])
                    / tokens,
                    "load": load_average(),
                    "raw": [here, there],
                }
            )
            show_last(rows)
    rows.append(on_disk())
    show_last(rows)
    return rows


def on_disk() -> Row:
    """Nothing is taken, so nothing is forgotten: what the file grows by is what the tokens take."""
    slots, groups = for_all(40, 10_000)
    load = {"agents": 40, "slots": slots, "open_groups": groups, "never_take": True}
    with plane(load) as (manager, _):
        time.sleep(5.0)
        manager.ask("reset")
        before = manager.ask("checkpoint")["db_bytes"]
        first = manager.ask("stats")
        time.sleep(SETTINGS.seconds / 2)
        last = manager.ask("stats")
        after = manager.ask("checkpoint")["db_bytes"]
    tokens = last["committed_tokens_s"] * last["seconds"] - first["committed_tokens_s"] * first["seconds"]
    return {
        "what": "on disk, nothing forgotten",
        "tokens/s": tokens / (last["seconds"] - first["seconds"]),
        "disk B/token": (after - before) / tokens,
        "written B/token": (last["written_bytes"] - first["written_bytes"]) / tokens,
        "load": load_average(),
        "raw": [first, last],
    }


# -- c -----------------------------------------------------------------------------------------------------


def instances() -> list[Row]:
    rows: list[Row] = []
    for count in (10, 30, 100, 300, 1000):
        load = {"agents": count, "slots": 1, "open_groups": max(4, count // 2), "slots_limit": True}
        with plane({**load, "rate": RATE / 4}) as (manager, agents):
            here, there = measured(manager, agents, SETTINGS.seconds, warm_s=5.0)
        with plane({**load, "echo": True}, echo=True) as (manager, agents):
            time.sleep(2.0)
            manager.ask("reset")
            time.sleep(min(5.0, SETTINGS.seconds))
            floor = manager.ask("stats")
        rows.append(
            {
                "instances": count,
                "samples": here["in_flight"],
                "reports/s": here["reports_s"],
                "CPU s/s": here["cpu_share"],
                "us a report": here["cpu_share"] / here["reports_s"] * 1e6,
                "CPU % an instance": here["cpu_share"] / count * 100,
                "floor reports/s": floor["reports_s"],
                "floor CPU s/s": floor["cpu_share"],
                "floor us a message": floor["cpu_share"] / max(1.0, floor["reports_s"]) * 1e6,
                "RSS MiB": here["rss_mib"],
                "load": load_average(),
                "raw": [here, there],
            }
        )
        show_last(rows)
    return rows


# -- d -----------------------------------------------------------------------------------------------------


def reactions() -> list[Row]:
    rows: list[Row] = []
    load = {"agents": 64, "slots": 256, "open_groups": 512, "slots_limit": False}
    for what in ("kill", "hang"):
        detected, elsewhere, held = [], [], []
        with plane(load, events=True) as (manager, agents):
            time.sleep(5.0)
            for number in range(SETTINGS.repeat):
                manager.ask("reset")
                name = f"agent-{number:04d}"
                struck = agents.ask(f"{what} {name}")
                deadline = time.monotonic() + 15.0
                while (moved := agents.ask("moved"))["at"] < struck["at"] and time.monotonic() < deadline:
                    time.sleep(0.05)
                left = [
                    e
                    for e in manager.ask("stats")["events"]
                    if e[1] == "InstanceLeft" and e[2]["instance"] == name
                ]
                detected.append(left[0][0] - struck["at"])
                elsewhere.append(moved["at"] - left[0][0])
                held.append(struck["held"])
        rows.append(
            {
                "what": {"kill": "an instance's socket drops", "hang": "an instance stops reporting"}[what],
                "repeats": SETTINGS.repeat,
                "samples it had": round(statistics.mean(held)),
                "detected s, median": statistics.median(detected),
                "detected s, max": max(detected),
                "elsewhere after s, median": statistics.median(elsewhere),
                "elsewhere after s, max": max(elsewhere),
                "load": load_average(),
            }
        )
        show_last(rows)
    slots, groups = for_all(64, 4096)
    with plane({"agents": 64, "slots": slots, "open_groups": groups}, events=True) as (manager, agents):
        time.sleep(5.0)
        after = []
        for number in range(SETTINGS.repeat):
            name = f"joiner-{number}"
            agents.ask(f"join {name}")
            time.sleep(1.5)
            told = agents.ask(f"agent {name}")
            after.append(told["first_work_at"] - told["loaded_at"] if told["first_work_at"] else float("inf"))
        rows.append(
            {
                "what": "a joiner at work, from its weights",
                "repeats": SETTINGS.repeat,
                "elsewhere after s, median": statistics.median(after),
                "elsewhere after s, max": max(after),
                "load": load_average(),
            }
        )
    show_last(rows)
    return rows


# -- e -----------------------------------------------------------------------------------------------------


def memory() -> list[Row]:
    rows: list[Row] = []
    slots, groups = for_all(16, 4096)
    load = {"agents": 16, "slots": slots, "open_groups": groups, "tokens": (16, 48)}
    marks = [int(SETTINGS.samples * share) for share in (0.01, 0.1, 0.3, 0.6, 1.0)]
    with plane(load) as (manager, agents):
        for mark in marks:
            before = manager.ask("stats")
            manager.ask("reset")
            while (here := manager.ask("stats"))["samples_delivered"] < mark:
                time.sleep(0.5)
            rows.append(
                {
                    "samples": here["samples_delivered"],
                    "samples/s": (here["samples_delivered"] - before["samples_delivered"]) / here["seconds"],
                    "CPU s/s": here["cpu_share"],
                    "RSS MiB": here["rss_mib"],
                    "db MiB": here["db_mib"],
                    "wal MiB": here["wal_mib"],
                    "load": load_average(),
                    "raw": [here],
                }
            )
            show_last(rows)
        there = agents.ask("stats")
        print(f"  {there['checked']} groups checked token by token, {there['wrong']} wrong", file=sys.stderr)
    return rows


# -- the run -----------------------------------------------------------------------------------------------

PARTS = {
    "a": ("tokens tracked", tokens),
    "b": ("dispatch and bytes", dispatch),
    "c": ("instances", instances),
    "d": ("reactions", reactions),
    "e": ("memory", memory),
}


def load_average() -> float:
    return round(os.getloadavg()[0], 2)


def cell(value: Any) -> str:
    if isinstance(value, float):
        return (
            f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
        )
    return f"{value:,}" if isinstance(value, int) else "–" if value is None else str(value)


def show_last(rows: list[Row]) -> None:
    """As it comes, for these benches take minutes."""
    print(
        "  " + ", ".join(f"{key} {cell(value)}" for key, value in rows[-1].items() if key != "raw"),
        file=sys.stderr,
    )


def print_table(rows: list[Row]) -> None:
    keys = list(dict.fromkeys(key for row in rows for key in row if key != "raw"))
    lines = [keys, *([cell(row.get(key)) for key in keys] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(keys))]
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


SETTINGS = argparse.Namespace()


def write(path: Path, results: dict[str, Any]) -> None:
    """After each part: the next may take minutes, or fail."""
    data = {
        "command": "python " + " ".join(["bench/rollouts.py", *sys.argv[1:]]),
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "parts": results,
    }
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", action="append", choices=sorted(PARTS), help="only this part; may be repeated"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each figure is taken")
    parser.add_argument("--runs", type=int, default=1, help="of parts a and b")
    parser.add_argument("--repeat", type=int, default=5, help="of each reaction in part d")
    parser.add_argument("--samples", type=int, default=1_000_000, help="of part e")
    parser.add_argument("--folder", help="where the SQLite files go (default: a temporary folder)")
    parser.add_argument("--router-python", help="a Python that has sglang-router, for its baseline in part a")
    parser.add_argument("--json", type=Path)
    parser.parse_args(namespace=SETTINGS)
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed: one for the manager, one for its load")
    results: dict[str, Any] = {}
    for part in SETTINGS.part or sorted(PARTS):
        title, run = PARTS[part]
        print(
            f"{part}: {title} (manager on core {MANAGER_CORE}, simulated engines and trainer on core {LOAD_CORE})"
        )
        results[part] = run()
        print_table(results[part])
        print(flush=True)
        if SETTINGS.json:
            write(SETTINGS.json, results)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(PLANE.parents[1]))
    sys.exit(main())
