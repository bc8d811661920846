"""The types of what REST tells of samples. docs/samples.md says what each field means."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from gyre.api.rest.schemas import Out


class SampleStep(BaseModel):
    step: int
    samples: int
    groups: int
    bytes: int


class SampleSteps(BaseModel):
    """The steps whose samples are kept, oldest first, and how many groups are quarantined."""

    steps: list[SampleStep]
    quarantined: int


class SampleItem(Out):
    """One sample in a list. `prompt`, `answer` and `right_answer`, which is the data's, are cut at 2,000 characters.
    `rollout` is the rollout that it is a row of, null where it is one by itself. `versions` and `instances` are
    `[which, start, end]`: tokens `start` to `end`, the latter exclusive."""

    step: int
    group: int
    sample: int
    rollout: int | None = None
    reward: float | None = None
    more: dict[str, float | None] = Field(default_factory=dict)
    outcome: str
    finish_reason: str = ""
    prompt: str | None = None
    answer: str | None = None
    right_answer: str | None = None
    prompt_tokens: int
    tokens: int
    versions: list[tuple[int, int, int]] = Field(default_factory=list)
    instances: list[tuple[str, int, int]] = Field(default_factory=list)
    quarantined: bool = False


class Histogram(BaseModel):
    """`counts[i]` samples earned from `edges[i]` to `edges[i + 1]`."""

    edges: list[float]
    counts: list[int]


class SamplePage(BaseModel):
    """`total` samples match; `histogram` is of all of them."""

    samples: list[SampleItem]
    total: int
    histogram: Histogram


class SampleTokens(SampleItem):
    """One sample with all that is kept of it: its texts are whole. What has a value for each token is null
    where the job has none. `mask` is true of each token that was drawn, null where all were."""

    prompt_ids: list[int]
    prompt_pieces: list[str] | None = None
    token_ids: list[int]
    pieces: list[str] | None = None
    logprobs: list[float | None] | None = None
    trainer_logprobs: list[float | None] | None = None
    ref_logprobs: list[float | None] | None = None
    values: list[float | None] | None = None
    advantage: float | None = None
    mask: list[bool] | None = None
    meta: dict[str, Any] = Field(default_factory=dict)
    extras: dict[str, Any] = Field(default_factory=dict)


class HeldOutSet(BaseModel):
    set: str
    versions: list[int]


class HeldOutSets(BaseModel):
    """The held-out sets of which answers are kept, and of which versions, oldest first."""

    sets: list[HeldOutSet]


class HeldOutSide(BaseModel):
    """What one version answered to a prompt: `right` of the `count` samples are right, null where that has no meaning;
    `reward` is their mean."""

    count: int
    right: int | None = None
    reward: float | None = None
    samples: list[SampleItem]


class HeldOutPair(BaseModel):
    """A prompt with its answers, those `before` by the version that they are compared with: null where that had no such
    prompt. `difference`: by how much a larger share is right, or, where nothing is right or wrong, by how much more was
    earned."""

    prompt_number: int
    prompt: str | None = None
    right_answer: str | None = None
    changed: bool
    difference: float
    now: HeldOutSide
    before: HeldOutSide | None = None


class HeldOutPage(BaseModel):
    """Of `total` prompts `changed` have another verdict than the version `against` got, `better` of them a better one;
    of `unmatched` ones it had no answer."""

    set: str
    version: int
    against: int | None = None
    total: int
    changed: int
    better: int
    unmatched: int
    prompts: list[HeldOutPair]
