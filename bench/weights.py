"""The weight plane on one machine: transfer, relaying, codecs and publishing, beside what else could carry the bytes.

    python bench/weights.py [--part a ...] [--size-mb 512] [--repeat 5] [--link-mb 100] [--json FILE]

    a   one receiver, beside a plain socket with the same streams in the same run (samples alternate), a memory copy,
        Mooncake bare (where it can be imported), Ray's object store and a Gloo broadcast
    b   1, 2, 4 and 8 receivers at once: on links of --link-mb each, up and down, that a token bucket in each process
        makes (one machine has one memory bus, and eight receivers of one are not what is asked), and without
    c   bytes and CPU seconds of the codecs on the updates of a real training run of a small decoder
    d   publishing: what the trainer waits for, and memory over 200 publishes

Every party is a process. Seconds are of the wall, CPU seconds of both sides together. Links are loopback: what a
network card does is not measured here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GB = 1e9

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class Child:
    """A party in its own process."""

    def __init__(self, role: str, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "weight_plane" / "party.py"), role, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        self.hear()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a party has died: {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, what: str, **options: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, options]) + "\n")
        self.process.stdin.flush()

    def ask(self, what: str, **options: Any) -> dict[str, Any]:
        self.tell(what, **options)
        return self.hear()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


class Report:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def row(self, part: str, case: str, **figures: Any) -> None:
        self.rows.append({"part": part, "case": case, **figures})
        told = "  ".join(
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in figures.items()
        )
        print(f"{part}  {case:<44} {told}", flush=True)


def median(samples: list[float]) -> float:
    return statistics.median(samples)


# -- a: one receiver ----------------------------------------------------------------------------------------


def part_a(report: Report, arguments: argparse.Namespace, folder: Path) -> None:
    size = arguments.size_mb << 20
    memory_copy(report, size)
    serve = Child("serve", folder=str(folder / "origin"), size_mb=arguments.size_mb)
    published = serve.ask("publish")
    size = sum(file["size_bytes"] for file in published["manifest"]["files"])
    address = f"127.0.0.1:{published['port']}"
    ends = [Child("socket", folder=str(folder), size_mb=arguments.size_mb) for _ in range(2)]
    port = ends[0].ask("port")["port"]
    for streams in (1, 2, 4):
        fetch = Child("fetch", folder=str(folder / f"one-{streams}"), streams=streams)
        for _ in range(3):  # until its pages are those of versions before
            fetch.ask("fetch", manifest=published["manifest"], address=address)
        plain, ours, ratios = [], [], []
        for _ in range(arguments.repeat):
            plain.append(plain_sample(ends, port, streams))
            before = serve.ask("spent")["cpu_s"]
            got = fetch.ask("fetch", manifest=published["manifest"], address=address)
            cpu = serve.ask("spent")["cpu_s"] - before + got["cpu_s"]
            ours.append({"gb_s": size / got["seconds"] / GB, "cpu_s_gb": cpu / size * GB})
            after = plain_sample(ends, port, streams)
            ratios.append(2 * ours[-1]["gb_s"] / (plain[-1]["gb_s"] + after["gb_s"]))
            plain.append(after)
        fetch.end()
        for case, samples, extra in (
            (f"plain sockets, {streams} streams", plain, {}),
            (
                f"gyre, {streams} streams, verified",
                ours,
                {"of_plain": median(ratios), "of_plain_least": min(ratios)},
            ),
        ):
            report.row(
                "a",
                case,
                gb_s=median([sample["gb_s"] for sample in samples]),
                cpu_s_gb=median([sample["cpu_s_gb"] for sample in samples]),
                samples=len(samples),
                **extra,
            )
    linked = Child("fetch", folder=str(folder / "linked"), streams=2)
    path = str(folder / "origin" / f"v{published['manifest']['version']:08d}")
    got = linked.ask("fetch", manifest=published["manifest"], address=address, path=path, fresh=False)
    report.row(
        "a",
        f"gyre, same machine ({got['way']}, verified)",
        gb_s=size / got["seconds"] / GB,
        cpu_s_gb=got["cpu_s"] / size * GB,
    )
    for child in (serve, linked, *ends):
        child.end()
    for other in (mooncake, gloo, ray_store):
        try:
            other(report, arguments)
        except Exception as error:
            report.row("a", f"{other.__name__}: not measured", why=f"{type(error).__name__}: {error}"[:120])


def plain_sample(ends: list[Child], port: int, streams: int) -> dict[str, float]:
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
        began = time.perf_counter()
        np.copyto(target, source)
        samples.append(size / (time.perf_counter() - began) / GB)
    report.row("a", "memory copy, one thread", gb_s=median(samples), cpu_s_gb=1 / median(samples))


MOONCAKE = """
import ctypes, json, os, resource, sys, time
sys.path.insert(0, {root!r})
from gyre.weights.mooncake import load
load()
from mooncake.engine import TransferEngine
size, pages = {size}, ctypes.c_char * {size}
memory = pages()
ctypes.memset(memory, 1, size)
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
assert engine.register_memory(ctypes.addressof(memory), size) == 0
if sys.argv[1] == "serve":
    print("127.0.0.1:%d %d" % (engine.get_rpc_port(), ctypes.addressof(memory)), flush=True)
    for line in sys.stdin:
        print(time.process_time(), flush=True)
    os._exit(0)
