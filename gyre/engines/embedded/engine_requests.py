"""A request as the engine's core holds it, and what the core says about it.

This module must not know about torch or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre.engines.dialect import FinishKind, VersionSpan
from gyre.engines.embedded.token_sampling import Sampling, dice

_DICE_AT_ONCE = 32
"""Thrown ahead for a request: enough that a step seldom throws, few enough that a short one wastes little."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended. `matched`: the token of a `stop`. `status_code`: set where the engine failed."""

    kind: FinishKind
    message: str = ""
    matched: int | None = None
    status_code: int | None = None


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """Progress of one request: tokens that no earlier update held, with their log-probs.

    `total`: all tokens of the request so far. `weight_version` is what the engine serves now.
    """

    request: EngineRequest
    tokens: list[int]
    logprobs: list[float]
    total: int
    weight_version: str
    ending: Ending | None


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sample's next tokens, from arrival to ending. The core's thread alone changes it.

    `tokens`: the prompt and what was generated since. `filled`: how many of them have keys and values in the cache.
    `epoch`: which weights and adapter those were made with. `adapter_name` is "" for the model alone.
    `stream_interval`: tokens in an update; 0 for one update at the end."""

    rid: str
    tokens: list[int]
    sampling: Sampling
    seed: int
    stream_interval: int
    deliver: Callable[[RequestUpdate], None]
    prompt_length: int = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    filled: int = 0
    epoch: tuple[int, int] = (-1, 0)
    adapter_name: str = ""
    adapter: Any = None
    cached: int = 0
    delivered: int = 0
    retractions: int = 0
    ending: Ending | None = None
    created_s: float = field(default_factory=time.monotonic)
    _versions: list[tuple[str, int]] = field(default_factory=list)
    _dice: list[float] = field(default_factory=list)
    _dice_start: int = 0

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def reserved(self) -> int:
        """The tokens that it may come to hold in the cache."""
        return self.prompt_length + self.sampling.max_new_tokens

    @property
    def has_die(self) -> bool:
        return 0 <= len(self.tokens) - self._dice_start < len(self._dice)

    def take_dice(self, numbers: list[float]) -> None:
        """The numbers that decide its next tokens."""
        self._dice_start, self._dice = len(self.tokens), numbers

    @property
    def die(self) -> float:
        """The number in [0, 1) that decides its next token. Raises IndexError where it has none."""
        return self._dice[len(self.tokens) - self._dice_start]

    def append(self, token: int, logprob: float, version: str) -> None:
        """One more token, drawn from weights of `version`."""
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, len(self.logprobs)))
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def spans(self, total: int | None = None) -> list[VersionSpan]:
        """Which version each of the first `total` tokens was drawn from; None for all."""
        until = len(self.logprobs) if total is None else total
        if len(self._versions) == 1 and until:
            return [VersionSpan(self._versions[0][0], 0, until)]
        ends = [start for _, start in self._versions[1:]] + [until]
        return [
            VersionSpan(version, start, min(end, until))
            for (version, start), end in zip(self._versions, ends, strict=False)
            if start < until
        ]


def throw(requests: Sequence[EngineRequest]) -> list[float]:
    """The number in [0, 1) that decides the next token of each request; for greedy ones 0."""
    drawn = [request for request in requests if request.sampling.temperature]
    empty = [request for request in drawn if not request.has_die]
    if empty:
        most = max(request.reserved - len(request.tokens) for request in empty)
        thrown = dice(
            [request.seed for request in empty],
            [len(request.tokens) for request in empty],
            max(1, min(most, _DICE_AT_ONCE)),
        )
        for request, numbers in zip(empty, thrown, strict=True):
            request.take_dice(numbers)
    return [request.die if request.sampling.temperature else 0.0 for request in requests]
