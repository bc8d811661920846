"""What an export takes of memory, in a process of its own.

`python -m tests.export_memory BACK_END CHECKPOINT OUT FILE_BYTES [DTYPE]` exports in files of at most so many bytes and
prints the most bytes of its own that the process had then beyond those it began with. Pages of mapped files are not its
own.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.waits import GENEROUS_S

_EXPORTS = {
    "torch": ("gyre.workloads.torch.saved_policy", "export_policy"),
    "megatron": ("gyre.workloads.megatron.checkpoints.conversion", "export_checkpoint"),
}


def most_bytes(back_end: str, checkpoint: Path, out: Path, *, file_bytes: int, dtype: str) -> int:
    """What such a process prints. It gives back at once what is freed, so that what it has is what it holds."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.export_memory", back_end, checkpoint, out, str(file_bytes), dtype],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        capture_output=True,
        text=True,
        timeout=GENEROUS_S,
        check=True,
    )
    return int(done.stdout)


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (held,) = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(held) * 1024


def main(back_end: str, checkpoint: str, out: str, file_bytes: str, dtype: str = "") -> None:
    if back_end == "megatron":
        import torch

        from gyre.workloads.megatron.model.seam import open_seam

        open_seam(torch.device("cpu"))  # what it imports is no weight
        importlib.import_module("gyre.workloads.megatron.policy")
    name, verb = _EXPORTS[back_end]
    module: Any = importlib.import_module(name)
    save, most, first = module.save_model_folder, 0, own_bytes()

    def watched(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for one in named:
            most = max(most, own_bytes() - first)
            yield one

    def saved(path: Path, config: Any, tensors: Any, **named: Any) -> Any:
        each = tensors.items() if isinstance(tensors, Mapping) else tensors
        return save(path, config, watched(each), shard_bytes=int(file_bytes), **named)

    module.save_model_folder = saved
    getattr(module, verb)(Path(checkpoint), Path(out), dtype=dtype)
    print(most)


if __name__ == "__main__":
    main(*sys.argv[1:])
