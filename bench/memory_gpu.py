"""What a learner's rank has on its GPU, beside what `gyre plan` foretells: the product's own back ends, in real passes.

    python bench/memory_gpu.py [--json FILE] [--only TEXT] [--gpus N] [--case-timeout S] [--dry-run]

A case is a back end, a shape of Qwen3's with its real vocabulary or a small one, activations kept or computed again. It
runs in a process a rank, one rank a GPU, as many cases at once as there are GPUs. Weights are random and made on the
device. Each makes a small step first, so that the optimizer has its states, and then, for each size of pass, two
passes and an optimizer step. `allocated` is `torch.cuda.max_memory_allocated`, `reserved` what the allocator took of
the device for it, `outside` what the process has on the device besides (its context, NCCL): by `mem_get_info`. All in
GiB, of the rank that has most.

Results are written after each case. With `--dry-run` everything is tiny and on CPUs, and nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from job_plane.case import SHAPES, Row  # noqa: E402

GIB = 2**30
REAL, SMALL = 151936, 640
PROMPT, LONGEST = 48, 304
"""Tokens of a sequence's prompt, and of all of it."""
SIZES = {"0.6B": (8192, 16384), "1.7B": (4096, 8192), "4B": (4096, 6144), "tiny": (256, 512)}
"""Tokens of the passes. Recomputed ones are twice as large."""
RANK_OF_ADAPTER = 32


@dataclass(frozen=True)
class Case:
    backend: str
    shape: str
    vocab: int = REAL
    recompute: bool | Literal["auto"] = False
    ranks: int = 1

    @property
    def name(self) -> str:
        again = {True: ", recomputed", False: "", "auto": ", recomputed by auto"}[self.recompute]
        several = f" on {self.ranks}" if self.ranks > 1 else ""
        return f"{self.backend} {self.shape}{several}, vocabulary {self.vocab}{again}"

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size * (2 if self.recompute else 1) for size in SIZES[self.shape])


def cases(dry: bool) -> list[Case]:
    """The ones on two GPUs first, so that none of them waits at the end."""
    if dry:
        return [
            Case(backend, "tiny", vocab=SMALL, recompute=recompute, ranks=ranks)
            for backend, recompute, ranks in (
                ("megatron", True, 2),
                ("fsdp", True, 2),
                ("megatron", False, 1),
                ("fsdp", False, 1),
                ("lora", False, 1),
            )
        ]
    found = [
        Case(backend, "4B", recompute=again, ranks=2)
        for backend in ("megatron", "fsdp")
        for again in (False, True)
    ]
    found += [Case("lora", "4B", recompute=again) for again in (False, True)]
    found += [
        Case(backend, shape, recompute=again)
        for shape in ("1.7B", "0.6B")
        for backend in ("megatron", "fsdp", "lora")
        for again in (False, True)
    ]
    return found + [Case(backend, "1.7B", vocab=SMALL) for backend in ("megatron", "fsdp")]


# -- a rank's process -----------------------------------------------------------------------------------


def rank_main(given: Row) -> None:
    """Print a row for each size of pass, as one line of JSON."""
    import torch

    case, rank, dry = Case(**given["case"]), given["rank"], given["dry"]
    torch.set_num_threads(1 if dry else 8)
    began = time.monotonic()
    backend = _backend(case, rank, given["port"], dry)
    cuda = not dry
    failed = False
    try:
        _step(backend, LONGEST, vocab=case.vocab)
        ready = time.monotonic() - began
        for size in case.sizes:
            row: Row = {"tokens": size, "ready_s": round(ready, 1)}
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                part, at_loss = _step(backend, size, vocab=case.vocab)
                row |= {"width": len(part.tokens), "sequences": len(part.lengths), "at_loss": at_loss}
            except torch.cuda.OutOfMemoryError as error:
                row["error"] = str(error).partition("\n")[0][:300]
            if cuda:
                row |= _measured(torch)
            print("ROW " + json.dumps(row), flush=True)
            failed = "error" in row
            if failed:
                break
    finally:
        if not failed:
            backend.close(keep=False)
    os._exit(3 if failed else 0)  # what ran out of memory may have left a collective open


def _measured(torch: Any) -> Row:
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "idle": torch.cuda.memory_allocated(),
        "torch": torch.__version__,
        "reserved": torch.cuda.max_memory_reserved(),
        "outside": total - free - reserved,
        "device": total,
    }


def drawn_weights(case: Case, dry: bool) -> Any:
    """A source of the shape's tensors, made on the device."""
    import torch

    from gyre.models.tensor_names import expected_shapes

    shapes = expected_shapes(architecture(case))
    device = torch.device("cpu" if dry else "cuda:0")
    generator = torch.Generator(device).manual_seed(1)

    def source(name: str) -> torch.Tensor:
        made = torch.empty(shapes[name], device=device, dtype=torch.bfloat16)
        return made.normal_(0.0, 0.02, generator=generator) if made.ndim > 1 else made.fill_(1.0)

    return source


