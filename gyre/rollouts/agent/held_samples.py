"""A sample that an agent holds: what was assigned, the tokens that the engine generated, and how many were reported.

A token's policy version is counted if the engine's loader says how far each request was when the weights changed
(`changed`). Otherwise the engine says it of each token (`StreamChunk.spans`), with each chunk or with the last. Until
it does, it is the label that the engine puts on a chunk.

Invariants:
- *the engine's word*: a version comes from the engine that made the token, and never from when somebody heard of a
  version. What the last chunk says puts right what was reported of the same request before, whatever manager got it;
- *an old label rather than a new one*: a token that either version may have made, by all that is known, gets the older
  one.

This module must not know about connections or other agents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gyre.engines.dialect import GenerateRequest, SamplingParams, StreamChunk
from gyre.engines.errors import EngineProtocolError
from gyre.rollouts.protocol.columns import lineage
from gyre.rollouts.protocol.fields import check_sampling
from gyre.rollouts.protocol.progress import EndKind


@dataclass(eq=False, slots=True)
class HeldSample:
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
    end: EndKind | Literal[""] = ""
    message: str = ""
    put_right_from: int | None = None
    """The first of its tokens that was reported as another version's than the engine says now."""
    end_seq: int = 0
    """Number of the report that had the sample's end; 0 before it is sent."""
    given_at: float | None = None
    """When the engine got the sample's batch, for one sample of each, until its first token."""
    task: asyncio.Future[None] | None = None
    """Generates the sample; cancelling it gives the sample up."""
    rid: str = ""
    seen: int = -1
    """The version that the engine served at the last chunk, or when the sample was assigned."""
    cancelled: bool = False
    asked_at: int = 0
    """Tokens generated before the engine was asked for the rest."""
    adapter: str = ""
    """The adapter that the engine was asked to generate it with; "" for none."""
    counted: list[tuple[int, int]] | None = None
    """(first token, version) of each counted run of tokens; None if only the engine's labels tell versions."""

    @property
    def start(self) -> int:
        return len(self.prior)

    def asked(self, version: int) -> None:
        """Note that the engine, serving `version`, is asked for the rest of the sample; -1 if nobody counts."""
        self.asked_at = self.made
        self.counted = [(self.made, version)] if version >= 0 else None

    def changed(self, version: int, made: Mapping[str, int] | None) -> None:
        """Note that the engine now serves `version`. `made`: see `EngineLoader.load`."""
        if self.counted is None:
            return
        if made is None:
            self.counted = None
        elif self.rid in made:
            first = self.asked_at + made[self.rid]
            self.counted.append((max(first, self.made, self.counted[-1][0]), version))
        elif self.made == self.asked_at:
            self.counted = None  # the engine does not have the request yet, or has just ended it: labels tell
        # Otherwise the engine had ended the request, and chunks still to come were made before the change.

    def take(self, chunk: StreamChunk, served: int) -> None:
        """Add a chunk, and put right what it says of the tokens before. By labels, the first chunk after a change of
        weights may hold tokens of both versions; it gets the older one."""
        told = chunk.weight_version
        now = int(told) if told is not None and told.isdecimal() else served
        label = now if self.seen < 0 else self.seen if now < 0 else min(now, self.seen)
        self.seen = max(now, self.seen)
        begin, end = self.made, self.made + len(chunk.token_ids)
        said = version_runs(chunk, end - self.asked_at) if self.counted is None else ()
        if begin == end:
            self._correct(said)
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
        self._correct(said)

    def _correct(self, said: tuple[tuple[int, int], ...]) -> None:
        """The engine says this of its request's tokens."""
        before = self.runs
        if not said or (len(said) == len(before) == 1 and said[0] == tuple(before[0])):
            return
        runs: list[list[int]] = []
        for version, count in (*_first(before, self.made - sum(count for _, count in said)), *said):
            if runs and runs[-1][0] == version:
                runs[-1][1] += count
            elif count:
                runs.append([version, count])
        self.runs = runs
        wrong = _differ(before, runs)
        if wrong is not None and wrong < self.sent:
            self.put_right_from = min(
                wrong, self.sent if self.put_right_from is None else self.put_right_from
            )

    @property
    def true_runs(self) -> tuple[tuple[int, int], ...]:
        """(version, tokens) of its last tokens, from the first that was reported as another version's."""
        if self.put_right_from is None:
            return ()
        found, skipped = [], self.put_right_from
        for version, count in self.runs:
            left = count - min(count, skipped)
            skipped -= count - left
            if left:
                found.append((version, left))
        return tuple(found)

    def has(self, known: int, expected: str) -> bool:
        """Whether the lineage of its first `known` tokens is the one that the manager expects."""
        tokens = np.concatenate([self.prior, *self.ids])[:known]
        return lineage(self.prompt, self.seed, tokens) == expected

    def forget(self) -> None:
        self.ids, self.logprobs, self.runs = [], [], []
        self.made = self.sent = 0
        self.put_right_from = None

    def unsent(self) -> tuple[NDArray[np.int32], NDArray[np.float32], int]:
        """The next unsent ids and log-probs that one version made, and that version."""
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
    """The engine's id for a lease. All ids have one length, because engines abort by prefix."""
    return f"{lease:020d}"


