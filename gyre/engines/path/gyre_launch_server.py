"""Starts SGLang with the API key that its environment holds: `python -m gyre_launch_server [ARGUMENT ...]`.

Every user of a machine can read a process's command line, and only its own user its environment.

On a GPU of 60 GiB and more it records CUDA graphs for up to 512 requests at once, where the arguments do not say
otherwise: SGLang's own default there is half of it, unless four GPUs or more hold the model.

It runs where Gyre is not installed: it must import nothing of Gyre.
"""

import os
import runpy
import subprocess
import sys

KEY = "GYRE_ENGINE_API_KEY"
"""The environment variable with the key."""

GRAPHS_UP_TO = 512
LARGE_MIB = 60 * 1024


def graph_arguments(given: list[str]) -> list[str]:
    """Further arguments, by those that are given and this machine's GPUs."""
    if any(
        one.startswith(("--cuda-graph", "--disable-cuda-graph", "--disable-decode-cuda-graph"))
        for one in given
    ):
        return []
    try:
        ask = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        told = subprocess.run(ask, capture_output=True, text=True, timeout=10.0, check=True).stdout
        smallest = min(float(line) for line in told.split())
    except (OSError, ValueError, subprocess.SubprocessError):  # no GPU, or nobody who tells
        return []
    return ["--cuda-graph-max-bs", str(GRAPHS_UP_TO)] if smallest >= LARGE_MIB else []


if __name__ == "__main__":
    sys.argv += graph_arguments(sys.argv[1:])
    sys.argv += ["--api-key", os.environ[KEY]]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
