"""The product's own job on two GPUs, as a user runs it, beside what each of its halves does alone.

    python bench/job_gpu.py --out DIR [--part job engine ...] [--steps N] [--dry-run]

`job` is `gyre run` of `examples/grpo_gsm8k.yaml` in a process of its own: Ray, the master, all roles, the ledger and
checkpoints; only the data, the model and the reward are of the bench (`job_plane/load.py`): random weights of a shape,
random prompts, samples that end anywhere. Its rate is read from its journal. `engine` is SGLang alone, with the best
settings by hand, on as many samples of the same lengths. With `--dry-run` everything runs small, on CPUs.

results.json is written anew after each part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

Row = dict[str, Any]

SHAPES: dict[str, Row] = {
    "tiny": {"hidden": 64, "inner": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 2},
    "0.6B": {"hidden": 1024, "inner": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128, "layers": 28},
    "1.7B": {"hidden": 2048, "inner": 6144, "heads": 16, "kv_heads": 8, "head_dim": 128, "layers": 28},
}
VOCAB = 640

TRITON = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
"""Kernels that need no compiler on the machine."""

BEST = ["--max-running-requests", "512", "--cuda-graph-max-bs", "512", "--disable-radix-cache"]
"""The bare engine's best settings by hand, for short prompts."""


@dataclass(frozen=True)
class Case:
    shape: str = "0.6B"
    groups: int = 64
    samples: int = 8
    prompt_tokens: int = 48
    new_tokens: int = 256
    stop_tokens: int = 1
    steps: int = 15
    dry: bool = False

    @property
    def model(self) -> Row:
        return SHAPES[self.shape] | {"vocab": VOCAB}


