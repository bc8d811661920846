"""Where an engine keeps what it compiles, so that the next engine on this machine finds it.

Triton, torch, FlashInfer, DeepGEMM and CUDA's driver compile kernels when they are first used, for seconds to minutes,
and keep them in folders of their own: some in the home, torch's in the system's temporary folder, which a container
loses. Here they have one folder for each machine and user, which outlives engines and jobs. Each names a kernel by its
source, compiler and device, and puts it in place by a rename, so engines that start side by side may share them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

_FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "CUDA_CACHE_PATH": "cuda",
}


def cache_variables(environment: Mapping[str, str] | None = None, machine: str = "") -> dict[str, str]:
    """The environment variables to start an engine with; those that its user has set are left out.

    `environment` is the agent's, `machine` this machine's name. Empty where there is no folder that can be written.
    """
    given = os.environ if environment is None else environment
    root = given.get("XDG_CACHE_HOME") or (f"{given['HOME']}/.cache" if given.get("HOME") else "")
    if not root:
        return {}
    folder = Path(root, "gyre", "compiled", machine or socket.gethostname())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written: each tool then does as it does without us
        return {}
    if not os.access(folder, os.W_OK):
        return {}
    return {variable: str(folder / name) for variable, name in _FOLDERS.items() if variable not in given}
