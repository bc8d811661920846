"""Starts SGLang with the API key that its environment holds: `python -m gyre_launch_server [ARGUMENT ...]`.

Every user of a machine can read a process's command line, and only its own user its environment.

It runs where Gyre is not installed: it must import nothing of Gyre.
"""

import os
import runpy
import sys

KEY = "GYRE_ENGINE_API_KEY"
"""The environment variable with the key."""

if __name__ == "__main__":
    sys.argv += ["--api-key", os.environ[KEY]]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
