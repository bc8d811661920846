"""The weight plane on one machine: transfer, relaying, codecs and publishing, beside what else could carry the bytes.

    python bench/weights.py [--part a ...] [--json FILE] [--mooncake-python PYTHON] [--limit-s 350]

    a   one receiver, beside a plain socket with the same streams (samples alternate), a memory copy, Mooncake bare,
        Ray's object store and a Gloo broadcast
    b   1, 2, 4 and 8 receivers at once: on links of --link-mb each, up and down, that a token bucket in each process
        makes (one machine has one memory bus, and eight receivers of one are not what is asked); and without, beside
        the floor of this machine: one send, one receive and one checksum for each receiver, on all its cores
    c   full, delta and byte planes from end to end, on the updates of a real training run of a small decoder
    d   publishing: what the trainer waits for, and memory over 200 publishes
    e   what is asked for by name and costs more: TLS, and rounding to fp8, each beside the same without it

Every peer is a process. Seconds are of the wall, CPU seconds of all sides together, by gigabyte that was delivered.
Links are loopback: what a network card does is not measured here. On a machine that is busy with others, compare CPU
seconds. Figures are written to --json after each part; what could not be measured is said, there too.

Mooncake needs a Python that has it, by default this one:

    python -m venv /tmp/mooncake && /tmp/mooncake/bin/pip install mooncake-transfer-engine-non-cuda numpy xxhash
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from weight_plane import baselines  # noqa: E402  # the folder beside this file
from weight_plane.children import Child, Clock, children  # noqa: E402

GB = 1e9
RECEIVERS = (1, 2, 4, 8)
SMALL_MB = 256
"""Of part e, whose figures are by gigabyte."""


def median(samples: list[float]) -> float:
    return statistics.median(samples)


class Report:
    """Rows as they come, what is missing, and what was wanted. Written after each part."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._began = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.missing: list[dict[str, str]] = []
        self.targets: list[dict[str, Any]] = []
        self.machine = machine()
        print(f"machine  {self.machine}", flush=True)

    def row(self, part: str, case: str, **figures: Any) -> dict[str, Any]:
        self.rows.append({"part": part, "case": case, **figures})
        told = "  ".join(
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in figures.items()
        )
        print(f"{part}  {case:<44} {told}", flush=True)
        return figures

    def target(self, part: str, what: str, found: float, most: float, *, least: bool = False) -> None:
        reached = found >= most if least else found <= most
        self.targets.append({"part": part, "what": what, "found": found, "wanted": most, "reached": reached})

    def without(self, part: str, what: str, error: BaseException) -> None:
        why = reason(error)
        self.missing.append({"part": part, "what": what, "why": why})
        print(f"{part}  NOT MEASURED: {what}: {why}", flush=True)

    def write(self) -> None:
        if self._path is None:
            return
        whole = {
            "command": " ".join(["python", *sys.argv]),
            "machine": {**self.machine, "load_after": os.getloadavg()[0]},
            "seconds": time.monotonic() - self._began,
            "targets": self.targets,
            "missing": self.missing,
            "rows": self.rows,
        }
        Path(self._path).write_text(json.dumps(whole, indent=1) + "\n")

    def close(self) -> None:
        print(f"\n{time.monotonic() - self._began:.0f} s, load now {os.getloadavg()[0]:.1f}")
        for target in self.targets:
            word = "reached" if target["reached"] else "NOT REACHED"
            print(
                f"{target['part']}  {target['what']:<60} {target['found']:.3f} (wanted {target['wanted']})  {word}"
            )
        for gap in self.missing:
            print(f"{gap['part']}  NOT MEASURED: {gap['what']}: {gap['why']}")


