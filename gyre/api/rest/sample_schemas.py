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


class Item(Out):
    """One sample in a list. `prompt` and `answer` are cut at 2,000 characters. `versions` and `instances` are
    `[which, start, end]`: tokens `start` to `end`, the latter exclusive."""

    step: int
    group: int
    sample: int
    reward: float | None = None
    more: dict[str, float | None] = Field(default_factory=dict)
    outcome: str
    finish_reason: str = ""
    prompt: str | None = None
    answer: str | None = None
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

    samples: list[Item]
    total: int
    histogram: Histogram


class WholeSample(Item):
    """One sample with all that is kept of it: `prompt` and `answer` are whole. What has a value for each token is null
    where the job has none."""

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
