"""A sample as an agent has it: what came with it, what its engine made of it, and how much of that was reported.

Which version made a token is counted where the engine's loader tells how far each request was when the weights changed
(`changed`). Else it is the label that the engine sends a chunk with.

Invariant *an old label rather than a new one*: where neither tells which weights made a token, it is called older.

This module must not know about connections, or who else generates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gyre.engines.dialect import GenerateRequest, SamplingParams, StreamChunk
from gyre.rollouts.protocol.lineage import lineage
from gyre.rollouts.protocol.progress import EndKind

_SAMPLING_KEYS = {entry.name for entry in fields(SamplingParams)}


@dataclass(eq=False, slots=True)
class HeldSample:
    """A sample that this agent has."""

    key: int
    row: int
    lease: int
    prompt: NDArray[np.int32]
    prior: NDArray[np.int32]
    sampling: dict[str, Any]
    seed: int
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)
    """[version, tokens] of what this agent generated."""
    made: int = 0
    sent: int = 0
    lease_began: int = 0
    """Tokens made before the present lease (a reconnect gives a new one)."""
    end: EndKind | Literal[""] = ""
    message: str = ""
    true_runs: tuple[tuple[int, int], ...] = ()
    end_seq: int = 0
    """The report that held its end; 0 while not sent."""
    task: asyncio.Future[None] | None = None
    """Ends with its generation; cancelling it gives the sample up."""
    rid: str = ""
    seen: int = -1
    """The version that the engine served at the last chunk, or when it got the sample."""
    cancelled: bool = False
    asked_at: int = 0
    """Tokens made before the engine was asked for the rest."""
    counted: list[tuple[int, int]] | None = None
    """[token, version]: from that token on they are made by that version. None where the engine's labels must do."""

    @property
    def start(self) -> int:
        return len(self.prior)

    def asked(self, version: int) -> None:
        """The engine is asked for the rest of it while it serves `version`; -1 where nobody counts."""
        self.asked_at = self.made
        self.counted = [(self.made, version)] if version >= 0 else None

    def changed(self, version: int, made: Mapping[str, int] | None) -> None:
        """The engine's weights have become `version`'s. `made` as `EngineLoader.load` tells it."""
        if self.counted is None:
            return
        if made is None:
            self.counted = None
        elif self.rid in made:
            first = self.asked_at + made[self.rid]
            self.counted.append((max(first, self.made, self.counted[-1][0]), version))
        elif self.made == self.asked_at:
            self.counted = None  # the engine does not have it yet, or has just ended it: its labels tell
        # Else the engine had ended it: what is still to come of it was made before.

    def take(self, chunk: StreamChunk, served: int) -> None:
        """By labels, the first chunk after a change of weights may hold tokens of both, and is called the older's."""
        told = chunk.weight_version
        now = int(told) if told is not None and told.isdecimal() else served
        label = now if self.seen < 0 else self.seen if now < 0 else min(now, self.seen)
        self.seen = max(now, self.seen)
        begin, end = self.made, self.made + len(chunk.token_ids)
        if begin == end:
            return
        bounds = [(begin, label)] if self.counted is None else self.counted
        for (first, version), (until, _) in pairwise([*bounds, (end, -1)]):
            count = min(until, end) - max(first, begin)
            if count <= 0:
                continue
            if self.runs and self.runs[-1][0] == version:
                self.runs[-1][1] += count
            else:
                self.runs.append([version, count])
        self.ids.append(chunk.token_ids)
        self.logprobs.append(chunk.logprobs)
        self.made = end

    def has(self, known: int, expected: str) -> bool:
        """Whether its first `known` tokens are those that the manager names by `expected`."""
        tokens = np.concatenate([self.prior, *self.ids])[:known]
        return lineage(self.prompt, self.seed, tokens) == expected

    def forget(self) -> None:
        self.ids, self.logprobs, self.runs = [], [], []
        self.made = self.sent = 0
        self.true_runs = ()

    def unsent(self) -> tuple[NDArray[np.int32], NDArray[np.float32], int]:
        """Ids and log-probs that were not sent, as far as they are of one version, and that version."""
        first, at = self.sent, 0
        version = -1
        end = self.made
        for run_version, count in self.runs:
            if first < at + count:
                version, end = run_version, min(self.made, at + count)
                break
            at += count
        self._join()
        return self.ids[0][first:end], self.logprobs[0][first:end], version

    def _join(self) -> None:
        if len(self.ids) > 1:
            self.ids = [np.concatenate(self.ids)]
            self.logprobs = [np.concatenate(self.logprobs)]


def request_id(lease: int) -> str:
    """Of one length for all: engines abort by prefix."""
    return f"{lease:020d}"


def engine_request(held: HeldSample, cache_key: str = "") -> GenerateRequest:
    """From its last token on, those that this agent made included."""
    sampling = {key: value for key, value in held.sampling.items() if key in _SAMPLING_KEYS}
    sampling["max_new_tokens"] -= held.start + held.made
    sampling["stop_token_ids"] = tuple(sampling.get("stop_token_ids") or ())
    return GenerateRequest(
        rid=held.rid,
        input_ids=np.concatenate([held.prompt, held.prior, *held.ids]),
        sampling=SamplingParams(**sampling, sampling_seed=held.seed),
        cache_key=cache_key,
    )


def version_runs(chunk: StreamChunk, held: HeldSample) -> tuple[tuple[int, int], ...]:
    """The engine's own account of which version made which tokens; () where it does not add up."""
    runs: list[tuple[int, int]] = []
    for span in chunk.spans:
        if not span.version.isdecimal():
            return ()
        runs.append((int(span.version), span.end - span.start))
    return tuple(runs) if sum(count for _, count in runs) == held.made else ()
