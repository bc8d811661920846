"""The section `config.sampling`: how answers are drawn."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gyre.config.sections.section import Section

PositiveInt = Annotated[int, Field(ge=1)]


class SamplingSettings(Section):
    """How many answers a prompt gets, how they are drawn, and how long they may become."""

    n: PositiveInt = 8
    """Samples of each prompt: the size of a group."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits before a token is drawn; 0 takes the likeliest token."""
    max_new_tokens: PositiveInt = 1024
    """The longest answer in tokens, the end token included. A longer one is cut off. A prompt may bring a lower limit
    of its own, as `max_new_tokens` in its `meta`."""
    max_rows: PositiveInt = 1024
    """Rows that `TorchRollout` decodes at once. The engines of the rollout plane have `rollouts.max_running`."""