peer, address = sys.argv[2], int(sys.argv[3])
for _ in range({repeat} + 1):
    began, cpu = time.monotonic(), time.process_time()
    step = 64 << 20
    mine, waiting = ctypes.addressof(memory), []
    for at in range(0, size, step):
        part = ([mine + at], [address + at], [min(step, size - at)])
        waiting.append(engine.batch_transfer_async_read(peer, *part))
    while waiting:
        waiting = [one for one in waiting if engine.transfer_check_status(one) == 0]
        time.sleep(0.001)
    print(json.dumps([time.monotonic() - began, time.process_time() - cpu]), flush=True)
os._exit(0)
"""


def mooncake(report: Report, arguments: argparse.Namespace) -> None:
    """READ over TCP, submitted and polled, with its connection pool."""
    size = arguments.size_mb << 20
    program = MOONCAKE.format(root=str(ROOT), size=size, repeat=arguments.repeat)
    environment = {
        **ENVIRONMENT,
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "GLOG_minloglevel": "2",
        "MC_TCP_SLICE_SIZE": str(1 << 20),
    }
    options: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
        "text": True,
        "env": environment,
    }
    serve = subprocess.Popen([sys.executable, "-c", program, "serve"], stdin=subprocess.PIPE, **options)
    try:
        assert serve.stdout is not None
        assert serve.stdin is not None
        words = serve.stdout.readline().split()
        if len(words) != 2:
            raise RuntimeError("mooncake-transfer-engine cannot be imported here")
        serve.stdin.write("\n")
        serve.stdin.flush()
        before = float(serve.stdout.readline())
        out = subprocess.run(
            [sys.executable, "-c", program, "read", *words], timeout=300, check=True, **options
        )
        serve.stdin.write("\n")
        serve.stdin.flush()
        spent = (float(serve.stdout.readline()) - before) / (arguments.repeat + 1)
        samples = [json.loads(line) for line in out.stdout.splitlines() if line.startswith("[")][1:]
    finally:
        serve.kill()
        serve.wait(30)
    report.row(
        "a",
        "mooncake bare, READ over TCP, not verified",
        gb_s=median([size / seconds / GB for seconds, _ in samples]),
        cpu_s_gb=median([(cpu + spent) / size * GB for _, cpu in samples]),
        samples=len(samples),
    )


GLOO = """
import json, sys, time, torch, torch.distributed as dist
rank, size, store, repeat = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
data = torch.ones(size, dtype=torch.uint8)
for _ in range(repeat + 1):
    dist.barrier()
    began, cpu = time.monotonic(), time.process_time()
    dist.broadcast(data, 0)
    dist.barrier()
    print(json.dumps([time.monotonic() - began, time.process_time() - cpu]), flush=True)