def _backend(case: Case, rank: int, port: int, dry: bool, **own: Any) -> Any:
    """With settings of its `own` section besides."""
    from gyre.config.sections import WorkloadSettings
    from gyre.models.architecture import config_of
    from gyre.workloads.base import WorkloadContext

    shape, source = architecture(case), drawn_weights(case, dry)
    settings = WorkloadSettings.read(config_of_job(case, dry, **own))
    context = WorkloadContext(
        "bench",
        "actor",
        rank,
        case.ranks,
        directory=Path(tempfile.gettempdir()),
        master_addr="127.0.0.1",
        master_port=port,
    )
    config = config_of(shape, eos_id=0)
    if case.backend == "megatron":
        from gyre.workloads.learner.trained_model import TrainedModel
        from gyre.workloads.megatron.backend import MegatronBackend

        model = TrainedModel(shape, config, None)
        return MegatronBackend(context, settings, settings.optim, model, lambda _: source, values=False)
    from gyre.workloads.fsdp.backend import FsdpBackend

    return FsdpBackend(context, settings, settings.optim, config, source, values=False)


def _step(backend: Any, size: int, *, vocab: int) -> tuple[Any, int]:
    """Two passes and an optimizer step. Returns the pass, and the most bytes that are there when a loss is made."""
    import numpy as np
    import torch

    from gyre.workloads.algorithms.losses import LossSum
    from gyre.workloads.learner.packing import TrainingRow as Sequence
    from gyre.workloads.learner.packing import pack

    drawn = np.random.default_rng(size)
    rows = [
        Sequence(
            drawn.integers(0, vocab, PROMPT).astype(np.int32),
            drawn.integers(0, vocab, LONGEST - PROMPT + 1).astype(np.int32),
        )
        for _ in range(max(1, size // LONGEST))
    ]
    (part,) = pack(rows, max_tokens=max(size, LONGEST), multiple=backend.width_multiple)

    at_loss = [0]

    def loss(part: Any, logprobs: torch.Tensor, entropies: torch.Tensor) -> LossSum:
        if logprobs.is_cuda:
            at_loss.append(torch.cuda.memory_allocated())
        return LossSum(-logprobs.sum(), torch.tensor(float(len(part.targets)), device=logprobs.device), {})

    backend.zero()
    backend.backward([part, part], loss)
    backend.update(count=2.0 * len(part.targets), lr=1e-6)
    return part, max(at_loss)


# -- what is foretold ------------------------------------------------------------------------------------


def architecture(case: Case) -> Any:
    from dataclasses import replace

    from gyre.models.architecture import Architecture

    s = SHAPES[case.shape]
    shape = Architecture.qwen3(
        vocab=case.vocab,
        layers=s["layers"],
        hidden=s["hidden"],
        heads=s["heads"],
        kv_heads=s["kv_heads"],
        mlp=s["inner"],
        max_positions=4096,
    )
    return replace(shape, head_dim=s["head_dim"])


def config_of_job(case: Case, dry: bool, **more: Any) -> Row:
    own: Row = {"device": "cpu", "dtype": "bfloat16"} if dry else {"device": "cuda"}
    own |= {"recompute": case.recompute, "memory_checkpoint_share": 0.0, **more}
    section = "megatron" if case.backend == "megatron" else "fsdp"
    if section == "megatron":
        own["tensor_parallel"] = case.ranks
    found: Row = {"optim": {"lr": 1e-6}, section: own, "collective_timeout_s": 60.0}
    found["sampling"] = {"max_new_tokens": LONGEST}
    if case.backend == "lora":
        found["lora"] = {"rank": RANK_OF_ADAPTER, "alpha": 2.0 * RANK_OF_ADAPTER}
    return found


def foretold(case: Case, tokens: int, sequences: int, dry: bool) -> dict[str, int]:
    from gyre.config.sections import WorkloadSettings
    from gyre.workloads.memory.rank import PassSize, fsdp_rank, megatron_ranks

    settings, shape = WorkloadSettings.read(config_of_job(case, dry)), architecture(case)
    part = PassSize(tokens, sequences)
    if case.backend == "megatron":
        ranks = megatron_ranks(shape, settings.megatron, ranks=case.ranks, width=2)
        return max((one.peak(part) for one in ranks), key=lambda parts: sum(parts.values()))
    return fsdp_rank(shape, settings.fsdp, ranks=case.ranks, width=2, lora=settings.lora).peak(part)


def foretold_again(rows: list[Row]) -> list[Row]:
    """The rows with what the code foretells now."""
    for row in rows:
        case = Case(**{name: row[name] for name in Case.__dataclass_fields__})
        row["parts"] = foretold(case, row["width"], row["sequences"], False)
        row["foretold"] = sum(row["parts"].values())
        row["difference"] = row["foretold"] / row["allocated"] - 1.0
    return rows


# -- all cases -------------------------------------------------------------------------------------------


@dataclass
class Running:
    case: Case
    gpus: list[int]
    processes: list[subprocess.Popen[str]]
    files: list[Path]
    until: float


def start(case: Case, gpus: list[int], place: Path, number: int, dry: bool, timeout_s: float) -> Running:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes, files = [], []
    for rank in range(case.ranks):
        out = place / f"case_{number:02d}_rank_{rank}.txt"
        given = {"case": asdict(case), "rank": rank, "port": port, "dry": dry}
        environment = {
            **os.environ,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "CUDA_VISIBLE_DEVICES": "" if dry else str(gpus[rank]),
        }
        environment.pop("GYRE_DEVICES", None)
        with out.open("w") as file:
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--rank", json.dumps(given)],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=environment,
                )
            )
        files.append(out)
    return Running(case, gpus, processes, files, time.monotonic() + timeout_s)


