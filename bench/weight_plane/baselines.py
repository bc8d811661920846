"""What else could carry the bytes, each in processes of its own: Mooncake bare, a Gloo broadcast, Ray's object store.

Each function returns `{"gb_s": ..., "cpu_s_gb": ..., "samples": ...}`, CPU seconds by gigabyte delivered, of all sides,
and raises where it cannot be measured here. None of them verifies what came.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from weight_plane.children import ENVIRONMENT, ROOT, Clock

GB = 1e9
LIMIT_S = 75.0
"""For one of them, its start included."""


def of(samples: list[tuple[float, float]], size: int, copies: int = 1) -> dict[str, Any]:
    """From (seconds, CPU seconds) of each."""
    return {
        "gb_s": statistics.median(size * copies / seconds / GB for seconds, _ in samples),
        "cpu_s_gb": statistics.median(cpu / size / copies * GB for _, cpu in samples),
        "samples": len(samples),
    }


MOONCAKE = """
import ctypes, json, os, sys, time
sys.path.insert(0, {root!r})
from gyre.weights.transfer.mooncake import load
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


def mooncake(clock: Clock, size: int, repeat: int, python: str) -> dict[str, Any]:
    """READ over TCP, submitted and polled, with its connection pool. `python` is one that has Mooncake."""
    program = MOONCAKE.format(root=str(ROOT), size=size, repeat=repeat)
    environment = {
        **ENVIRONMENT,
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "GLOG_minloglevel": "2",
        "MC_TCP_SLICE_SIZE": str(1 << 20),
    }
    limit_s = clock.least(LIMIT_S)
    probe = subprocess.run(
        [
            python,
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); from gyre.weights.transfer.mooncake import load; load()",
        ],
        capture_output=True,
        text=True,
        env=environment,
        timeout=limit_s,
    )
    if probe.returncode:
        raise RuntimeError(probe.stderr.strip().splitlines()[-1])
    serve = subprocess.Popen(
        [python, "-c", program, "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    try:
        assert serve.stdout is not None
        assert serve.stdin is not None
        words = serve.stdout.readline().split()  # it ends with the process, and that is killed below
        if len(words) != 2:
            raise RuntimeError("the engine that serves did not start")
        before = _spent(serve)
        out = subprocess.run(
            [python, "-c", program, "read", *words],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=True,
            env=environment,
        )
        spent = (_spent(serve) - before) / (repeat + 1)
    finally:
        serve.kill()
        serve.wait(30)
    samples = [json.loads(line) for line in out.stdout.splitlines() if line.startswith("[")][1:]
    return of([(seconds, cpu + spent) for seconds, cpu in samples], size)


def _spent(serve: subprocess.Popen[str]) -> float:
    assert serve.stdout is not None
    assert serve.stdin is not None
    serve.stdin.write("\n")
    serve.stdin.flush()
    return float(serve.stdout.readline())


GLOO = """
import json, sys, time, torch, torch.distributed as dist
rank, world, size, store, repeat = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world)
data = torch.ones(size, dtype=torch.uint8)
for _ in range(repeat + 1):
    dist.barrier()
    began, cpu = time.monotonic(), time.process_time()
    dist.broadcast(data, 0)
    dist.barrier()
    print(json.dumps([time.monotonic() - began, time.process_time() - cpu]), flush=True)
"""


def gloo(clock: Clock, size: int, repeat: int, receivers: int = 1) -> dict[str, Any]:
    """A broadcast to so many ranks."""
    limit_s = clock.least(LIMIT_S)
    world = receivers + 1
    with tempfile.TemporaryDirectory() as store:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", GLOO, *map(str, (rank, world, size, f"{store}/store", repeat))],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(world)
        ]
        try:
            told = [rank.communicate(timeout=limit_s)[0].splitlines()[1:] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait(30)
    rounds = [[json.loads(line) for line in each] for each in zip(*told, strict=True)]
    if len(rounds) != repeat:
        raise RuntimeError("a rank has died")
    return of(
        [(max(one[0] for one in each), sum(one[1] for one in each)) for each in rounds], size, receivers
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
    def take(self, data):
        np.copyto(self.mine, data)
        return time.process_time()
taker = Taker.remote()
data = np.ones(size, np.uint8)
theirs = 0.0
for _ in range(repeat + 1):
    began, cpu = time.monotonic(), time.process_time()
    spent = ray.get(taker.take.remote(ray.put(data)))
    print(json.dumps([time.monotonic() - began, time.process_time() - cpu + spent - theirs]), flush=True)
    theirs = spent
ray.shutdown()
"""


def ray_store(clock: Clock, size: int, repeat: int) -> dict[str, Any]:
    """Between two processes of one node: put, get, copy out. It has no network in it. Its daemons' CPU seconds are not
    counted."""
    with tempfile.TemporaryDirectory(prefix="gyre-bench-", dir="/tmp") as folder:
        out = subprocess.run(
            [sys.executable, "-c", RAY, str(size), str(repeat), folder],
            capture_output=True,
            text=True,
            timeout=clock.least(LIMIT_S),
            check=True,
            env={**ENVIRONMENT, "RAY_USAGE_STATS_ENABLED": "0"},
        )
    return of([json.loads(line) for line in out.stdout.splitlines() if line.startswith("[")][1:], size)