def reason(error: BaseException) -> str:
    """In a line."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took longer than {error.timeout:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        said = (error.stderr or "").strip().splitlines()
        return f"it ended with {error.returncode}" + (f": {said[-1][:200]}" if said else "")
    return f"{type(error).__name__}: {error}"[:300]


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "system": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


# -- a: one receiver ----------------------------------------------------------------------------------------


def part_a(report: Report, clock: Clock, folder: Path) -> None:
    memory_copy(report, ARGUMENTS.size_mb << 20)
    with children(clock) as made:
        serve = made.one("serve", folder=str(folder / "origin"), size_mb=ARGUMENTS.size_mb)
        published = serve.ask("publish")
        told = {"manifest": published["manifest"], "address": published["address"]}
        size = published["size_bytes"]
        ends = made.start("socket", 2, folder=str(folder), size_mb=ARGUMENTS.size_mb)
        for streams in (1, 2, 4):
            fetch = made.one("fetch", folder=str(folder / f"one-{streams}"), streams=streams)
            for _ in range(3):  # until its pages are those of versions before
                fetch.ask("fetch", **told, again=True)
            plain, ours, ratios = [plain_sample(ends, streams)], [], []
            for _ in range(ARGUMENTS.repeat):
                ours.append(spent_on(serve, lambda fetch=fetch: fetch.ask("fetch", **told, again=True), size))
                plain.append(plain_sample(ends, streams))
                around = (plain[-2]["gb_s"] + plain[-1]["gb_s"]) / 2
                ratios.append(ours[-1]["gb_s"] / around)
            fetch.end()
            shutil.rmtree(folder / f"one-{streams}")
            of_plain = report_one(report, streams, plain, ours, ratios)
            if streams == 2:
                report.target("a", "one receiver, of plain sockets, 2 streams", of_plain, 0.90, least=True)
        linked = made.one("fetch", folder=str(folder / "linked"), streams=2)
        got = linked.ask("fetch", **told, path=published["path"])
        report.row(
            "a",
            f"gyre, same machine ({got['way']}, verified)",
            gb_s=size / got["seconds"] / GB,
            cpu_s_gb=got["cpu_s"] / size * GB,
        )
    size, repeat = ARGUMENTS.size_mb << 20, ARGUMENTS.repeat
    others: dict[str, Callable[[], dict[str, Any]]] = {
        "mooncake bare, READ over TCP, not verified": lambda: baselines.mooncake(
            clock, size, repeat, ARGUMENTS.mooncake_python
        ),
        "gloo broadcast, 1 receiver": lambda: baselines.gloo(clock, size, repeat),
        "ray object store, one node (put, get, copy)": lambda: baselines.ray_store(clock, size, repeat),
    }
    for name, measure in others.items():
        try:
            report.row("a", name, **measure())
        except Exception as error:
            report.without("a", name, error)


def report_one(
    report: Report,
    streams: int,
    plain: list[dict[str, float]],
    ours: list[dict[str, float]],
    ratios: list[float],
) -> float:
    found = {
        name: {key: median([sample[key] for sample in samples]) for key in ("gb_s", "cpu_s_gb")}
        for name, samples in (("plain", plain), ("ours", ours))
    }
    report.row("a", f"plain sockets, {streams} streams", **found["plain"], samples=len(plain))
    report.row(
        "a",
        f"gyre, {streams} streams, verified",
        **found["ours"],
        samples=len(ours),
        of_plain=median(ratios),
        of_plain_least=min(ratios),
        of_plain_by_cpu=found["plain"]["cpu_s_gb"] / found["ours"]["cpu_s_gb"],
    )
    report.target("a", f"one receiver, CPU seconds a GB, {streams} streams", found["ours"]["cpu_s_gb"], 0.6)
    return median(ratios)


def spent_on(serve: Child, fetch: Callable[[], dict[str, Any]], size: int) -> dict[str, float]:
    before = serve.ask("spent")["cpu_s"]
    got = fetch()
    cpu = serve.ask("spent")["cpu_s"] - before + got["cpu_s"]
    return {"gb_s": size / got["seconds"] / GB, "cpu_s_gb": cpu / size * GB}


def plain_sample(ends: list[Child], streams: int) -> dict[str, float]:
    port = ends[0].ask("port")["port"]
    ends[0].tell("send", streams=streams)
    got = ends[1].ask("receive", streams=streams, port=port)
    cpu = ends[0].hear()["cpu_s"] + got["cpu_s"]
    size = ARGUMENTS.size_mb << 20
    return {"gb_s": size / got["seconds"] / GB, "cpu_s_gb": cpu / size * GB}


def memory_copy(report: Report, size: int) -> None:
    import numpy as np

    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    samples = []
    for _ in range(5):
        began, cpu = time.perf_counter(), time.process_time()
        np.copyto(target, source)
        samples.append((time.perf_counter() - began, time.process_time() - cpu))
    report.row("a", "memory copy, one thread", **baselines.of(samples, size))


# -- b: many receivers -----------------------------------------------------------------------------------------


def part_b(report: Report, clock: Clock, folder: Path) -> None:
    with children(clock) as made:
        serve = made.one("serve", folder=str(folder / "origin"), size_mb=ARGUMENTS.many_mb)
        fetches = made.start("fetch", max(RECEIVERS), folder=str(folder / "{n}"), streams=2)
        for _ in range(3):  # until their pages are those of versions before
            several(serve, fetches)
        link = ARGUMENTS.link_mb * 1e6
        for child in (serve, *fetches):
            child.ask("link", bytes_s=link)
        one = 0.0
        for count in RECEIVERS:
            samples = [several(serve, fetches[:count]) for _ in range(2)]
            seconds = median([sample["seconds"] for sample in samples])
            one = one or seconds
            found = report.row(
                "b",
                f"{count} receivers, links of {link / 1e6:.0f} MB/s",
                seconds=seconds,
                of_one=seconds / one,
                origin_copies=max(sample["origin_copies"] for sample in samples),
                cpu_s_gb=median([sample["cpu_s_gb"] for sample in samples]),
                samples=len(samples),
            )
        report.target("b", f"{count} receivers, of the time of one, on links", found["of_one"], 1.5)
        report.target("b", f"{count} receivers, copies that the trainer sends", found["origin_copies"], 2.0)
        for child in (serve, *fetches):
            child.ask("link", bytes_s=0.0)
        floor = floor_of(report, made, folder)
        for count in RECEIVERS:
            samples = [several(serve, fetches[:count]) for _ in range(3)]
            seconds = median([sample["seconds"] for sample in samples])
            cpu = median([sample["cpu_s_gb"] for sample in samples])
            least_s = floor * samples[0]["size_bytes"] * count / GB / min(report.machine["cores"], 2 * count)
            report.row(
                "b",
                f"{count} receivers, loopback as it is",
                seconds=seconds,
                floor_s=least_s,
                of_floor=seconds / least_s,
                cpu_s_gb=cpu,
                of_floor_by_cpu=cpu / floor,
                origin_copies=max(sample["origin_copies"] for sample in samples),
                samples=len(samples),
            )
    for count in (max(RECEIVERS),):
        name = f"gloo broadcast, {count} receivers"
        try:
            report.row("b", name, **baselines.gloo(clock, ARGUMENTS.many_mb << 20, 3, count))
        except Exception as error:
            report.without("b", name, error)


def several(serve: Child, fetches: list[Child]) -> dict[str, Any]:
    """One new version to all of these at once."""
    published = serve.ask("publish")
    size = published["size_bytes"]
    before = serve.ask("spent")
    began = time.monotonic()
    for child in fetches:
        child.tell("fetch", manifest=published["manifest"], address=published["address"])
    got = [child.hear() for child in fetches]
    seconds = time.monotonic() - began
    spent = serve.ask("spent")
    cpu = spent["cpu_s"] - before["cpu_s"] + sum(each["cpu_s"] for each in got)
    return {
        "size_bytes": size,
        "seconds": seconds,
        "origin_copies": (spent["sent_bytes"] - before["sent_bytes"]) / size,
        "cpu_s_gb": cpu / size / len(fetches) * GB,
    }


def floor_of(report: Report, made: Any, folder: Path) -> float:
    """CPU seconds by gigabyte of one send, one receive and one checksum."""
    ends = made.start("socket", 2, folder=str(folder), size_mb=ARGUMENTS.size_mb)
    plain = [plain_sample(ends, 2)["cpu_s_gb"] for _ in range(3)]
    check = [ends[1].ask("check")["cpu_s"] / (ARGUMENTS.size_mb << 20) * GB for _ in range(3)]
    for end in ends:
        end.end()
    floor = median(plain) + median(check)
    report.row(
        "b",
        "floor: one send, one receive, one checksum",
        cpu_s_gb=floor,
        sockets_cpu_s_gb=median(plain),
        checksum_cpu_s_gb=median(check),
    )
    return floor


# -- c: codecs on real updates ------------------------------------------------------------------------------------

WARM_STEPS = 40
"""So that the optimizer's moments are those of a run under way."""

