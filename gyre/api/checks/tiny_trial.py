"""Tries a kind of model that the table of tried kinds does not have, at a tiny size, in a process of its own.

    python -m gyre.api.checks.tiny_trial FOLDER fsdp|embedded

prints as JSON why that does not take the folder's model, "" where it does. What is tried is what a vertex tries at its
start, so a plan that takes minutes to begin is refused within seconds.

This module imports torch and transformers in that process alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.models import tried

DEADLINE_S = 180.0
"""The packages are imported within 20 s on a slow disk, and a tiny model is tried within 2 s."""


def problem_with(folder: Path, config: Mapping[str, Any], who: str) -> str:
    """Why `fsdp` or `embedded` does not take the folder's model, whose `config.json` holds `config`; "" where it does.
    By the table where it knows the kind, else by a trial."""
    if tried.knows(str(config.get("model_type"))):
        return tried.problem_with(config, who)
    command = [sys.executable, "-m", __name__, str(folder), who]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        return str(json.loads(ended.stdout.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return f"a tiny model of its kind was not tried within {DEADLINE_S:.0f} s"
    except (IndexError, ValueError):  # the process was killed, or a library printed the last line
        last = ended.stderr.strip().splitlines()[-1:] or [f"exit status {ended.returncode}"]
        return f"a tiny model of its kind could not be tried: {last[0][:300]}"


def main(folder: str, who: str) -> None:
    from gyre.errors import GyreError
    from gyre.rollouts.engines import known_engine

    try:
        (_by_engine if known_engine(who) else _by_back_end)(Path(folder))
        problem = ""
    except GyreError as error:
        problem = error.message
    except Exception as error:  # a model's own code raises anything for what it does not know
        problem = " ".join(f"{type(error).__name__}: {error}".split())
    print(json.dumps(problem))


def _by_back_end(folder: Path) -> None:
    import torch

    from gyre.models.architecture import read_config
    from gyre.workloads.fsdp.model import build_causal
    from gyre.workloads.fsdp.small_check import try_small
    from gyre.workloads.fsdp.token_model import TokenModel

    causal = build_causal(read_config(folder), "auto")
    TokenModel(causal, values=False)
    try_small(causal.config, attention="auto", values=False, device=torch.device("cpu"), seed=0)


def _by_engine(folder: Path) -> None:
    from gyre.engines.embedded.transformers_steps import fitting_runner
    from gyre.models.architecture import read_config
    from gyre.models.small_model import small_model, transformers_config

    small = small_model(transformers_config(read_config(folder)))
    fitting_runner(small, slots=2, context_length=512)


if __name__ == "__main__":
    main(*sys.argv[1:])