def engine_request(held: HeldSample, cache_key: str = "", chunk_tokens: int = 0) -> GenerateRequest:
    """The request for the rest of a sample, after all tokens that it has; `chunk_tokens` as in GenerateRequest. Raises
    FrameError for sampling that an engine cannot be told."""
    check_sampling(held.sampling)
    sampling = dict(held.sampling)
    sampling["max_new_tokens"] -= held.start + held.made
    sampling["stop_token_ids"] = tuple(sampling.get("stop_token_ids") or ())
    return GenerateRequest(
        rid=held.rid,
        input_ids=np.concatenate([held.prompt, held.prior, *held.ids]),
        sampling=SamplingParams(**sampling, sampling_seed=held.seed),
        cache_key=cache_key,
        chunk_tokens=chunk_tokens,
        adapter=held.adapter,
    )


def version_runs(chunk: StreamChunk, made: int) -> tuple[tuple[int, int], ...]:
    """The engine's own account of which version made which of the `made` tokens of its request, as (version, tokens);
    () where it has none, or it does not add up."""
    runs: list[tuple[int, int]] = []
    for span in chunk.spans:
        if not span.version.isdecimal():
            return ()
        runs.append((int(span.version), span.end - span.start))
    return tuple(runs) if sum(count for _, count in runs) == made else ()


def _first(runs: Iterable[Sequence[int]], count: int) -> list[tuple[int, int]]:
    """The runs (version, tokens) of the first `count` tokens."""
    found: list[tuple[int, int]] = []
    for version, tokens in runs:
        some = min(tokens, count)
        if some > 0:
            found.append((version, some))
        count -= some
    return found


def _differ(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int | None:
    """The first token that two lists of runs (version, tokens), of as many tokens, call different versions."""
    one, other = [list(run) for run in some], [list(run) for run in others]
    at = 0
    while one and other:
        if one[0][0] != other[0][0]:
            return at
        step = min(one[0][1], other[0][1])
        at += step
        for runs in (one, other):
            runs[0][1] -= step
            if not runs[0][1]:
                del runs[0]
    return None


def check_versions(chunk: StreamChunk, newest: int) -> None:
    """Raises EngineProtocolError if the engine says that it has a version newer than `newest`, which it was never
    given. The manager would refuse the agent for it."""
    for told in {chunk.weight_version, *(span.version for span in chunk.spans)}:
        if told is not None and told.isdecimal() and (len(told) > 18 or int(told) > newest):
            raise EngineProtocolError(
                f"The engine says that it serves version {told[:40]}, and the newest that it was given is {newest}.",
                hint="What came before stands; let another engine go on from there.",
            )