CODECS = {"full": "none", "delta": "delta", "byte planes": "planes"}


def part_c(report: Report, clock: Clock, folder: Path) -> None:
    with children(clock) as made:
        train = made.one("train", folder=str(folder / "origin"))
        fetches = {
            name: made.one(
                "fetch",
                folder=str(folder / name),
                streams=2,
                relay=False,
                codecs=["none", "delta", "planes"],
                codec=codec,
            )
            for name, codec in {**CODECS, "chosen": None}.items()
        }
        train.ask("train", steps=WARM_STEPS, rate=3e-4)
        link = ARGUMENTS.link_mb * 1e6
        train.ask("link", bytes_s=link)
        for child in fetches.values():
            child.ask("link", bytes_s=link)
        for rate in (1e-6, 1e-5):
            train.ask("train", steps=6, rate=rate)
            samples: dict[str, list[dict[str, Any]]] = {name: [] for name in fetches}
            changed = []
            for step in range(4):
                if step:
                    changed.append(train.ask("train", steps=1, rate=rate)["changed"])
                published = train.ask("publish")
                for name, child in fetches.items():
                    before = train.ask("spent")["cpu_s"]
                    got = child.ask("fetch", manifest=published["manifest"], address=published["address"])
                    got["cpu_s"] += train.ask("spent")["cpu_s"] - before
                    if step:  # what was there before is the base
                        samples[name].append(got)
            size = published["size_bytes"]
            for name, some in samples.items():
                report.row(
                    "c",
                    f"{name}, AdamW at {rate:g}, link {link / 1e6:.0f} MB/s",
                    size_mb=size / 1e6,
                    ratio=median([one["wire_bytes"] / size for one in some]),
                    seconds=median([one["seconds"] for one in some]),
                    cpu_s_gb=median([one["cpu_s"] / size * GB for one in some]),
                    changed=median(changed),
                    codecs=some[-1]["codecs"],
                    **({"why": some[-1]["reason"]} if name == "chosen" else {}),
                )


