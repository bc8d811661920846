"""The section `config.lora`: a small adapter is trained beside a model that stays as it is."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from gyre.config.sections.section import Section

ALL_LINEAR: Final = "all-linear"


class LoraSettings(Section):
    """What the adapter of FSDP2's actor is. To each of the model's linear layers that it names, `x W`, it adds
    `alpha / rank * x A B`, and A and B are all that is trained."""

    rank: Annotated[int, Field(ge=1)]
    """The inner size of A and B."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter's part is multiplied by `alpha / rank`."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = ALL_LINEAR
    """The linear layers, by their names or the ends of these, such as `q_proj`; `all-linear` takes all but the output
    layer."""
    dropout: Literal[0] = 0
    """Nothing is dropped out, so that a replayed step is the step."""
