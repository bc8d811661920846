"""What this room raises beyond the learners' errors.

    GyreError
    ├── LossFailed   the loss raised on another rank
    └── NoGradient   a parameter that is trained gets none

This module must not import torch.
"""

from __future__ import annotations

from gyre.errors import GyreError


class LossFailed(GyreError):
    code = "fsdp.loss_failed"


class NoGradient(GyreError):
    code = "fsdp.no_gradient"