# -- d: publishing -------------------------------------------------------------------------------------------------

PUBLISHES = 200
SETTLED = 10
"""Publishes until what is cached is cached."""


def part_d(report: Report, clock: Clock, folder: Path) -> None:
    with children(clock) as made:
        serve = made.one("serve", folder=str(folder / "origin"), size_mb=ARGUMENTS.size_mb, spare=True)
        samples = [serve.ask("publish") for _ in range(5)]
        size = samples[0]["size_bytes"]
        for case, some in (("first publish, fp32 to bf16", samples[:1]), ("later publishes", samples[2:])):
            report.row(
                "d",
                case,
                size_mb=size / 1e6,
                trainer_waits_s=median([one["trainer_s"] for one in some]),
                committed_s=median([one["committed_s"] for one in some]),
                cpu_s_gb=median([one["cpu_s"] for one in some]) / size * GB,
            )
    with children(clock) as made:
        serve = made.one("serve", folder=str(folder / "small"), size_mb=16)
        fetch = made.one("fetch", folder=str(folder / "taker"), streams=2, codecs=["none", "delta"])
        seen = []
        for _ in range(PUBLISHES):
            published = serve.ask("publish")
            got = fetch.ask("fetch", manifest=published["manifest"], address=published["address"])
            seen.append((published, got))
    size = published["size_bytes"]
    ends = (seen[SETTLED], seen[-1])
    figures: dict[str, Any] = {}
    for at, who in enumerate(("publisher", "receiver")):
        first, last = (pair[at] for pair in ends)
        figures[f"{who}_grew_mb"] = (last["rss_bytes"] - first["rss_bytes"]) / 1e6
        figures[f"{who}_grew_files"] = last["files"] - first["files"]
        figures[f"{who}_grew_threads"] = last["threads"] - first["threads"]
        figures[f"{who}_arena_of_version"] = max(pair[at]["arena_bytes"] for pair in seen) / size
    report.row("d", f"{PUBLISHES} publishes and fetches of {size / 1e6:.0f} MB", **figures)
    grew = max(figures["publisher_grew_mb"], figures["receiver_grew_mb"])
    report.target("d", f"MB that a side grew by over {PUBLISHES - SETTLED} publishes", grew, size / 1e6)


