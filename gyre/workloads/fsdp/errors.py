"""What this room raises beyond the learners' errors.

    GyreError
    └── LossFailed   the loss raised on another rank

This module must not import torch.
"""

from __future__ import annotations

from gyre.errors import GyreError


class LossFailed(GyreError):
    code = "fsdp.loss_failed"
