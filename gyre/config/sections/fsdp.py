"""The section `config.fsdp`: how the ranks of an FSDP2 role compute."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gyre.config.sections.section import Section


class FsdpSettings(Section):
    """In what precision FSDP2's ranks compute, and what they keep in memory."""

    KEY: ClassVar[str] = "fsdp"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is `cuda` where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is bfloat16 with float32 master weights on GPUs, and float32 on CPUs."""
    pass_tokens: Literal["auto"] | Annotated[int, Field(ge=1)] = 16384
    """Tokens in one forward and backward pass: sequences are packed up to it. A longer one is a pass of its own. `auto`
    takes the largest that fits the device by what is foretold; `gyre plan` says which."""
    fused_kernels: bool = True
    """On a GPU norms, gated units and rotary positions take one kernel each, where the model's are the usual ones; what
    they say differs from transformers' in last bits. Off, they are transformers' own."""
    prompts_once: bool = True
    """A prompt is computed once for the samples of its group that are in a pass, which attend to it. Off, each sample
    has a copy. So it is for models that do not bear it: `status` of the actor says which."""
    recompute: Literal["auto"] | bool = "auto"
    """Activations of each layer are computed again in the backward pass: less memory for a third more work. `auto`
    keeps them where by what is foretold they fit the device beside all else that is there, as on CPUs; and computes
    them again from the first pass on that did not fit. `gyre plan` says which."""
    memory_checkpoint_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    """The part of the time that training may wait for copies of each rank's state to its machine's memory: 0 makes
    none, 1 keeps every step's. A gang whose rank is killed goes on from there, without the disk and without training
    steps again."""
    whole_gradient: bool = False
    """Each rank sums the gradient of a call's passes whole, and reduces it once: less traffic, for 4 bytes a parameter
    more memory. Off, it is reduced in every pass, and only the rank's share is kept."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = "auto"
    """Transformers' implementation of attention. `auto` is Gyre's, which computes each sequence of a pass by itself,
    for models that let attention be chosen, else `sdpa`, else `eager`."""
    deterministic: bool = True
    """Kernels that give the same bits each time, so that a replayed step is the step. Off, a replay on GPUs differs
    in last bits."""
