"""What the torch workloads raise beyond `ConfigError` and `WeightMismatch`.

    GyreError
    ├── WeightsNotLoaded     an operator was called before any weights came
    ├── OlderWeights         weights older than those being served
    ├── StepGap              an optimizer step was called out of its order
    ├── MicroBatchMismatch   a step was applied with other micro-batches than it accumulated
    ├── TrainedTwice         a group would be trained a second time
    ├── NotFinite            a gradient holds NaN or infinity
    ├── HalfUpdated          some of a step's updates were made, and the next one failed
    └── CheckpointMismatch   a checkpoint is not this actor's
        └── NoPolicy         it is a critic's, where a policy's is wanted

This module must not import torch.
"""

from __future__ import annotations

from pathlib import Path

from gyre.errors import NOT_FINITE, GyreError


class WeightsNotLoaded(GyreError):
    code = "weights.not_loaded"


class OlderWeights(GyreError):
    code = "weights.older"


class StepGap(GyreError):
    code = "actor.step_gap"


class MicroBatchMismatch(GyreError):
    code = "actor.micro_batch_mismatch"


class TrainedTwice(GyreError):
    code = "trained_twice"


class NotFinite(GyreError):
    code = NOT_FINITE


class HalfUpdated(GyreError):
    code = "actor.half_updated"


class CheckpointMismatch(GyreError):
    code = "actor.checkpoint_mismatch"


class NoPolicy(CheckpointMismatch):
    code = "actor.no_policy"

    @classmethod
    def at(cls, checkpoint: Path) -> NoPolicy:
        return cls(
            f"{checkpoint} is not of a policy.",
            hint="A critic's checkpoint has none; the actor's lies above it.",
        )
