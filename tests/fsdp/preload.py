"""What every rank process is forked with."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
import transformers.models.qwen3.modeling_qwen3  # noqa: E402, F401

import gyre.workloads.fsdp.backend  # noqa: E402, F401
