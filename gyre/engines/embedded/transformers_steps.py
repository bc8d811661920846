"""Steps of a causal model of transformers over slots, and the check of how this model can be stepped.

- `SlotRunner` computes all slots in one forward: a slot's keys stand at their positions, and masks say who sees which.
  It knows attention in full, sliding and in chunks, and layers that keep a state, whose prompts are read one by one;
- `RowRunner` has a forward and a cache of transformers for each slot, for models whose code knows no such masks or
  caches.

Which one a model can do is not read from its code: `fitting_runner` tries them, on a small copy of the model and on its
own weights, against forwards without a cache, and takes the first that gives the same log-probs.

Invariants:
- *as transformers masks*: masks are those of `transformers.masking_utils`, but with positions for indices, so that rows
  of different lengths share a forward without padding between them;
- *finite*: a slot is zero beyond what it holds, so that what is masked adds zero.

This module must not know about requests or files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from gyre.engines.embedded.adapters import adapted
from gyre.engines.embedded.served_model import PrefillRows, Runner, StepBatch
from gyre.engines.embedded.zero_pages import zero_pages
from gyre.models.errors import ModelFolderError, NoSmallCopy
from gyre.models.small_model import on_one_thread, small_model

_FIRST_CAPACITY = 256
_KEYS_STEP = 16
_CHECKED, _SINGLY = (24, 17), 3
"""Tokens of the two sequences of the check of the model itself: longer than what convolutions of such models look back.
And of those the last ones, which come one at a time."""
_CHECKED_SMALL, _SINGLY_SMALL = (45, 30, 17), 12
"""The same of its small copy: longer than each of its numbers of tokens, which single tokens cross, too."""


# The runner for all slots at once


@dataclass
class _Rows:
    """The rows of one forward. `slots` and `positions` `[rows, tokens]` say where each token's keys go; `seen` are the
    slots whose keys each row attends to, up to `length`. `goes_on`: states are those of earlier tokens."""

    slots: Tensor
    positions: Tensor
    seen: slice | Tensor
    length: int
    goes_on: bool
    _targets: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def targets(self, heads: int, capacity: int) -> Tensor:
        """Where in a cache, seen as a list of heads' keys, each token's go: int64 `[rows * heads * tokens]`."""
        if (heads, capacity) not in self._targets:
            first = self.slots * (heads * capacity) + self.positions
            steps = torch.arange(heads)[:, None] * capacity
            self._targets[heads, capacity] = (first[:, None] + steps).view(-1)
        return self._targets[heads, capacity]

    def of(self, whole: Tensor) -> Tensor:
        """What the rows see of `whole`, `[slots + 1, heads, capacity, d]`: a view where slots are neighbours."""
        part = whole[:, :, : self.length]
        return part[self.seen] if isinstance(self.seen, slice) else part.index_select(0, self.seen)


class _Room:
    """What all layers have in common: the number of slots, their capacity, and the rows of the present forward."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self.rows: _Rows


class _SlotLayer(Protocol):
    def see(self, rows: _Rows) -> None: ...
    def grow(self, held: Sequence[int]) -> None: ...
    def rearrange(self, to: Tensor, come_from: Tensor, kept: Tensor, end: int) -> None: ...


