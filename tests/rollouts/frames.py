"""Frames that several tests send."""

from __future__ import annotations

import numpy as np

from gyre.rollouts.protocol.progress import COLUMNS, Progress


def empty_progress(seq: int) -> Progress:
    """A report of no sample."""
    return Progress(seq, *(np.empty(0, dtype) for _, dtype in COLUMNS))