"""


def gloo(report: Report, arguments: argparse.Namespace) -> None:
    size = arguments.size_mb << 20
    with tempfile.TemporaryDirectory() as store:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", GLOO, str(rank), str(size), f"{store}/store", str(arguments.repeat)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(2)
        ]
        told = [rank.communicate(timeout=300)[0].splitlines()[1:] for rank in ranks]
    samples = [(json.loads(one), json.loads(two)) for one, two in zip(*told, strict=True)]
    report.row(
        "a",
        "gloo broadcast, one receiver",
        gb_s=median([size / max(one[0], two[0]) / GB for one, two in samples]),
        cpu_s_gb=median([(one[1] + two[1]) / size * GB for one, two in samples]),
        samples=len(samples),
    )


RAY = """
import json, sys, time
import numpy as np
import ray
size, repeat = int(sys.argv[1]), int(sys.argv[2])
store = 3 * size + (256 << 20)
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=store, _temp_dir=sys.argv[3])
@ray.remote(num_cpus=1)
class Taker:
    def __init__(self): self.mine = np.ones(size, np.uint8)
    def take(self, data): np.copyto(self.mine, data); return 1
taker = Taker.remote()
data = np.ones(size, np.uint8)
for _ in range(repeat + 1):
    began = time.monotonic()
    ray.get(taker.take.remote(ray.put(data)))
    print(json.dumps(time.monotonic() - began), flush=True)