class _KeyLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values `[slots + 1, heads, capacity, d]`; the last slot takes padding."""

    keys: Any
    values: Any

    def __init__(self, room: _Room) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room = room

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (self._zeros(key_states), self._zeros(value_states))
        self.is_initialized = True

    def _zeros(self, like: Tensor) -> Tensor:
        room = self.room
        return zero_pages((room.slots + 1, like.shape[1], room.capacity, like.shape[3]), like.dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = self.room.rows
        targets = rows.targets(key_states.shape[1], self.room.capacity)
        for whole, new in ((self.keys, key_states), (self.values, value_states)):
            width = new.shape[3]
            whole.view(-1, width).index_copy_(0, targets, new.reshape(-1, width))
        return rows.of(self.keys), rows.of(self.values)

    def get_seq_length(self) -> int:
        return self.room.rows.length - self.room.rows.positions.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.room.rows.length, 0

    def get_max_length(self) -> int:
        return self.room.capacity

    def see(self, rows: _Rows) -> None:
        """Rows are looked up when keys come."""

    def grow(self, held: Sequence[int]) -> None:
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._zeros(old)
            for slot, length in enumerate(held):
                new[slot, :, :length] = old[slot, :, :length]
            setattr(self, name, new)

    def rearrange(self, to: Tensor, come_from: Tensor, kept: Tensor, end: int) -> None:
        if not self.is_initialized:
            return
        keeps = (torch.arange(end) < kept[:, None])[:, None, :, None]
        for tensor in (self.keys, self.values):
            part = tensor[:, :, :end]
            part[to] = torch.where(keeps, part[come_from], 0.0)  # not a product: what is dropped may be NaN


class _StateLayer(LinearAttentionLayer):
    """States `[slots + 1, ...]` of a layer that keeps one for each sequence, whatever its length."""

    dtype: Any
    device: Any

    def __init__(self, room: _Room, number_of_states: int) -> None:
        super().__init__(number_of_states=number_of_states)
        self.room = room
        self._whole: dict[tuple[str, int], Tensor] = {}

    def lazy_initialization(
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        if conv_states is not None:
            self.dtype, self.device = conv_states.dtype, conv_states.device
            kernel = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self.conv_kernel_size[state_idx] = kernel
            self._made("conv", state_idx, (*conv_states.shape[1:-1], kernel), conv_states.dtype)
            self.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            self._made("recurrent", state_idx, recurrent_states.shape[1:], recurrent_states.dtype)
            self.is_recurrent_states_initialized[state_idx] = True

    def _made(self, kind: str, index: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        whole = self._whole[kind, index] = zero_pages((self.room.slots + 1, *shape), dtype)
        self._states(kind)[index] = whole[self.room.rows.seen]

    def _states(self, kind: str) -> dict[int, Tensor | None]:
        found: dict[int, Tensor | None] = self.conv_states if kind == "conv" else self.recurrent_states
        return found

    def see(self, rows: _Rows) -> None:
        for (kind, index), whole in self._whole.items():
            self._states(kind)[index] = whole[rows.seen]  # a view, which transformers writes to
        self.has_previous_state = dict.fromkeys(self.has_previous_state, rows.goes_on)

    def grow(self, held: Sequence[int]) -> None:
        """States do not grow; those of slots that hold nothing go."""
        gone = [slot for slot, length in enumerate(held) if not length]
        for whole in self._whole.values():
            whole[gone] = 0.0

    def rearrange(self, to: Tensor, come_from: Tensor, kept: Tensor, end: int) -> None:
        for whole in self._whole.values():
            keeps = (kept > 0).view(-1, *([1] * (whole.dim() - 1)))
            whole[to] = torch.where(keeps, whole[come_from], 0.0)


class _BothLayer(_StateLayer, _KeyLayer):  # type: ignore[no-untyped-call]
    """Keys and a state side by side."""

    is_croppable = False

    def __init__(self, room: _Room, number_of_states: int) -> None:
        _KeyLayer.__init__(self, room)
        _StateLayer.__init__(self, room, number_of_states)
        self.keys = self.values = None

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if args:  # keys and values come by position
            _KeyLayer.lazy_initialization(self, *args)
        else:
            _StateLayer.lazy_initialization(self, **kwargs)

    def grow(self, held: Sequence[int]) -> None:
        _KeyLayer.grow(self, held)
        _StateLayer.grow(self, held)

    def rearrange(self, to: Tensor, come_from: Tensor, kept: Tensor, end: int) -> None:
        _KeyLayer.rearrange(self, to, come_from, kept, end)
        _StateLayer.rearrange(self, to, come_from, kept, end)


class _CannotStep(Exception):
    """A runner does not know a layer of the model. Never leaves this module."""


def _layer(like: Any, room: _Room) -> Any:
    """The slots' layer for one that transformers would make."""
    if type(like) in (DynamicLayer, DynamicSlidingWindowLayer):
        return _KeyLayer(room)
    if type(like) is LinearAttentionLayer:
        return _StateLayer(room, like.number_of_states)
    if type(like) is LinearAttentionAndFullAttentionLayer:
        return _BothLayer(room, like.number_of_states)
    if type(like) is DummyLayer:
        return like
    raise _CannotStep(f"a layer's cache is a {type(like).__name__}")


