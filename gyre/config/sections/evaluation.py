"""The section `config.evaluation`: how held-out prompts are answered, and what is computed of their rewards."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from gyre.config.sections.section import Section

PositiveInt = Annotated[int, Field(ge=1)]


class EvaluationSettings(Section):
    """How each held-out prompt is answered, and which answers are right. When it is done, and with how many prompts of
    each set, is `run.evaluate_every` and `run.held_out`."""

    n: PositiveInt = 1
    """Samples of each held-out prompt."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Divides the logits before a token is drawn; 0 takes the likeliest token."""
    max_new_tokens: PositiveInt | None = None
    """The longest answer in tokens; none takes `sampling.max_new_tokens`. A prompt's own limit holds here too."""
    threshold: float | None = None
    """A sample whose reward is at least this is right. Without it there is an accuracy only where every reward of an
    evaluation is 0 or 1."""
    k: list[PositiveInt] = Field(default_factory=list)
    """The sizes for which pass@k and best-of-k are computed, each at most `n`; none takes 1 and `n`."""
    by: str = ""
    """A column of the held-out data, such as `data_source`, by whose values the results are broken down; "" for
    none."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The k of pass@k and best-of-k, ascending."""
        return tuple(sorted(set(self.k or (1, self.n))))

    @model_validator(mode="after")
    def _no_size_is_beyond_the_samples(self) -> EvaluationSettings:
        if self.k and max(self.k) > self.n:
            raise ValueError(f"k has {max(self.k)}, but a prompt has {self.n} samples (n)")
        return self
