"""Tries every kind of causal model of the installed transformers at a tiny size, and writes what came of it to
`gyre/models/tried.json`, by which `gyre models` and `gyre plan` answer and the documents' numbers are compared.

    python -m tools.models_table [--jobs 2] [KIND ...]

Each kind is tried in a process of its own that has a deadline: see `models_trial`. With kinds named, only their rows
are written anew.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "gyre" / "models" / "tried.json"
DEADLINE_S = 150.0
"""Of a kind, which takes some 5 s alone on a core."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=TABLE)
    chosen = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import transformers

    from gyre.models.transformers_models import causal_types

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kinds = chosen.kinds or sorted(causal_types() or ())
    rows = json.loads(chosen.out.read_text())["kinds"] if chosen.kinds and chosen.out.exists() else {}
    with tempfile.TemporaryDirectory(prefix="gyre-models-") as room, ThreadPoolExecutor(chosen.jobs) as pool:
        for kind, row in zip(kinds, pool.map(lambda kind: _tried(kind, Path(room)), kinds), strict=True):
            rows[kind] = row
            print(_line(kind, row), flush=True)
    table = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
        "kinds": dict(sorted(rows.items())),
    }
    chosen.out.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    print(
        f"{chosen.out}: {_count(rows, 'fsdp')} kinds are trained, {_count(rows, 'embedded')} served, of {len(rows)}"
    )
    return 0


def _tried(kind: str, room: Path) -> dict[str, Any]:
    from tools.models_trial import Failed, answer_of, cleared, in_fork, trial

    own = cleared(room / kind)

    def alone() -> dict[str, Any]:
        os.setsid()  # so that its ranks end with it
        return trial(kind, own)

    pid, end = in_fork(alone)
    answer = answer_of(pid, end, time.monotonic() + DEADLINE_S)
    with suppress(ProcessLookupError):  # all of it has ended, as it should have
        os.killpg(pid, signal.SIGKILL)
    if isinstance(answer, Failed):
        said = {"takes": False, "reason": str(answer)}
        return {"made": True, "fsdp": said, "embedded": said}
    found: dict[str, Any] = answer
    return found


def _line(kind: str, row: dict[str, Any]) -> str:
    told = [
        f"{who}: {row[who].get('way') or row[who].get('how') or row[who]['reason']}"
        for who in ("fsdp", "embedded")
    ]
    return f"{kind}: {'; '.join(told)}"


def _count(rows: dict[str, Any], who: str) -> int:
    return sum(row[who]["takes"] for row in rows.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
