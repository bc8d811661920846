"""The section `config.megatron`: how Megatron's ranks share the model that is trained."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from gyre.config.sections.section import Section

PositiveInt = Annotated[int, Field(ge=1)]


class MegatronSettings(Section):
    """How the actor's ranks share the model, and in what precision they compute."""

    KEY: ClassVar[str] = "megatron"
    model_path: str = ""
    """Another name of `config.model_path`, which is the one that code reads."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share each layer."""
    pipeline_parallel: PositiveInt = 1
    """Ranks that share the stack of layers. What the product of the two leaves over of the ranks is data parallel."""
    sequence_parallel: bool = False
    """Norms are sharded over the tensor-parallel ranks too: less memory for activations."""
    distributed_optimizer: bool = True
    """The optimizer's states are sharded over the data-parallel ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is `cuda` where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is bfloat16 with float32 master weights on GPUs, and float32 on CPUs."""
    pass_tokens: Literal["auto"] | PositiveInt = 16384
    """Tokens in one forward and backward pass: sequences are packed up to it. A longer one is a pass of its own. `auto`
    takes the largest that fits the device by what is foretold; `gyre plan` says which."""
    prompts_once: bool = True
    """A prompt is computed once for the samples of its group that are in a pass, which attend to it. Off, each sample
    has a copy."""
    recompute: Literal["auto"] | bool = False
    """Activations of each layer are computed again in the backward pass: less memory for a third more work. `auto`
    keeps them where by what is foretold they fit the device beside all else that is there, as on CPUs; and computes
    them again from the first pass on that did not fit. `gyre plan` says which."""
    memory_checkpoint_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    """The part of the time that training may wait for copies of each rank's state to its machine's memory: 0 makes
    none, 1 keeps every step's. A gang whose rank is killed goes on from there, without the disk and without training
    steps again."""
    deterministic: bool = True
    """Kernels that give the same bits each time, so that a replayed step is the step. Off, a replay on GPUs differs
    in last bits."""

    @model_validator(mode="after")
    def _sequences_are_split_by_tensors(self) -> MegatronSettings:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel needs a tensor_parallel above 1")
        return self
