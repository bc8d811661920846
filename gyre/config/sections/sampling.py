"""The sections `config.sampling` and `config.evaluation`: how answers are drawn, in training and to held-out prompts,
and what is computed of the latter's rewards."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

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
    of its own, as `max_new_tokens` in its `meta`. Where the job does not give it, a smaller context has a smaller one:
    half of it, or what the prompts of the arithmetic task leave."""
    max_rows: PositiveInt = 1024
    """Rows that `TorchRollout` decodes at once. The engines of the rollout plane have `rollouts.max_running`."""


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
    """A sample whose reward is at least this is right. Without it there is an accuracy only where the reward is Gyre's
    own of right and wrong (`ExactMatchReward`, `exact_match`, `math_verify`), for which it is 1, or where the reward
    function returns `acc`."""
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
