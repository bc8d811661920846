"""The part that runs those of `rollouts_gpu.py` that want two instances, one a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpu_plane.follow import PartFailed, Row, now
from training_loop.bench import LoopBench

ROLLOUTS = Path(__file__).resolve().parents[2] / "rollouts_gpu.py"


class More(LoopBench):
    """Part `more`."""

    def more(self, out: Row, until: float) -> None:
        self._end_small()
        if "d" in self.instances:
            self.instances["d"].kill()
        if "big" in self.actors:
            self.actors["big"].close()
        seconds = until - now() - 15.0
        if seconds < 60.0:
            raise PartFailed("no time is left for it")
        folder = self.out / "more"
        command = [sys.executable, str(ROLLOUTS), "--out", str(folder)]
        command += ["--part", "two", "crash", "drain", "ends", "--seconds", f"{seconds:.0f}"]
        command += ["--patience", f"{self.patience:g}"]
        if not self.cuda:
            command.append("--dry-run")
        told = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 14.0, check=False)
        out["status"], out["said"] = told.returncode, told.stdout[-6000:]
        if told.returncode:
            raise PartFailed(told.stderr[-1500:] or "see more/results.json")
