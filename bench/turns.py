"""What turns of agents cost: the rollout manager's own time for each, and tokens/s beside the bare engine.

    python bench/turns.py [--open 1000] [--seconds 20] [--engines 4] [--runs 1] [--profile FILE] [--dry-run]
        [--json FILE]
    python bench/turns.py --gpu MODEL_FOLDER [--engine sglang] [--sessions 256] [--rounds 3] [--json FILE]
        [-- ENGINE ARGUMENTS]

Without `--gpu`: the rollout manager is the real one, with its ledger in SQLite on disk, pinned to one core. `--open`
sessions of 8 turns run always; a tool takes 0.5 s in the median, lognormal, and a prompt grows by some 200 tokens a
turn. The engines are SIMULATED (`bench/rollout_plane/load.py`), 61.1 tokens/s a sample, on the other core with the
clients.

    in      from the client's request until the engine has the turn
    out     from the engine's report of its last token until the client has the answer: a commit is in it
    added   both together

    bare    a bare aiohttp server which reads the same requests, waits as long as the engine draws, and answers as many
            tokens: the clients' and HTTP's own share
    beyond  the manager's less the bare server's
    CPU     of the core, for each turn

With `--gpu`: SGLang by Gyre's own command over the model in the folder, or one of random weights (`--gpu 0.6B`). In
each round `--sessions` of 8 turns begin at once, with tools as above, token ids in and out by `/inference/v1/generate`;
rounds of the two ways follow each other, with nothing cached before:

    gyre    through the rollout manager and an agent, each a process of its own
    bare    the very same turns, straight to the engine's own port

    tokens/s    drawn tokens over the time from the first request to the last answer
    reused      of the prompts' tokens that the turn before had, its answer included, those that the engine had cached
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

from rollout_plane.child import child, published  # noqa: E402
from session_plane.session_case import Case  # noqa: E402

SESSIONS = HERE / "session_plane"

MANAGER_CORE, LOAD_CORE = 0, 1
RATE = 61.1
"""Tokens per second of one sample, as in bench/rollouts.py."""

PY_SPY = str(Path(sys.executable).parent / "py-spy")

Row = dict[str, Any]


def measured(what: str, given: argparse.Namespace, case: Case) -> Row:
    with tempfile.TemporaryDirectory(prefix="gyre-bench-", dir=given.folder) as folder:
        tokens = (case.drawn_tokens * 3 // 4, case.drawn_tokens * 5 // 4)
        common = {"turns": case.turns, "tokens": tokens, "rate": RATE}
        under = (
            [PY_SPY, "record", "-f", "raw", "-o", given.profile, "--nonblocking", "--"]
            if given.profile
            else []
        )
        serving = {**common, "what": what, "core": MANAGER_CORE, "folder": folder}
        with child(SESSIONS / "served.py", serving, under=under if what == "manager" else ()) as server:
            load = {
                **common,
                "core": LOAD_CORE,
                "port": server.hear()["port"],
                "case": {"drawn_tokens": case.drawn_tokens, "turns": case.turns},
                "agents": given.engines if what == "manager" else 0,
                "slots": given.open if what == "manager" else 0,
                "interval_s": 0.25,
                "open": given.open,
                "n": 8,
                "in_flight": 0,
                "slots_limit": False,
                "weights": published(Path(folder) / "weights"),
                "warm_s": given.warm,
                "seconds": given.seconds,
                "drawn_s": tokens[1] / RATE,
            }
            with child(SESSIONS / "clients.py", load) as clients:
                clients.hear()
                before = server.ask()
                clients.hear()
                after = server.ask()
                row = clients.hear()
            if what == "manager":
                row["write_ms"] = (
                    1e3 * (after["write_s"] - before["write_s"]) / max(1, after["writes"] - before["writes"])
                )
                row["writes_s"] = (after["writes"] - before["writes"]) / given.seconds
            server.process.stdin.close()  # type: ignore[union-attr]
            row |= server.hear()
        turns = max(row["n"], 1)
        row["cpu_ms"] = 1e3 * (after["cpu_s"] - before["cpu_s"]) / turns
        row["cpu_share"] = (after["cpu_s"] - before["cpu_s"]) / given.seconds
        row["rss_mib"] = after["rss_mib"]
        row["load_average"] = os.getloadavg()[0]
        if row.get("missing_tokens") or row["wrong"]:
            raise SystemExit(f"tokens are missing or wrong: {row}")
        return row


def overhead(given: argparse.Namespace) -> Row:
    case = Case(drawn_tokens=given.drawn)
    found: Row = {}
    for what in ("manager", "bare"):
        found[what] = [measured(what, given, case) for _ in range(given.runs)]
    found["beyond"] = {
        f"{way}_{q}_ms": middle(found["manager"], f"{way}_{q}_ms") - middle(found["bare"], f"{way}_{q}_ms")
        for way in ("in", "out", "added")
        for q in ("p50", "p99")
    }
    found["beyond"]["cpu_ms"] = middle(found["manager"], "cpu_ms") - middle(found["bare"], "cpu_ms")
    return found


def middle(rows: list[Row], key: str) -> float:
    return float(statistics.median(row[key] for row in rows))


def overhead_table(found: Row) -> str:
    lines = [
        "| what | turns/s | in p50 ms | p99 | out p50 | p99 | added p50 | p99 | CPU ms/turn | core |",
        "| --- |" + " --- |" * 9,
    ]
    for what in ("manager", "bare"):
        rows = found[what]
        cells = [f"{middle(rows, 'turns_s'):.0f}"]
        cells += [
            f"{middle(rows, f'{way}_{q}_ms'):.2f}" for way in ("in", "out", "added") for q in ("p50", "p99")
        ]
        cells += [f"{middle(rows, 'cpu_ms'):.2f}", f"{middle(rows, 'cpu_share'):.0%}"]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    beyond = found["beyond"]
    cells = [
        "",
        *(f"{beyond[f'{way}_{q}_ms']:.2f}" for way in ("in", "out", "added") for q in ("p50", "p99")),
    ]
    lines.append(f"| beyond | {' | '.join(cells)} | {beyond['cpu_ms']:.2f} | |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--open", type=int, default=1000, help="sessions that run at once")
    parser.add_argument("--engines", type=int, default=4, help="simulated ones")
    parser.add_argument("--drawn", type=int, default=128, help="tokens of a turn, in the mean")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm", type=float, default=8.0, help="seconds before")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--folder", help="where the SQLite file goes (default: a temporary folder)")
    parser.add_argument("--profile", help="py-spy's output, of the manager")
    parser.add_argument("--dry-run", action="store_true", help="few sessions, to see that it runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--gpu",
        metavar="MODEL_FOLDER",
        help="measure beside the bare engine; or a shape as 0.6B, of random weights",
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each way, with --gpu")
    parser.add_argument("--within", type=float, default=300.0, help="seconds after which no round begins")
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--sessions", type=int, default=256, help="with --gpu; in groups of 8")
    parser.add_argument("--python", default="", help="SGLang's; this one if not given")
    parser.add_argument("engine_args", nargs="*", help="further arguments of SGLang's command line")
    given = parser.parse_args()
    if given.dry_run:
        given.open, given.seconds, given.warm, given.engines, given.sessions = 16, 2.0, 2.0, 2, 8
    given.sessions = -(-given.sessions // 8) * 8
    results: Row = {
        "command": " ".join(["python", "bench/turns.py", *sys.argv[1:]]),
        "machine": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        },
    }
    if given.gpu:
        from session_plane.gpu import compared, table

        results["gpu"] = compared(given)
        print(table(results["gpu"]), flush=True)
    else:
        results["overhead"] = overhead(given)
        print(overhead_table(results["overhead"]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