def ended(running: Running) -> bool:
    """Whether all its ranks have ended. Who takes too long is ended; so are the others of one that failed."""
    codes = [process.poll() for process in running.processes]
    if all(code is not None for code in codes):
        return True
    if time.monotonic() > running.until or any(code for code in codes):
        for process in running.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        return True
    return False


def rows_of(running: Running, dry: bool) -> list[Row]:
    """A row for each size, of the rank that has most."""
    by_size: dict[int, list[Row]] = {}
    for file in running.files:
        for line in file.read_text().splitlines():
            if line.startswith("ROW "):
                row = json.loads(line[4:])
                by_size.setdefault(row["tokens"], []).append(row)
    found = []
    for size in running.case.sizes:
        rows = by_size.get(size, [])
        most = max(rows, key=lambda row: row.get("allocated", 0), default={"error": _last_words(running)})
        error = next((row["error"] for row in rows if "error" in row), most.get("error"))
        parts = foretold(
            running.case, most.get("width", size), most.get("sequences", max(1, size // LONGEST)), dry
        )
        row = {"case": running.case.name, **asdict(running.case), **most, "tokens": size, "error": error}
        row |= {"foretold": sum(parts.values()), "parts": parts}
        if row.get("allocated") and not error:
            row["difference"] = row["foretold"] / row["allocated"] - 1.0
        found.append(row)
    return found


def _last_words(running: Running) -> str:
    for file in running.files:
        lines = [
            line for line in file.read_text().splitlines() if line.strip() and not line.startswith("ROW ")
        ]
        for line in reversed(lines):
            if "Error" in line:
                return line[:300]
    codes = [process.returncode for process in running.processes]
    return f"no result within its time (exit codes {codes})"


def table(rows: list[Row]) -> str:
    lines = [
        "| case | tokens | foretold | allocated | difference | reserved | outside | largest parts foretold |",
        "| --- |" + " --- |" * 7,
    ]
    for row in rows:
        numbers = [
            f"{row[key] / GIB:.1f}" if row.get(key) else "" for key in ("allocated", "reserved", "outside")
        ]
        difference = f"{row['difference']:+.1%}" if "difference" in row else ""
        told = ", ".join(f"{name} {size / GIB:.1f}" for name, size in list(row["parts"].items())[:4])
        first, *others = numbers
        error = f" ({row['error'][:120]})" if row["error"] else ""
        cells = [
            row["case"],
            f"{row['tokens']:,}",
            f"{row['foretold'] / GIB:.1f}",
            first + error,
            difference,
            *others,
            told,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the results, written after each case")
    parser.add_argument("--only", default="", help="the cases whose name has this text")
    parser.add_argument("--gpus", type=int, help="GPUs that are used; all by default")
    parser.add_argument("--case-timeout", type=float, default=90.0, help="seconds for a case")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on CPUs: nothing is measured")
    parser.add_argument(
        "--again", type=Path, help="of this FILE, foretell what was measured anew, without a GPU"
    )
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    return parser


def gpu_count() -> int:
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return len(asked.stdout.split())


def main() -> int:
    given = arguments().parse_args()
    if given.rank is not None:
        rank_main(given.rank)
    if given.again:
        rows = foretold_again(json.loads(given.again.read_text()))
        given.again.write_text(json.dumps(rows, indent=1) + "\n")
        print(table(rows))
        return 0
    dry = given.dry_run
    free = list(range(2 if dry else given.gpus or gpu_count()))
    waiting = [case for case in cases(dry) if given.only in case.name and case.ranks <= len(free)]
    running: list[Running] = []
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="memory_gpu_") as place:
        number = 0
        while waiting or running:
            for case in list(waiting):
                if case.ranks <= len(free):
                    gpus, free = free[: case.ranks], free[case.ranks :]
                    running.append(start(case, gpus, Path(place), number, dry, given.case_timeout))
                    waiting.remove(case)
                    number += 1
            for one in [one for one in running if ended(one)]:
                running.remove(one)
                free = sorted([*free, *one.gpus])
                rows += rows_of(one, dry)
                print(table(rows).splitlines()[-len(one.case.sizes)], file=sys.stderr, flush=True)
                if given.json:
                    given.json.write_text(json.dumps(rows, indent=1))
            time.sleep(0.1)
    print(table(rows))
    wrong = [row for row in rows if row["error"] and "memory" not in row["error"]]
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
