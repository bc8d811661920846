"""The types of REST's responses about samples. docs/samples.md says what each field means."""

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


class SampleSession(BaseModel):
    """The session that a sample is a row of: how it ended and why, its `turns` and those of them that are in this row,
    and the seconds in which its agent was waited for and its turns were generated. `turns` and the seconds stand with
    its first row alone, the latter where one rollout manager saw all of it. `sentence` says it all."""

    outcome: str
    reason: str = ""
    turns: int | None = None
    turns_here: int
    tool_s: float | None = None
    engine_s: float | None = None
    sentence: str


class ConversationPart(BaseModel):
    """Tokens `start` to `end` of a row, the latter exclusive: what the policy has `drawn` in a turn, or what was put
    there before it. What was drawn is `trained` unless an earlier row of the rollout has it. `waited_s`: for how long
    the answer before had been there, null where there was none or that is not known."""

    turn: int
    drawn: bool
    trained: bool
    start: int
    end: int
    versions: list[int]
    instances: list[str]
    waited_s: float | None = None
    text: str | None = None


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
    session: SampleSession | None = None


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
    where the job has none. `mask` is true of each token that was drawn, null where all were. `conversation` is
    of a row of a session its turns, in order."""

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
    conversation: list[ConversationPart] = Field(default_factory=list)
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
