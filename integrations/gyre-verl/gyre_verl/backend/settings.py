"""The section `config.verl`: how verl's engine computes.

It must not import verl: a job is checked where there may be none.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from gyre.config.sections.section import Section


class VerlSettings(Section):
    """How verl's engine computes. Names are verl's where it has one."""

    strategy: str = "fsdp2"
    """verl's engine. Only `fsdp2` is taken."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is bfloat16 with float32 master weights on GPUs, and float32 on CPUs."""
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Transformers' implementation of attention. `auto` is `flash_attention_2` on GPUs where it is installed, else
    `sdpa`."""
    use_remove_padding: bool = True
    """The sequences of a pass are packed. Off, they are padded to the longest."""
    pass_tokens: Annotated[int, Field(ge=1)] = 16384
    """Tokens in one forward and backward pass, which is one micro-batch of verl's. A longer sequence is a pass of its
    own."""
    enable_gradient_checkpointing: bool = True
    """Activations of each layer are computed again in the backward pass, as by verl's default."""
    full_determinism: bool = True
    """Kernels that give the same bits each time, so that a replayed step is the step. verl's default is off."""

    @field_validator("strategy")
    @classmethod
    def _fsdp2_alone(cls, value: Any) -> Any:
        if value != "fsdp2":
            raise ValueError(
                f"{value!r} is not taken: verl's workers run under Gyre with the strategy fsdp2 alone"
            )
        return value
