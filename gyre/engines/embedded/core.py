"""The core of the embedded engine: requests, slots, pauses and weight swaps, as a state machine that its caller steps.

Each step runs one flat batch: a token for every running request, and further prompt tokens up to a budget for requests
in prefill, so that a long prompt does not starve the others. Waiting requests are admitted in order. Each gets the keys
and values of the longest prefix that a slot holds from the present weights, so the samples of a group prefill their
prompt once.

Invariants:
- *dense slots*: running requests have slots 0 to n - 1; when one ends, the last one takes its slot at once;
- *room is reserved*: a request runs only when its prompt and all its new tokens fit; none is ever evicted;
- *a swap falls between steps*: a token's version is that of the weights its logits came from; keys and values of
  older weights are never given to another request;
- *a swap waits*: unless paused, weights are swapped when all earlier requests have ended, and later requests start with
  the new ones;
- *one adapter a request*: a request is computed with the adapter that it names, from its first token to its last,
  whatever is loaded or dropped meanwhile; what an adapter left in the cache is given to no other's requests;
- *one ending*: each submitted request gets exactly one update with an ending, its last.

All methods are called by one thread. This module must not know about threads, HTTP or files.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gyre.engines.dialect import EngineLoad, FinishKind, PauseMode
from gyre.engines.embedded.engine_requests import Ending, EngineRequest, RequestUpdate, throw
from gyre.engines.embedded.errors import BadRequest
from gyre.engines.embedded.prefixes import Prefixes
from gyre.engines.embedded.row_moves import RowMoves
from gyre.engines.embedded.served_model import (
    LoadedAdapter,
    ModelWeights,
    PrefillRows,
    Runner,
    ServedModel,
    StepBatch,
)
from gyre.engines.embedded.token_sampling import choose

_ABORTED = Ending(FinishKind.ABORT, message="Aborted")
_WORTH_WAITING_FOR = 8
"""Fewest prompt tokens shared with a request in prefill for which another request waits."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's limits. `max_tokens` counts the prompt and new tokens of all running requests, `prefill_tokens` the
    rows of a step beyond one per request."""

    max_running: int
    max_tokens: int
    context_length: int
    prefill_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Swap:
    """New weights. `done` is called when they are served, with the number of requests that were paused meanwhile."""

    weights: ModelWeights
    version: str | None
    flush: bool
    done: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Held:
    """The tokens whose keys and values a slot without a request still holds."""

    tokens: list[int]
    filled: int
    epoch: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _NamedAdapter:
    """`number` tells it from all others that the engine has had."""

    adapter: LoadedAdapter
    number: int


class EngineCore:
    """`weights` are those that `model` loaded. Raises ModelFolderError for a model that cannot be served."""

    def __init__(
        self,
        model: ServedModel,
        weights: ModelWeights,
        limits: Limits,
        *,
        weight_version: str = "default",
    ) -> None:
        self.limits = limits
        self.weight_version = weight_version
        self.paused = False
        self.runner: Runner = model.runner(
            weights,
            slots=limits.max_running,
            prefill_tokens=limits.prefill_tokens,
            context_length=limits.context_length,
        )
        self._weights = weights
        self._eos = model.eos_token_ids
        self._epoch = 0
        self._adapters: dict[str, _NamedAdapter] = {}
        self._adapters_had = 0
        self._running: list[EngineRequest] = []
        self._held: list[_Held | None] = [None] * limits.max_running
        self._rows = RowMoves(limits.max_running)
        self._waiting: deque[EngineRequest] = deque()
        self._behind_swap: deque[EngineRequest] = deque()
        self._swaps: deque[Swap] = deque()
        self._updates: list[RequestUpdate] = []

    # Requests

    def submit(self, *requests: EngineRequest) -> None:
        """Queue requests, which the caller has checked against the limits. Raises BadRequest, and queues none, where
        one names an adapter that is not there."""
        for request in requests:
            if request.adapter_name:
                named = self._named(request.adapter_name)
                request.adapter, request.epoch = named.adapter, (-1, named.number)
        (self._behind_swap if self._swaps else self._waiting).extend(requests)

    def abort(self, chosen: Callable[[EngineRequest], bool], ending: Ending = _ABORTED) -> None:
        """End the chosen requests, running or waiting, with the tokens that they have."""
        for queue in (self._waiting, self._behind_swap):
            for request in [request for request in queue if chosen(request)]:
                queue.remove(request)
                self._progress(request, ending)
        for slot in reversed(range(len(self._running))):
            if chosen(self._running[slot]):
                self._progress(self._running[slot], ending)
                self._vacate(slot)
        self._rows.apply(self.runner)
        self._swap_if_due()

    def abort_all(self, ending: Ending = _ABORTED) -> None:
        self.abort(lambda _: True, ending)

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping until `resume`. The mode takes effect on requests even if the engine is already paused."""
        self.paused = True
        if mode is PauseMode.ABORT:
            self.abort_all()
        elif mode is PauseMode.RETRACT:
            for slot in reversed(range(len(self._running))):
                request = self._running[slot]
                self._vacate(slot)
                request.filled, request.retractions = 0, request.retractions + 1
                self._waiting.appendleft(request)
            self._rows.apply(self.runner)
        self._swap_if_due()

    def resume(self) -> None:
        self.paused = False

    def swap(self, swap: Swap) -> None:
        """Serve other weights: now if paused or idle, else when all earlier requests have ended. Raises BadRequest if
        the cache is to be flushed while requests that are paused in place need it."""
        if swap.flush and self.paused and self._running:
            raise BadRequest(
                f"flush_cache must be false while {len(self._running)} requests are paused in place: they go on "
                "with the cache that they have.",
                hint="Pause with mode retract, or send flush_cache: false.",
            )
        self._swaps.append(swap)
        self._swap_if_due()

    def flush(self) -> None:
        """Drop the keys and values of slots without a request. Raises BadRequest while requests need the cache."""
        busy = len(self._running) + (0 if self.paused else self.waiting)
        if busy:
            raise BadRequest(
                f"The cache cannot be flushed while {busy} requests need it.",
                hint="Wait for them, abort them, or pause with mode retract.",
            )
        self._held = [None] * self.limits.max_running

    # Adapters

    @property
    def adapters(self) -> list[str]:
        """The names that requests may give."""
        return list(self._adapters)

    def add_adapter(self, name: str, adapter: LoadedAdapter) -> None:
        """Let requests name this adapter from now on. Raises BadRequest where there is one of this name."""
        if name in self._adapters:
            raise BadRequest(
                f"There is an adapter {name!r} already.", hint="Unload it, or take another name."
            )
        self._adapters_had += 1
        self._adapters[name] = _NamedAdapter(adapter, self._adapters_had)

    def drop_adapter(self, name: str) -> None:
        """Let no further request name this adapter; it goes with the last one that does. Raises BadRequest where there
        is none of this name."""
        self._named(name)
        del self._adapters[name]

    def _named(self, name: str) -> _NamedAdapter:
        if name not in self._adapters:
            there = ", ".join(self._adapters) or "none"
            raise BadRequest(f"There is no adapter {name!r} here; there is {there}.", hint="Load it first.")
        return self._adapters[name]

    # State

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._behind_swap)

    @property
    def can_step(self) -> bool:
        return not self.paused and bool(self._running or self._waiting)

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._running),
            waiting=self.waiting,
            used_tokens=sum(request.filled for request in self._running),
            max_tokens=self.limits.max_tokens,
            max_running=self.limits.max_running,
        )

    def take_updates(self) -> list[RequestUpdate]:
        """The updates since the last call."""
        updates, self._updates = self._updates, []
        return updates

    # One step

    def step(self) -> None:
        """One token for each running request whose prompt is in the cache."""
        if self.paused:
            return
        self._admit()
        if not self._running:
            return
        batch, sampled, taken = self._plan()
        logits = self.runner.step(self._weights, batch)
        for request, count in zip(self._running, taken, strict=True):
            request.filled += count
        if not sampled:
            return
        requests = [self._running[slot] for slot in sampled]
        tokens, logprobs = choose(
            logits,
            [request.sampling for request in requests],
            throw(requests),
            self._forbidden(requests),
        )
        version = self.weight_version
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            if math.isfinite(logprob):
                request.append(token, logprob, request.adapter_name or version)
                ending = self._ending(request, token)
            else:
                ending = Ending(
                    FinishKind.ABORT,
                    message=f"The logits after {len(request.tokens)} tokens are not finite: the weights of version "
                    f"{request.adapter_name or version} are broken.",
                    status_code=500,
                )
            self._progress(request, ending)
        for slot in reversed(sampled):
            if self._running[slot].ending is not None:
                self._vacate(slot)
        self._rows.apply(self.runner)
        self._swap_if_due()

    def _admit(self) -> None:
        if not self._waiting or len(self._running) >= self.limits.max_running:
            return
        reserved = sum(request.reserved for request in self._running)
        known: dict[tuple[int, int], Prefixes] = {}
        prompts = 0
        while self._waiting and len(self._running) < self.limits.max_running:
            if self.runner.whole_prompts and prompts >= self.limits.prefill_tokens:
                break
            request = self._waiting[0]
            reserved += request.reserved
            if reserved > self.limits.max_tokens:
                break
            slot = len(self._running)
            epoch = (self._epoch, request.epoch[1])
            if epoch not in known:
                known[epoch] = self._prefixes(epoch)
            prefixes = known[epoch]
            source, shared, soon = (
                prefixes.longest(request.tokens, slot) if self.runner.shares_prefixes else (0, 0, 0)
            )
            if soon - shared >= _WORTH_WAITING_FOR:  # a running request will soon hold a longer prefix
                break
            self._waiting.popleft()
            self._rows.move(source, slot, shared)
            request.filled, request.epoch = shared, epoch
            request.cached = max(request.cached, min(shared, request.prompt_length))
            self._held[slot] = None
            self._running.append(request)
            prompts += len(request.tokens)
            for other in known.values():
                if other is not prefixes:
                    other.drop(slot)
            prefixes.put(slot, request.tokens, shared)
        self._rows.apply(self.runner)

    def _prefixes(self, epoch: tuple[int, int]) -> Prefixes:
        """What the slots hold of these weights and this adapter."""
        holders = enumerate((*self._running, *self._held[len(self._running) :]))
        held = {
            slot: (holder.tokens, holder.filled)
            for slot, holder in holders
            if holder is not None and holder.epoch == epoch
        }
        return Prefixes(self.limits.max_running, held)

    def _plan(self) -> tuple[StepBatch, list[int], list[int]]:
        """The batch, the slots whose next token is drawn, and how many tokens each slot adds to the cache."""
        budget = self.limits.prefill_tokens
        tokens, positions, sampled, taken = [], [], [], []
        more_tokens: list[int] = []
        more_positions: list[int] = []
        prefills = []
        rows = len(self._running)
        for slot, request in enumerate(self._running):
            start = request.filled
            left = len(request.tokens) - start
            count = 1
            if left > 1:
                count += left - 1 if self.runner.whole_prompts else min(left - 1, budget)
                if count > 1:  # the slot's own row takes the last token
                    budget = max(0, budget - (count - 1))
                    first = rows + len(more_tokens)
                    more_tokens += request.tokens[start : start + count - 1]
                    more_positions += range(start, start + count - 1)
                    prefills.append(PrefillRows(slot, first, first + count - 1))
            tokens.append(request.tokens[start + count - 1])
            positions.append(start + count - 1)
            taken.append(count)
            if count == left:
                sampled.append(slot)
        length = self.runner.key_length(max(positions) + 1)
        if length > self.runner.capacity:
            self._grow_cache(length)
        adapters = [request.adapter for request in self._running]
        batch = StepBatch(
            tokens + more_tokens,
            positions + more_positions,
            rows,
            prefills,
            sampled,
            length,
            adapters if any(one is not None for one in adapters) else [],
        )
        return batch, sampled, taken

    def _grow_cache(self, length: int) -> None:
        """Grow the cache, at least to twice its size, because growing copies all slots."""
        doubled = min(2 * self.runner.capacity, self.limits.context_length)
        held = [0 if each is None else each.filled for each in self._held]
        held[: len(self._running)] = [request.filled for request in self._running]
        self.runner.grow(max(length, self.runner.key_length(doubled)), held)
        self._rows.written = held

    def _forbidden(self, requests: list[EngineRequest]) -> list[tuple[int, list[int]]]:
        """Tokens that would stop a request before its `min_new_tokens`."""
        return [
            (row, sorted(self._eos | request.sampling.stop_token_ids))
            for row, request in enumerate(requests)
            if len(request.logprobs) < request.sampling.min_new_tokens
            and (self._eos or request.sampling.stop_token_ids)
        ]

    def _ending(self, request: EngineRequest, token: int) -> Ending | None:
        sampling = request.sampling
        if not sampling.ignore_eos and (token in self._eos or token in sampling.stop_token_ids):
            return Ending(FinishKind.STOP, matched=token)
        if len(request.logprobs) >= sampling.max_new_tokens:
            return Ending(FinishKind.LENGTH)
        return None

    # Endings, slots and swaps

    def _progress(self, request: EngineRequest, ending: Ending | None) -> None:
        """Add an update with a request's new tokens, if one is due."""
        request.ending = ending
        total = len(request.logprobs)
        new = total - request.delivered
        interval = request.stream_interval
        if ending is None and (not interval or (request.delivered and new < interval)):
            return
        logprobs = request.logprobs[request.delivered :]
        tokens = request.tokens[request.prompt_length + request.delivered :]
        request.delivered = total
        self._updates.append(RequestUpdate(request, tokens, logprobs, total, self.weight_version, ending))

    def _vacate(self, slot: int) -> None:
        """Take a request out of its slot; the last request moves there."""
        request, last = self._running[slot], self._running.pop()
        end = len(self._running)
        self._rows.wrote(slot, request.filled)
        if last is request:
            broken = request.ending is not None and request.ending.status_code is not None
            self._held[slot] = None if broken else _Held(request.tokens, request.filled, request.epoch)
            return
        self._rows.wrote(end, last.filled)
        self._rows.move(end, slot, last.filled)
        self._running[slot] = last
        self._held[end] = None

    def _swap_if_due(self) -> None:
        while self._swaps and self._is_due(self._swaps[0]):
            swap = self._swaps.popleft()
            self._weights = swap.weights
            if swap.version is not None:
                self.weight_version = swap.version
            self._epoch += 1
            self._held = [None] * self.limits.max_running
            swap.done(len(self._running) + self.waiting if self.paused else 0)
        if not self._swaps:
            self._waiting.extend(self._behind_swap)
            self._behind_swap.clear()

    def _is_due(self, swap: Swap) -> bool:
        if self.paused:
            return not (swap.flush and self._running)
        return not (self._running or self._waiting)
