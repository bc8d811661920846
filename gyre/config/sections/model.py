"""The section `config.model`: the shape of the small decoder, for jobs whose model is not a folder's."""

from __future__ import annotations

from typing import Annotated

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
