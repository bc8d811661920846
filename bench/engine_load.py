"""How long SGLang stands while new weights come into it, and where the time goes.

    python bench/engine_load.py --gpu --out results.json    # SGLang 0.5.17 or newer in this Python; about 3 minutes
    python bench/engine_load.py                             # on a CPU, tiny, with .venv-sglang: shows that it works

One engine serves a model of random weights (Qwen3-0.6B's shape, or `--layers` and `--hidden` of your own) with
`--running` requests under way. Two versions of it are loaded in turn, `--repeat` times each way:

    disk       update_weights_from_disk in the pause: SGLang's own way, and the baseline
    host       Gyre's loader: verified before the pause, copied in it from shared memory as it is
    pinned     the same from page-locked shared memory; the slots' pages are locked once and stay so
    device     the same, brought into the device's memory before the pause, which copies within it

`pause` is from asking for the pause to having been told that it ended. Its parts (pause, begin, copy, end, outcome,
label, resume, disk) are HTTP requests; `load` is the engine's own clock. map, verify, pin and copy come before the
pause, while it generates. `rate` is the tokens/s of the whole case over those of some seconds without loads just
before. `same` says that the engine's own checksum of its memory after a case equals that after the first one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from contextlib import aclosing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from gpu_plane.engine_command import SGLANG_EXTRA
from gpu_plane.model import model_main
from gpu_plane.scale import DRY, GPU
from gyre.testing.sglang_cpu import sglang_on_cpu

from gyre.engines.dialect import FinishKind, GenerateRequest, SamplingParams
from gyre.engines.http_client import EngineClient
from gyre.engines.process import EngineCommand, EngineProcess
from gyre.engines.sglang import sglang_command
from gyre.engines.weight_loading import EngineLoader, LoadReport

CASES = ("disk", "host", "pinned", "device")
Row = dict[str, Any]


class Traffic:
    """So many requests under way at any time; each must end by its length, in the versions that it says."""

    def __init__(self, client: EngineClient, running: int, tokens: int, vocabulary: int) -> None:
        self.client, self.tokens_each, self.vocabulary = client, tokens, vocabulary
        self.tokens = self.ended = self.spanned = 0
        self.cache_key = ""
        self._tasks = [asyncio.create_task(self._work(seed)) for seed in range(running)]

    async def _work(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        while True:
            ids = draw.integers(0, self.vocabulary - 2, 128).astype(np.int32)
            sampling = SamplingParams(self.tokens_each, ignore_eos=True)
            asked = GenerateRequest(uuid.uuid4().hex, ids, sampling, self.cache_key)
            count = 0
            async with aclosing(self.client.generate(asked)) as chunks:
                async for chunk in chunks:
                    self.tokens += len(chunk.token_ids)
                    count += len(chunk.token_ids)
                    if chunk.finish is not None:
                        assert chunk.finish.kind is FinishKind.LENGTH, chunk.finish
                        self.spanned += len(chunk.spans) > 1
            assert count == self.tokens_each, count
            self.ended += 1

    async def rate(self, seconds: float) -> float:
        before, began = self.tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        self.check()
        return (self.tokens - before) / (time.perf_counter() - began)

    def check(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def case(
    name: str,
    client: EngineClient,
    loader: EngineLoader,
    folders: list[Path],
    traffic: Traffic,
    asked: argparse.Namespace,
) -> Row:
    loader.why_not = "to compare" if name == "disk" else ""
    loader.stage = name if name != "disk" else "auto"  # type: ignore[assignment]
    undisturbed = await traffic.rate(asked.settle_s)
    reports: list[LoadReport] = []
    before, began = traffic.tokens, time.perf_counter()
    for turn in range(2 * asked.repeat):
        reports.append(await loader.load(str(turn + 1), folders[(turn + 1) % 2]))
        traffic.cache_key = loader.cache_key
        await asyncio.sleep(asked.gap_s)
        traffic.check()
    seconds = time.perf_counter() - began
    if name == "disk":
        assert all(report.how == "disk" for report in reports)
    else:
        assert all(report.how == "loader" and report.stage in (name, "host") for report in reports), reports[
            -1
        ]
    rows = [report.row() for report in reports]
    steps = {step for report in reports for step in report.steps_s}
    return {
        "case": name,
        "loads": len(reports),
        **{
            field: _spread([row[field] for row in rows])
            for field in ("pause_s", "load_s", "prepare_s", "map_s", "verify_s", "pin_s", "copy_s")
        },
        "steps_s": {
            step: _spread([report.steps_s.get(step, 0.0) for report in reports]) for step in sorted(steps)
        },
        "first": rows[0],
        "size_bytes": max(row["size_bytes"] for row in rows),
        "undisturbed_tokens_s": round(undisturbed, 1),
        "rate": round((traffic.tokens - before) / seconds / undisturbed, 4),
        "checksum": await _held(client),
    }


async def _held(client: EngineClient) -> Any:
    try:
        return [rank["per_gpu_checksum"] for rank in await client.weights_checksum()]
    except Exception as error:  # an engine without a checker: told in the table
        return f"{type(error).__name__}: {error}"[:200]


def _spread(values: list[float]) -> Row:
    """Median, least and most, in milliseconds."""
    return {
        "ms": round(1e3 * statistics.median(values), 2),
        "least": round(1e3 * min(values), 2),
        "most": round(1e3 * max(values), 2),
    }


def command_of(asked: argparse.Namespace, folder: Path) -> EngineCommand:
    if asked.gpu:
        extra = [
            *SGLANG_EXTRA,
            *("--cuda-graph-max-bs", str(asked.running)),
            *("--max-running-requests", str(asked.running)),
            *("--mem-fraction-static", "0.6", "--tp-size", str(asked.tp)),
            *asked.engine_args,
        ]
        env = {"HF_HUB_OFFLINE": "1"}
        return sglang_command(folder, weight_version="0", deterministic=False, extra=extra, env=env)
    extra = ["--tp-size", str(asked.tp), *asked.engine_args]
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(asked.tp))}
    return sglang_on_cpu(folder, python=asked.python, weight_version="0", extra=extra, env=env)


async def run(asked: argparse.Namespace) -> Row:
    scale = GPU if asked.gpu else DRY
    shape = scale.shape | {k: v for k in ("layers", "hidden", "inner", "heads") if (v := getattr(asked, k))}
    place = Path(tempfile.mkdtemp(prefix="gyre-load-", dir="/dev/shm"))
    try:
        folders = [place / "a", place / "b"]
        for seed, folder in enumerate(folders):
            options = {"folder": str(folder), "shape": shape, "seed": seed, "bf16": asked.gpu}
            model_main(options | {"threads": os.cpu_count() if asked.gpu else 1})
        began = time.perf_counter()
        async with EngineProcess(
            command_of(asked, folders[0]), ready_within_s=400, stop_within_s=1
        ) as engine:
            started_s = time.perf_counter() - began
            try:
                async with engine.client() as client:
                    loader = EngineLoader(client, folders[0], key=engine.loader_key)
                    assert await loader.arm(), loader.why_not
                    info = await client.info()
                    traffic = Traffic(client, asked.running, asked.tokens, shape["vocab"])
                    rows = []
                    try:
                        await traffic.rate(asked.settle_s)  # kernels are compiled by then
                        for name in asked.case:
                            rows.append(await case(name, client, loader, folders, traffic, asked))
                            print(_line(rows[-1]), flush=True)
                    finally:
                        await traffic.stop()
                    for row in rows:
                        row["same"] = row["checksum"] == rows[0]["checksum"]
                    return {
                        "engine": info.engine_version,
                        "ranks": info.ranks,
                        "machine": platform.node() if not asked.gpu else _gpu(),
                        "running": asked.running,
                        "started_s": round(started_s, 1),
                        "weights_bytes": (folders[0] / "model.safetensors").stat().st_size,
                        "requests_ended": traffic.ended,
                        "of_several_versions": traffic.spanned,
                        "rows": rows,
                    }
            except BaseException:
                print(engine.tail[-8000:], file=sys.stderr)
                raise
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name(0)


def _line(row: Row) -> str:
    parts = " ".join(f"{step} {spread['ms']:.1f}" for step, spread in row["steps_s"].items())
    before = " ".join(f"{k} {row[k + '_s']['ms']:.1f}" for k in ("map", "verify", "pin", "copy"))
    return (
        f"{row['case']:<8} pause {row['pause_s']['ms']:7.1f} ms ({row['pause_s']['least']:.1f} to "
        f"{row['pause_s']['most']:.1f}), load {row['load_s']['ms']:.1f} ms | before it: {before} | in it: {parts} | "
        f"rate {row['rate']:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--python", default=".venv-sglang/bin/python", help="on a CPU: where SGLang is")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeat", type=int, help="loads of each version in each case (10, on a CPU 3)")
    parser.add_argument("--running", type=int, help="requests under way (128, on a CPU 4)")
    parser.add_argument("--tokens", type=int, help="of each request (1024, on a CPU 256)")
    parser.add_argument("--tp", type=int, default=1)
    for name in ("layers", "hidden", "inner", "heads"):
        parser.add_argument(f"--{name}", type=int, help="of the model, where it is not to be Qwen3-0.6B's")
    parser.add_argument("--settle-s", type=float, help="without loads, before each case (8, on a CPU 2)")
    parser.add_argument("--gap-s", type=float, default=0.5, help="between two loads")
    parser.add_argument("--engine-args", nargs=argparse.REMAINDER, default=[], help="last: more for SGLang")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    for name, gpu, cpu in (
        ("repeat", 10, 3),
        ("running", 128, 4),
        ("tokens", 1024, 256),
        ("settle_s", 8.0, 2.0),
    ):
        if getattr(asked, name) is None:
            setattr(asked, name, gpu if asked.gpu else cpu)
    if not asked.gpu:
        asked.python = str(Path(asked.python).absolute())
        if not Path(asked.python).exists():
            print("bench/engine_load.py: no SGLang here (make sglang); nothing was measured", file=sys.stderr)
            return
    result = asyncio.run(run(asked))
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}))
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