# -- e: what costs more --------------------------------------------------------------------------------------------


def part_e(report: Report, clock: Clock, folder: Path) -> None:
    encrypted(report, clock, folder)
    rounded(report, clock, folder)


def encrypted(report: Report, clock: Clock, folder: Path) -> None:
    """One receiver with 2 streams, without and with TLS, in turn. The first fetch of each agrees on keys."""
    cases = {"in clear": False, "TLS": True}
    with children(clock) as made:
        pairs = {}
        for at, (case, encrypt) in enumerate(cases.items()):
            serve = made.one("serve", folder=str(folder / f"origin-{at}"), size_mb=SMALL_MB, encrypt=encrypt)
            fetch = made.one("fetch", folder=str(folder / f"taker-{at}"), streams=2, encrypt=encrypt)
            published = serve.ask("publish")
            told = {"manifest": published["manifest"], "address": published["address"], "again": True}
            pairs[case] = (serve, fetch, told, published["size_bytes"])
            for _ in range(3):  # until its pages are those of versions before
                fetch.ask("fetch", **told)
        samples: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
        for _ in range(ARGUMENTS.repeat):
            for case, (serve, fetch, told, size) in pairs.items():
                samples[case].append(
                    spent_on(serve, lambda fetch=fetch, told=told: fetch.ask("fetch", **told), size)
                )
    beside_the_same(report, {f"one receiver, 2 streams, {case}": some for case, some in samples.items()})


def rounded(report: Report, clock: Clock, folder: Path) -> None:
    """A publish in bfloat16, as it is and rounded: what the trainer waits for, in turn."""
    with children(clock) as made:
        serves = {
            case: made.one("serve", folder=str(folder / case), size_mb=SMALL_MB, rounding=case)
            for case in ("none", "fp8")
        }
        samples: dict[str, list[dict[str, float]]] = {case: [] for case in serves}
        for at in range(3 + ARGUMENTS.repeat):
            for case, serve in serves.items():
                told = serve.ask("publish")
                if at >= 3:  # until its pages are those of versions before
                    size = told["size_bytes"]
                    samples[case].append(
                        {"gb_s": size / told["trainer_s"] / GB, "cpu_s_gb": told["cpu_s"] / size * GB}
                    )
    beside_the_same(report, {f"publish, rounding {case}": some for case, some in samples.items()})


def beside_the_same(report: Report, cases: dict[str, list[dict[str, float]]]) -> None:
    """`cases`: the plain one first; of the others also how many CPU seconds a GB they take more."""
    plain = None
    for case, some in cases.items():
        cpu = median([one["cpu_s_gb"] for one in some])
        more = {} if plain is None else {"more_cpu_s_gb": cpu - plain, "of_plain_by_cpu": cpu / plain}
        plain = cpu if plain is None else plain
        report.row(
            "e",
            case,
            gb_s=median([one["gb_s"] for one in some]),
            cpu_s_gb=cpu,
            cpu_s_gb_most=max(one["cpu_s_gb"] for one in some),
            samples=len(some),
            **more,
        )


PARTS = {"a": part_a, "b": part_b, "c": part_c, "d": part_d, "e": part_e}


def main() -> None:
    report, clock = Report(ARGUMENTS.json), Clock(ARGUMENTS.limit_s)
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for part in ARGUMENTS.part:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gyre-bench-weights-", dir=parent) as folder:
            try:
                PARTS[part](report, clock, Path(folder))
            except Exception as error:  # the other parts are worth having
                report.without(part, "the rest of this part", error)
        print(f"{part}  took {time.monotonic() - began:.0f} s", flush=True)
        report.write()
    report.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--size-mb", type=int, default=1024, help="of parts a and d")
    parser.add_argument("--many-mb", type=int, default=256, help="of part b, of which eighteen are held")
    parser.add_argument("--link-mb", type=float, default=50.0)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--limit-s", type=float, default=350.0, help="of the whole run")
    parser.add_argument("--mooncake-python", default=sys.executable)
    parser.add_argument("--json", metavar="FILE")
    ARGUMENTS = parser.parse_args()
    main()