DRY = Case("tiny", 4, 4, 16, 32, 8, 4, dry=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", nargs="+", choices=("engine", "job"), default=["engine", "job"])
    parser.add_argument("--label", default="job", help="name of the job's row")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--set", action="append", default=[], help="as of gyre run, for the job")
    parser.add_argument("--within", type=float, default=400.0, help="seconds for the job")
    parser.add_argument(
        "--profile-at", type=int, default=0, help="the step after which py-spy records; 0 for none"
    )
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    case = DRY if given.dry_run else Case()
    case = replace(case, steps=given.steps or case.steps, shape=given.shape or case.shape)
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    file = out / "results.json"
    results: Row = json.loads(file.read_text()) if file.exists() else {}
    scratch = Path(os.environ.get("TMPDIR", "/tmp")) / f"job_gpu_{case.shape}"
    folder = model_of(case, scratch)
    for part in given.part:
        began = time.monotonic()
        try:
            if part == "engine":
                row = asyncio.run(engine_alone(case, folder))
            else:
                row = job(case, folder, scratch, out, given.label, given.set, given.within, given.profile_at)
        except Exception as error:  # the other parts are worth having
            row = {"error": f"{type(error).__name__}: {error}"[:4000]}
        row["took_s"] = round(time.monotonic() - began, 1)
        results[part if part == "engine" else given.label] = {"case": asdict(case)} | row
        file.write_text(json.dumps(results, indent=1))
        told = {key: value for key, value in row.items() if key != "steps"}
        print(part, given.label, json.dumps(told), flush=True)
    return 0


def model_of(case: Case, scratch: Path) -> Path:
    from gpu_plane.model import model_main

    folder = scratch / "model"
    if not folder.exists():
        scratch.mkdir(parents=True, exist_ok=True)
        threads = os.cpu_count() or 1
        model_main(
            {"folder": str(folder), "shape": case.model, "threads": threads, "bf16": not case.dry, "seed": 1}
        )
    return folder


# -- the engine alone --------------------------------------------------------------------------------


async def engine_alone(case: Case, folder: Path, rounds: int = 4) -> Row:
    """Rounds of a step's samples, all of a round at once."""
    from gyre.engines.process import EngineProcess
    from gyre.engines.sglang import sglang_command
    from gyre.rollouts.agent.join import engine_commands

    if case.dry:
        command = engine_commands("embedded", max_running=64, kv_tokens=1 << 16)(folder, "0")
    else:
        command = sglang_command(folder, weight_version="0", extra=[*TRITON, *BEST])
    began = time.monotonic()
    async with EngineProcess(command, ready_within_s=300.0) as engine:
        ready_s = time.monotonic() - began
        client = engine.client()
        try:
            rates = [await one_round(case, client, index) for index in range(rounds)]
        finally:
            await client.close()
    return {"ready_s": ready_s, "tokens_s": rates}


async def one_round(case: Case, client: Any, index: int) -> float:
    from job_plane.load import RandomPrompts

    from gyre.engines.dialect import GenerateRequest, SamplingParams

    task = RandomPrompts({}, vocab=VOCAB, prompt_tokens=case.prompt_tokens, stop_tokens=case.stop_tokens)
    sampling = SamplingParams(
        temperature=1.0, max_new_tokens=case.new_tokens, stop_token_ids=task.stop_token_ids
    )

    async def group(at: int) -> int:
        prompt = task.prompt(index * case.groups + at).prompt_ids
        requests = [
            GenerateRequest(f"{index:04d}{at:08d}{one:04d}", prompt, sampling) for one in range(case.samples)
        ]
        tokens = 0
        async with aclosing(client.generate_many(requests)) as chunks:
            async for _, chunk in chunks:
                tokens += len(chunk.token_ids)
        return tokens

    began = time.monotonic()
    made = await asyncio.gather(*map(group, range(case.groups)))
    return sum(made) / (time.monotonic() - began)


# -- the job -----------------------------------------------------------------------------------------


def job(
    case: Case,
    folder: Path,
    scratch: Path,
    out: Path,
    label: str,
    changes: list[str],
    within_s: float,
    profile_at: int,
) -> Row:
    from job_plane.watch import Watch

    home = scratch / f"home_{label}"
    spec = scratch / f"{label}.yaml"
    spec.write_text(json.dumps(spec_of(case, folder)))  # JSON is YAML
    environment = os.environ | {"GYRE_HOME": str(home), "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "gyre.api.cli", "run", str(spec)]
    for change in changes:
        command += ["--set", change]
    began = time.time()
    with (out / f"{label}.log").open("wb") as log, Watch(home, out, label, profile_at):
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            returncode = process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                returncode = process.wait(60.0)
            except subprocess.TimeoutExpired:
                process.kill()
                returncode = process.wait()
    ended = time.time()
    for file in home.glob("jobs/*/logs/*"):
        (out / f"{label}_{file.name}").write_bytes(file.read_bytes()[-200_000:])
    return {"returncode": returncode, "wall_s": round(ended - began, 1)} | journal(
        home, began, ended, case, out / f"{label}_events.jsonl"
    )


def python_path() -> str:
    return os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def spec_of(case: Case, folder: Path) -> Row:
    """The shipped example, over the bench's model, data and reward."""
    import yaml

    spec: Row = yaml.safe_load((HERE.parent / "examples" / "grpo_gsm8k.yaml").read_text())
    config = spec["config"]
    del config["data"]
    config["task"] = {
        "name": "job_plane.load:RandomPrompts",
        "options": {
            "vocab": VOCAB,
            "prompt_tokens": case.prompt_tokens,
            "stop_tokens": case.stop_tokens,
        },
    }
    config["reward"] = {"function": "job_plane.load:even_share", "processes": 2 if case.dry else 8}
    config["megatron"] |= {"model_path": str(folder)}
    config["sampling"] |= {"n": case.samples, "max_new_tokens": case.new_tokens}
    spec["python_path"] = [str(HERE)]
    spec["run"] |= {
        "steps": case.steps,
        "prompts_per_step": case.groups,
        "groups_per_firing": max(case.groups // 8, 1),
        "groups_per_micro_batch": max(case.groups // 4, 1),
        "checkpoint_every": 10,
        "evaluate_every": 0,
    }
    if case.dry:
        spec |= {"device_type": "CPU", "device_per_node": 4}
        spec["rollouts"] = {"engine": "embedded"}
        config["megatron"] |= {"pass_tokens": 512}
    else:
        spec["rollouts"]["engine_args"] = TRITON
    return spec


def journal(home: Path, began: float, ended: float, case: Case, file: Path) -> Row:
    """The job's rate, from its steps; and when what happened, in seconds from the command's start."""
    from gyre.store import open_store

    with open_store(f"sqlite:///{home / 'gyre.db'}") as store:
        jobs = store.jobs()
        if not jobs:
            return {"error": "no job was submitted"}
        entries = list(store.journal(jobs[0].job_id).events())
    with file.open("w") as lines:
        for entry in entries:
            row = {"at_s": round(entry.at - began, 3), "kind": entry.kind, "body": entry.body}
            lines.write(json.dumps(row) + "\n")
    steps = [
        {"step": e.body["step"], "at_s": round(e.at - began, 3), "tokens": e.body["metrics"]["tokens"]}
        | {"seconds": round(e.body["metrics"]["seconds"], 3)}
        for e in entries
        if e.kind == "StepCompleted"
    ]
    published = {e.body["version"]: e.at - began for e in entries if e.kind == "WeightsPublished"}
    row: Row = {"steps": steps, "ended_s": round(ended - began, 1)}
    if len(steps) < 3:
        return row
    laps = [(now["at_s"] - before["at_s"], now["tokens"]) for before, now in pairwise(steps)]
    steady = laps[min(4, len(laps) // 2) :]
    row |= {
        "first_step_s": steps[0]["at_s"],
        "median_lap_s": statistics.median(lap for lap, _ in steady),
        "tokens_s": sum(tokens for _, tokens in steady) / sum(lap for lap, _ in steady),
        "to_published_s": statistics.median(
            published[s["step"]] - s["at_s"] for s in steps if s["step"] in published
        ),
        "end_s": round(ended - began - steps[-1]["at_s"], 1),
    }
    return row


if __name__ == "__main__":
    sys.exit(main())