class SlotRunner:
    """Raises _CannotStep for a model with layers that it does not know."""

    invariant = False

    def __init__(self, causal: Any, slots: int, context_length: int, *, whole_prompts: bool) -> None:
        self.whole_prompts = whole_prompts
        self._room = _Room(slots, self.key_length(min(_FIRST_CAPACITY, context_length)))
        self._cache = Cache(
            layers=[_layer(one, self._room) for one in DynamicCache(config=causal.config).layers]
        )
        self._layers: list[_SlotLayer] = [
            one for one in self._cache.layers if isinstance(one, _KeyLayer | _StateLayer)
        ]
        self._has_states = any(isinstance(one, _StateLayer) for one in self._layers)
        self._cache_name = _cache_name(causal)
        self._masks = _Masks(causal.config, next(causal.parameters()).dtype)
        self._run(  # one token of no slot, so that every layer knows its shapes
            causal.base_model,
            torch.zeros(1, 1, dtype=torch.int64),
            _Rows(
                torch.full((1, 1), slots),
                torch.zeros(1, 1, dtype=torch.int64),
                slice(slots, slots + 1),
                self.key_length(1),
                goes_on=False,
            ),
        )

    @property
    def shares_prefixes(self) -> bool:
        return not self._has_states

    @property
    def capacity(self) -> int:
        return self._room.capacity

    def key_length(self, longest: int) -> int:
        return -(-longest // _KEYS_STEP) * _KEYS_STEP

    def grow(self, capacity: int, held: Sequence[int]) -> None:
        self._room.capacity = capacity
        for layer in self._layers:
            layer.grow(held)

    def rearrange(self, targets: list[int], sources: list[int], kept: list[int], end: int) -> None:
        to, come_from, keeps = torch.tensor(targets), torch.tensor(sources), torch.tensor(kept)
        for layer in self._layers:
            layer.rearrange(to, come_from, keeps, end)

    def step(self, weights: Any, batch: StepBatch) -> Tensor:
        tokens, positions = torch.tensor(batch.tokens), torch.tensor(batch.positions)
        found: list[tuple[Tensor, Tensor]] = []
        for adapter, slots in batch.by_adapter():
            with adapted(weights, adapter):
                own = set(slots)
                for parts in self._together([part for part in batch.prefills if part.slot in own]):
                    self._prefill(weights.base_model, parts, tokens, positions)
                for some in self._forwards(slots):
                    at = torch.tensor(some)
                    rows = _Rows(
                        at[:, None], positions[at, None], _seen(some), batch.key_length, goes_on=True
                    )
                    if batch.sampled:
                        logits = self._run(weights, tokens[at, None], rows).logits[:, -1]
                        found.append((at, logits))
                    else:
                        self._run(weights.base_model, tokens[at, None], rows)
        return _rows_of(found, batch) if found else torch.empty(0)

    def _forwards(self, slots: list[int]) -> list[list[int]]:
        """Slots that share a forward. A state is written to as a view, which only neighbours have."""
        if not self._has_states:
            return [slots]
        found = [[slots[0]]]
        for slot in slots[1:]:
            if slot == found[-1][-1] + 1:
                found[-1].append(slot)
            else:
                found.append([slot])
        return found

    def _together(self, prefills: list[PrefillRows]) -> list[list[PrefillRows]]:
        """Prompts that share a forward. No more than half of a row is padding. A state takes no padding."""
        found: list[list[PrefillRows]] = []
        for part in sorted(prefills, key=_size, reverse=True):
            if found and not self._has_states and 2 * _size(part) >= _size(found[-1][0]):
                found[-1].append(part)
            else:
                found.append([part])
        return found

    def _prefill(self, base: Any, parts: list[PrefillRows], tokens: Tensor, positions: Tensor) -> None:
        shape = (len(parts), _size(parts[0]))
        slots = torch.full(shape, self._room.slots)
        given, where = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        for row, part in enumerate(parts):
            slots[row, : _size(part)] = part.slot
            given[row, : _size(part)] = tokens[part.start : part.end]
            where[row, : _size(part)] = positions[part.start : part.end]
        alone = parts[0].slot
        seen = slice(alone, alone + 1) if len(parts) == 1 else torch.tensor([part.slot for part in parts])
        goes_on = bool(where[0, 0] > 0)
        self._run(base, given, _Rows(slots, where, seen, self.key_length(int(where.max()) + 1), goes_on))

    def _run(self, module: Any, tokens: Tensor, rows: _Rows) -> Any:
        self._room.rows = rows
        for layer in self._layers:
            layer.see(rows)
        return module(
            input_ids=tokens,
            position_ids=rows.positions,
            attention_mask=self._masks.of(rows),
            use_cache=True,
            **{self._cache_name: self._cache},
        )


def _cache_name(causal: nn.Module) -> str:
    """The argument by which the model takes its cache: another one where layers keep nothing but states."""
    return "cache_params" if "cache_params" in signature(causal.forward).parameters else "past_key_values"


def _seen(slots: list[int]) -> slice | Tensor:
    """What rows of these slots, which ascend, see of a cache: a view where the slots are neighbours."""
    first, last = slots[0], slots[-1]
    return slice(first, last + 1) if last - first + 1 == len(slots) else torch.tensor(slots)


def _rows_of(found: list[tuple[Tensor, Tensor]], batch: StepBatch) -> Tensor:
    """The logits of the sampled rows, from those of slots; float32 `[sampled, vocab]`."""
    (slots, logits), *others = found
    if others:
        slots, logits = (torch.cat(parts) for parts in zip(*found, strict=True))
        logits = logits.index_select(0, slots.argsort())
    if len(batch.sampled) < batch.slots:
        logits = logits.index_select(0, torch.tensor(batch.sampled))
    return logits.float()


def _size(part: PrefillRows) -> int:
    return part.end - part.start


class _Masks:
    """The masks of a model's layers, as `transformers.masking_utils.create_masks_for_generate` chooses them. Raises
    _CannotStep for layers whose masks are not known here."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        text = config.get_text_config()
        self._window: int | None = getattr(text, "sliding_window", None)
        self._chunk: int | None = getattr(text, "attention_chunk_size", None)
        self._adds = text._attn_implementation != "sdpa"
        self._dtype = dtype
        kinds = getattr(text, "layer_types", None)
        self._by_type = kinds is not None
        if kinds is not None:
            self._kinds = {one for kind in kinds for one in _MASKS_OF.get(kind, (kind,))}
        else:
            self._kinds = {
                "sliding_attention"
                if self._window
                else "chunked_attention"
                if self._chunk
                else "full_attention"
            }
        if unknown := sorted(self._kinds - {*_ATTENDING, *_STATEFUL}):
            raise _CannotStep(f"a layer is of the type {unknown[0]}")

    def of(self, rows: _Rows) -> Any:
        """A mask `[rows, 1, tokens, keys]`, or one for each type of layer: true where a token sees a key, or what is
        added to scores."""
        keys, at = torch.arange(rows.length), rows.positions[:, :, None]
        causal = keys <= at
        found: dict[str, Tensor | None] = {}
        for kind in self._kinds:
            if kind in _STATEFUL:
                found[kind] = None
                continue
            sees = causal
            if kind == "sliding_attention" and self._window:
                sees = causal & (keys > at - self._window)
            elif kind == "chunked_attention" and self._chunk:
                sees = causal & (keys // self._chunk == at // self._chunk)
            found[kind] = self._shaped(sees[:, None])
        if not any(kind in _ATTENDING for kind in found):
            return None
        return found if self._by_type else next(iter(found.values()))

    def _shaped(self, sees: Tensor) -> Tensor:
        if not self._adds:
            return sees
        return torch.zeros(sees.shape, dtype=self._dtype).masked_fill_(~sees, torch.finfo(self._dtype).min)


_ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")
_STATEFUL = ("linear_attention", "conv")
_MASKS_OF = {"hybrid": ("full_attention", "linear_attention"), "moe": (), "mlp": ()}
"""The masks of layers that need other ones than their own type's."""


# The runner for one slot after another


class RowRunner:
    """A cache of transformers for each slot."""

    invariant = False
    shares_prefixes = False
    whole_prompts = True
    capacity = 1 << 62

    def __init__(self, causal: Any, slots: int) -> None:
        self._cache_name = _cache_name(causal)
        self._caches: list[Cache | None] = [None] * slots

    def key_length(self, longest: int) -> int:
        return longest

    def grow(self, capacity: int, held: Sequence[int]) -> None:
        """Each cache grows by itself."""

    def rearrange(self, targets: list[int], sources: list[int], kept: list[int], end: int) -> None:
        before = list(self._caches)
        for target, source, keep in zip(targets, sources, kept, strict=True):
            self._caches[target] = before[source] if keep else None

    def step(self, weights: Any, batch: StepBatch) -> Tensor:
        adapters = batch.adapters or [None] * batch.slots
        for part in batch.prefills:
            first = batch.positions[part.start]
            with adapted(weights, adapters[part.slot]):
                self._run(weights, part.slot, batch.tokens[part.start : part.end], first)
        logits = []
        for slot in range(batch.slots):
            with adapted(weights, adapters[slot]):
                logits.append(self._run(weights, slot, [batch.tokens[slot]], batch.positions[slot]))
        return (
            torch.stack([logits[row] for row in batch.sampled]).float() if batch.sampled else torch.empty(0)
        )

    def _run(self, causal: Any, slot: int, tokens: list[int], first: int) -> Tensor:
        """The logits after the last of the tokens, `[vocab]`; `first` is the position of the first one."""
        cache = self._caches[slot] if first else None
        if cache is None:
            cache = DynamicCache(config=causal.config)
        end = first + len(tokens)
        said = causal(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.arange(first, end)[None],
            attention_mask=torch.ones(1, end, dtype=torch.int64),
            use_cache=True,
            **{self._cache_name: cache},
        )
        self._caches[slot] = cache
        logits: Tensor = said.logits[0, -1]
        return logits


# Which one a model can do


def fitting_runner(causal: Any, *, slots: int, context_length: int) -> tuple[Runner, str]:
    """The fastest runner that gives the model's own log-probs, and in a sentence which one it is. Raises
    ModelFolderError where none does.

    It is asked of a small copy of the model in float32, whose sequences are longer than each of its windows and chunks,
    and then of the model itself, on its own weights."""
    choices: list[tuple[str, _Make]] = [
        (
            "all samples share a forward",
            lambda model, count: SlotRunner(model, count, context_length, whole_prompts=False),
        ),
        (
            "all samples share a forward, and a prompt is read whole",
            lambda model, count: SlotRunner(model, count, context_length, whole_prompts=True),
        ),
        ("each sample has a forward of its own", RowRunner),
    ]
    check = _Check(causal, _CHECKED, singly=_SINGLY)
    with on_one_thread():
        small = _Check(_small(causal), _CHECKED_SMALL, singly=_SINGLY_SMALL)
    problem = ""
    for said, make in choices:
        with on_one_thread():
            problem = small.problem_with(make)
        problem = problem or check.problem_with(make)
        if not problem:
            runner: Runner = make(causal, slots)
            return runner, said
    raise _not_served(
        causal, f"with its cache it does not give the log-probs that it gives without one ({problem})"
    )


def _small(causal: Any) -> Any:
    try:
        return small_model(causal.config, attention=causal.config._attn_implementation)
    except NoSmallCopy as error:
        raise _not_served(causal, f"it cannot be tried at a small size ({error.message})") from error


def _not_served(causal: Any, why: str) -> ModelFolderError:
    return ModelFolderError(
        f"{type(causal).__name__} of transformers cannot be served: {why}.", hint="Serve it with SGLang."
    )


_Make = Callable[[Any, int], Runner]
"""A runner of a model for a number of slots."""


class _Check:
    """Drawn sequences of these lengths by plain forwards, to compare runners with. Raises ModelFolderError where
    weights are broken."""

    def __init__(self, causal: Any, lengths: Sequence[int], *, singly: int) -> None:
        self._causal = causal
        self._singly = singly
        generator = torch.Generator().manual_seed(0)
        vocab = int(causal.config.get_text_config().vocab_size)
        self._sequences = [
            torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths
        ]
        with torch.no_grad():
            self._expected = [
                _spread(causal(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -singly:].float())
                for tokens in self._sequences
            ]
        if not all(bool(each.isfinite().all()) for each in self._expected):
            raise ModelFolderError(
                f"{type(causal).__name__} gives logits that are not finite: its weights are broken."
            )
        self._tolerance = float(torch.finfo(next(causal.parameters()).dtype).eps) ** 0.5
        """A relative difference: half of the digits."""

    def problem_with(self, make: _Make) -> str:
        """Why a runner cannot step the model; "" where it can."""
        try:
            with torch.no_grad():
                found = self._stepped(make(self._causal, len(self._sequences)))
        except (
            Exception
        ) as error:  # a model's own code raises anything where it is given what it does not know
            return " ".join(f"{type(error).__name__}: {error}".split())
        for mine, wanted in zip(found, self._expected, strict=True):
            difference = float(torch.nan_to_num((mine - wanted).norm() / wanted.norm(), nan=float("inf")))
            if difference > self._tolerance:
                return f"log-probs differ by {difference:.2g} of their spread"
        return ""

    def _stepped(self, runner: Runner) -> list[Tensor]:
        """The same by steps: prompts in two parts or whole, then token by token."""
        ends = [len(tokens) - self._singly for tokens in self._sequences]
        cuts = [ends] if runner.whole_prompts else [[end // 2 + 1 for end in ends], ends]
        starts = [0] * len(ends)
        for upto in cuts:
            runner.step(self._causal, self._batch(runner, starts, upto, sampled=False))
            starts = upto
        rows = []
        for _ in range(self._singly):
            after = [start + 1 for start in starts]
            rows.append(runner.step(self._causal, self._batch(runner, starts, after, sampled=True)))
            starts = after
        return list(_spread(torch.stack(rows, dim=1)))

    def _batch(self, runner: Runner, starts: list[int], ends: list[int], *, sampled: bool) -> StepBatch:
        tokens = [each[end - 1] for each, end in zip(self._sequences, ends, strict=True)]
        positions = [end - 1 for end in ends]
        prefills = []
        for slot, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end - 1 > start:
                prefills.append(PrefillRows(slot, len(tokens), len(tokens) + end - 1 - start))
                tokens += self._sequences[slot][start : end - 1]
                positions += range(start, end - 1)
        return StepBatch(
            tokens=tokens,
            positions=positions,
            slots=len(starts),
            prefills=prefills,
            sampled=list(range(len(starts))) if sampled else [],
            key_length=runner.key_length(max(ends)),
        )


def _spread(logits: Tensor) -> Tensor:
    """Log-probs without what all tokens have in common."""
    return logits - logits.mean(dim=-1, keepdim=True)
