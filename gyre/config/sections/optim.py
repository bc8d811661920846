"""The sections `config.optim` and `config.critic`: how the actor and the critic are updated."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gyre.config.sections.section import Section
from gyre.errors import ConfigError

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimSettings(Section):
    """AdamW, and how a step's groups become optimizer steps.

    The rate rises linearly over `warmup_steps`, and falls linearly to `final_lr_ratio` of `lr` at `decay_steps`. It is
    a function of the step's number alone.
    """

    lr: Annotated[float, Field(gt=0)] | None = None
    """The learning rate. It has no default, because the right one depends on the model."""
    beta1: Decay = 0.9
    """Decay of the mean of gradients."""
    beta2: Decay = 0.95
    """Decay of the mean of squared gradients."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the squared gradients' mean."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay of the weights."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """The largest norm of a step's gradient; a larger one is scaled down to it."""
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """Steps over which the rate rises."""
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """The step at which the rate has fallen to its end, where it stays; 0 leaves the rate constant."""
    final_lr_ratio: Annotated[float, Field(ge=0)] = 0.1
    """The rate at the end of the decay, as a part of `lr`."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the groups of a step."""
    mini_batches: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps in each pass. All of them are one step of the job: one rate, one policy version."""

    @property
    def rate(self) -> float:
        """`lr`. Raises ConfigError where the job gave none."""
        if self.lr is None:
            raise ConfigError(
                "The optimizer has no learning rate: lr is missing.",
                hint="Give config.optim.lr, and config.critic.optim.lr for a critic.",
            )
        return self.lr

    @property
    def updates(self) -> int:
        """Optimizer steps in a step of the job."""
        return self.epochs * self.mini_batches


class CriticSettings(Section):
    """The critic's own optimizer. Its model has the actor's shape."""

    optim: OptimSettings = OptimSettings()
    """As `config.optim`, for the critic."""
