"""The sections `config.model`, the shape of the small decoder, for jobs whose model is not a folder's, and
`config.first_weights`, weights that training begins with instead of the model's own.

`gyre run --from` and `submit(from_=...)` fill in the latter, so that whoever starts a process of the job again has the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from gyre.config.sections.section import Section

PositiveInt = Annotated[int, Field(ge=1)]


class ModelSettings(Section):
    """A decoder's shape. The vocabulary's size comes from the task's tokenizer."""

    layers: PositiveInt
    """Transformer blocks."""
    hidden: PositiveInt
    """Width of the residual stream; an even multiple of `heads`."""
    heads: PositiveInt
    """Attention heads."""
    kv_heads: PositiveInt
    """Heads of keys and values; `heads` is a multiple of it."""
    mlp: PositiveInt
    """Width of the feed-forward layers."""
    max_positions: PositiveInt = 4096
    """The longest prompt and answer together, in tokens."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary embedding."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the mean square in the norms."""
    tied_embeddings: bool = True
    """Whether the output layer is the embedding's transpose."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelSettings:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden ({self.hidden}) must be an even multiple of heads ({self.heads})")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self


NAME = "first_weights"


class FirstWeightsSettings(Section):
    """Where the policy's first weights are, if they are neither the model folder's own nor drawn from the seed."""

    path: str = ""
    """A folder in Hugging Face's layout, of the shape of the job's model. With it there is no warm start."""
    source: str = ""
    """What the weights were taken from, in words."""


def source_of(config: Mapping[str, Any]) -> str:
    """What the job's first weights were taken from; "" for its model's own. A job without Gyre's classes may have any
    content there."""
    section = config.get(NAME)
    source = section.get("source") if isinstance(section, Mapping) else None
    return source if isinstance(source, str) else ""
