"""What every rank process is forked with."""

from __future__ import annotations

import torch

from gyre.workloads.megatron.model.seam import open_seam

torch.set_num_threads(1)
SEAM = open_seam(torch.device("cpu"))
import gyre.workloads.megatron.policy  # noqa: E402, F401
