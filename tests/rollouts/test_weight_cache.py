"""Folders of fetched weights go with their agents, however these end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gyre.rollouts.weight_cache import PREFIX, WeightCache

HOLD = (
    "import sys, time; from pathlib import Path; from gyre.rollouts.weight_cache import WeightCache\n"
    "cache = WeightCache(Path(sys.argv[1]), 'dead'); (cache.path / 'model').write_bytes(b'x' * 1000)\n"
    "print('held', flush=True); time.sleep(60)"
)


def test_a_living_agents_folder_stays_and_a_killed_ones_goes_with_the_next(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        mine = WeightCache(tmp_path, "mine")
        assert (tmp_path / f"{PREFIX}dead" / "model").exists()
        other.kill()
        other.wait(10.0)
    third = WeightCache(tmp_path, "third")
    assert {folder.name for folder in tmp_path.iterdir()} == {f"{PREFIX}mine", f"{PREFIX}third"}
    mine.close()
    third.close()
    assert list(tmp_path.iterdir()) == []
