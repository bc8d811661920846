"""What a Megatron rank's first steps take in a new process, and what a copy of its state beside them: on one GPU.

    python bench/first_steps_gpu.py [--shape 1.7B] [--json FILE] [--dry-run]

A way is a process of its own: `ours`, SwiGLU as one kernel; `compiled`, as Megatron has torch compile it. Each makes
`--steps` steps of eight passes of other widths, as a job's are, then steps beside whose passes the state is copied into
the machine's memory, with the interpreter's usual switch interval, and with a shorter one. Seconds; `copy` is until the
state counts, `held` what the step waited for it. `--ways` names those that are wanted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import numpy as np  # noqa: E402
from backend_steps import WIDEST, WIDEST_DRY, passes_of, step  # noqa: E402
from job_plane.case import Row  # noqa: E402
from memory_gpu import SMALL, Case, architecture, config_of_job, drawn_weights  # noqa: E402

SHORT_S = 0.0005
WITHIN_S = 150.0
"""For a way, its process's start included."""


def compiled() -> None:
    """Have Megatron's activation as torch compiles it, whatever the seam does later."""
    from gyre.workloads.megatron.model import seam

    with seam._without(seam.UNUSED):
        from megatron.core.fusions import fused_bias_swiglu

    own = fused_bias_swiglu.swiglu, fused_bias_swiglu.swiglu_back
    from gyre.workloads.megatron.model import swiglu

    def use() -> None:
        fused_bias_swiglu.swiglu, fused_bias_swiglu.swiglu_back = own

    swiglu.use_in_megatron = use


def way_main(given: Row) -> None:
    import torch

    dry = given["dry"]
    began = time.monotonic()
    if given["way"] == "compiled" and not dry:
        compiled()
    case = Case("megatron", given["shape"], vocab=SMALL)
    backend = _backend(case, Path(given["folder"]), dry)
    row: Row = {"way": given["way"], "ready": time.monotonic() - began, "steps": [], "beside": []}
    drawn = np.random.default_rng(1)
    for _ in range(given["steps"]):
        row["steps"].append(_step(backend, drawn, dry))
        print("ROW " + json.dumps(row), flush=True)
    backend.prepare()
    for number, switch_s in enumerate([sys.getswitchinterval()] * 5 + [SHORT_S] * 3):
        sys.setswitchinterval(switch_s)
        begun = time.monotonic()
        backend.memory.save_if_due(number + 1, {})
        saving = backend.memory._memory._saving
        whole: list[float] = []
        import threading

        def watch(saving: Any = saving, begun: float = begun, whole: list[float] = whole) -> None:
            saving.join()
            whole.append(time.monotonic() - begun)

        watching = threading.Thread(target=watch)
        watching.start()
        seconds = _step(backend, drawn, dry)
        watching.join()
        row["beside"].append(
            {
                "switch_s": switch_s,
                "step": seconds,
                "copy": whole[0],
                "held": backend.memory.status()["hold_s"],
                "bytes": sum(part.tensor.nbytes for part in backend.memory._state.parts()),
            }
        )
        print("ROW " + json.dumps(row), flush=True)
    if not dry:
        torch.cuda.synchronize()
    back = time.monotonic()
    backend.memory.restore(newer_than=0, at_most=99)
    row["back"] = time.monotonic() - back
    print("ROW " + json.dumps(row), flush=True)
    backend.close(keep=False)


def _backend(case: Case, folder: Path, dry: bool) -> Any:
    from gyre.config.sections import WorkloadSettings
    from gyre.models.architecture import config_of
    from gyre.workloads.base import WorkloadContext
    from gyre.workloads.learner.trained_model import TrainedModel
    from gyre.workloads.megatron.backend import MegatronBackend

    shape, source = architecture(case), drawn_weights(case, dry)
    own = config_of_job(case, dry)
    own["megatron"]["memory_checkpoint_share"] = 1.0
    settings = WorkloadSettings.read(own)
    context = WorkloadContext("bench", "actor", 0, 1, directory=folder)
    model = TrainedModel(shape, config_of(shape, eos_id=0), None)
    return MegatronBackend(context, settings, settings.optim, model, lambda _: source, values=False)


def _step(backend: Any, drawn: np.random.Generator, dry: bool) -> float:
    """Seconds of eight passes, each of another width and a micro-batch of its own, and of an optimizer step."""
    parts = passes_of(drawn, widest=WIDEST_DRY if dry else WIDEST, multiple=backend.width_multiple)
    return step(backend, parts, together=1)


def measured(way: str, shape: str, steps: int, dry: bool) -> Row:
    folder = Path(tempfile.mkdtemp())
    given = {"way": way, "shape": "tiny" if dry else shape, "steps": steps, "dry": dry, "folder": str(folder)}
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    try:
        told = subprocess.run(
            [sys.executable, __file__, "--way", json.dumps(given)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            timeout=WITHIN_S,
        ).stdout
    except subprocess.TimeoutExpired as error:
        told = (error.stdout or b"").decode()
    finally:
        shutil.rmtree(folder)
    rows = [line for line in told.splitlines() if line.startswith("ROW ")]
    return json.loads(rows[-1][4:]) if rows else {"way": way, "error": told[-2000:]}


def table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        lines.append(f"{row['way']}: " + row.get("error", f"ready {row.get('ready', 0):.2f}"))
        lines.append("  steps  " + " ".join(f"{one:.2f}" for one in row.get("steps", [])))
        for one in row.get("beside", []):
            size, switch_ms = one["bytes"] / 1e9, one["switch_s"] * 1e3
            took = f"step {one['step']:.2f}, copy {one['copy']:.2f}, held {one['held']:.2f}"
            lines.append(f"  beside a copy of {size:.1f} GB, switching after {switch_ms:g} ms: {took}")
        if "back" in row:
            lines.append(f"  compared and copied back: {row['back']:.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="1.7B")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--ways", nargs="+", default=["ours", "compiled"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU, and nothing is measured")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        way_main(json.loads(given.way))
        return
    rows = []
    for way in given.ways:
        rows.append(measured(way, given.shape, given.steps, given.dry_run))
        if given.json:
            machine = {"cpus": os.cpu_count(), "kernel": platform.release()}
            given.json.write_text(
                json.dumps({"machine": machine, "shape": given.shape, "rows": rows}, indent=1) + "\n"
            )
    print(table(rows))


if __name__ == "__main__":
    main()