ray.shutdown()
"""


def ray_store(report: Report, arguments: argparse.Namespace) -> None:
    """Between two processes of one node: put, get, copy out. It has no network in it."""
    size = arguments.size_mb << 20
    with tempfile.TemporaryDirectory(prefix="gyre-bench-", dir="/tmp") as folder:
        out = subprocess.run(
            [sys.executable, "-c", RAY, str(size), str(arguments.repeat), folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=300,
            check=True,
            env={**ENVIRONMENT, "RAY_USAGE_STATS_ENABLED": "0"},
        )
    samples = [json.loads(line) for line in out.stdout.splitlines() if line[:1].isdigit()][1:]
    report.row(
        "a",
        "ray object store, one node (put, get, copy)",
        gb_s=median([size / seconds / GB for seconds in samples]),
        samples=len(samples),
    )


# -- b: many receivers -----------------------------------------------------------------------------------------


def part_b(report: Report, arguments: argparse.Namespace, folder: Path) -> None:
    for link in (arguments.link_mb * 1e6, 0.0):
        one = 0.0
        for count in (1, 2, 4, 8):
            place = folder / f"many-{count}-{link:.0f}"
            serve = Child("serve", folder=str(place / "origin"), size_mb=arguments.size_mb, link=link)
            published = serve.ask("publish")
            size = sum(file["size_bytes"] for file in published["manifest"]["files"])
            fetches = [Child("fetch", folder=str(place / f"{n}"), streams=2, link=link) for n in range(count)]
            address = f"127.0.0.1:{published['port']}"
            before = serve.ask("spent")
            began = time.monotonic()
            for child in fetches:
                child.tell("fetch", manifest=published["manifest"], address=address, fresh=False)
            got = [child.hear() for child in fetches]
            seconds = time.monotonic() - began
            spent = serve.ask("spent")
            one = one or seconds
            cpu = spent["cpu_s"] - before["cpu_s"] + sum(each["cpu_s"] for each in got)
            report.row(
                "b",
                f"{count} receivers, {f'links of {link / 1e6:.0f} MB/s' if link else 'loopback as it is'}",
                seconds=seconds,
                of_one=seconds / one,
                origin_copies=(spent["sent_bytes"] - before["sent_bytes"]) / size,
                cpu_s_gb_delivered=cpu / size / count * GB,
                slowest_s=max(each["seconds"] for each in got),
            )
            for child in (serve, *fetches):
                child.end()


# -- c: codecs on real updates ------------------------------------------------------------------------------------


def part_c(report: Report, arguments: argparse.Namespace) -> None:
    import numpy as np
    import torch

    from gyre.weights.codecs import decode, encode
    from gyre.workloads.torch.model import Decoder, ModelConfig

    torch.set_num_threads(1)
    config = ModelConfig(vocab=512, layers=4, hidden=384, heads=6, kv_heads=2, mlp=1024, max_positions=128)
    model = Decoder(config, seed=0)
    count = sum(parameter.numel() for parameter in model.parameters())
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step(rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        start = torch.randint(0, 512, (4, 1), generator=generator)
        tokens = (start + torch.arange(64) * torch.randint(1, 7, (4, 1), generator=generator)) % 512
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 512), tokens[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def bf16() -> bytes:
        flat = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
        return flat.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()

    for _ in range(60):  # so that the moments are those of a run under way
        step(3e-4)
    for rate in (1e-6, 1e-5):
        for _ in range(10):
            step(rate)
        versions = [bf16()]
        for _ in range(3):
            step(rate)
            versions.append(bf16())
        for codec in ("planes", "delta"):
            figures = []
            for base, new in itertools.pairwise(versions):
                began = time.process_time()
                data = encode(codec, new, word=2, base=base if codec == "delta" else None)
                encoded = time.process_time()
                into = bytearray(len(new))
                decode(codec, data, memoryview(into), word=2, base=base)
                decoded = time.process_time()
                assert bytes(into) == new
                figures.append(
                    (len(data) / len(new), (encoded - began) / len(new), (decoded - encoded) / len(new))
                )
            changed = np.mean(
                np.frombuffer(versions[-1], np.uint16) != np.frombuffer(versions[-2], np.uint16)
            )
            report.row(
                "c",
                f"{codec}, {count / 1e6:.1f} M parameters, AdamW lr {rate:g}",
                ratio=median([figure[0] for figure in figures]),
                encode_cpu_s_gb=median([figure[1] for figure in figures]) * GB,
                decode_cpu_s_gb=median([figure[2] for figure in figures]) * GB,
                changed=float(changed),
            )


# -- d: publishing -------------------------------------------------------------------------------------------------


def part_d(report: Report, arguments: argparse.Namespace, folder: Path) -> None:
    serve = Child("serve", folder=str(folder / "origin"), size_mb=arguments.size_mb, spare=True)
    samples = [serve.ask("publish") for _ in range(5)]
    size = sum(file["size_bytes"] for file in samples[0]["manifest"]["files"])
    for case, some in (("first publish, fp32 to bf16", samples[:1]), ("later publishes", samples[2:])):
        report.row(
            "d",
            case,
            size_mb=size / 1e6,
            trainer_waits_s=median([one["trainer_s"] for one in some]),
            committed_s=median([one["committed_s"] for one in some]),
            cpu_s_gb=median([one["cpu_s"] for one in some]) / size * GB,
        )
    serve.end()
    serve = Child("serve", folder=str(folder / "small"), size_mb=16)
    fetch = Child("fetch", folder=str(folder / "small-receiver"), streams=2, codecs=["none", "delta"])
    seen = []
    for number in range(200):
        published = serve.ask("publish")
        size = sum(file["size_bytes"] for file in published["manifest"]["files"])
        got = fetch.ask(
            "fetch", manifest=published["manifest"], address=f"127.0.0.1:{published['port']}", fresh=False
        )
        if number >= 10:
            seen.append(
                [published["rss_bytes"], got["rss_bytes"], published["arena_bytes"], got["arena_bytes"]]
            )
    first, last = seen[0], seen[-1]
    report.row(
        "d",
        "200 publishes and fetches",
        publisher_grew_mb=(last[0] - first[0]) / 1e6,
        receiver_grew_mb=(last[1] - first[1]) / 1e6,
        arenas_of_version=[round(max(one[at] for one in seen) / size, 2) for at in (2, 3)],
    )
    serve.end()
    fetch.end()


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "system": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    report = Report()
    report.row("-", "machine", **machine())
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for part in ARGUMENTS.part:
        with tempfile.TemporaryDirectory(prefix="gyre-bench-weights-", dir=parent) as folder:
            if part == "c":
                part_c(report, ARGUMENTS)
            else:
                {"a": part_a, "b": part_b, "d": part_d}[part](report, ARGUMENTS, Path(folder))
    if ARGUMENTS.json:
        Path(ARGUMENTS.json).write_text(json.dumps({"machine": machine(), "rows": report.rows}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices="abcd", default=list("abcd"))
    parser.add_argument("--size-mb", type=int, default=512)
    parser.add_argument("--link-mb", type=float, default=100.0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    ARGUMENTS = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    main()
