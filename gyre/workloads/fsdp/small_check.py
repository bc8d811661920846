"""What of this back end is right for a kind of model: tried on a small copy of it, in float32, against transformers.

transformers is asked as anybody asks it: each sequence alone, with its own attention, all logits, and autograd for the
gradient of every parameter. Sequences are longer than whatever begins in the small copy after a number of tokens: its
windows, chunks, sparse choices. So neither length nor rounding hides a difference. Some begin alike, so that what they
share can be computed once.

Invariant *not its own witness*: nothing of `TokenModel` is in what it is compared with.

This module must not know about ranks or files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyre.errors import ConfigError
from gyre.models.errors import NoSmallCopy
from gyre.models.small_model import on_one_thread, small_model, tokens_of
from gyre.workloads.fsdp import packed_attention
from gyre.workloads.fsdp.fused import fusable, fuse
from gyre.workloads.fsdp.token_model import UNPACKED, WAYS, TokenModel, Way
from gyre.workloads.learner.packing import paths_of, positions_of

LENGTHS = (129, 23, 50, 2)
"""Of the first sequences. The first is longer than each number of tokens of a small copy, the last as a dummy pass
is."""
_BRANCHES = ((0, 40, 17), (4, 50, 1))
"""Of the others: which sequence each begins like, for how many tokens, which are more than those of a small copy, and
how many of its own follow."""
_TREE = ((0, 0, 40, -1), (0, 40, 129, 0), (4, 40, 50, 0), (4, 50, 57, 2), (5, 50, 51, 2),
         (1, 0, 23, -1), (2, 0, 50, -1), (3, 0, 2, -1))  # fmt: skip
"""All of them as nodes of a pass: of which sequence, from and to which of its tokens, and the node before."""
_CAUSAL = (5, 7)
"""A sequence and a part of it, below each number of tokens: there nothing but looking ahead tells them apart."""
TOLERANCE = 3e-4
"""Relative differences of log-probs and gradients, far above what float32 rounds and far below a wrong neighbour."""
_AHEAD = 1e-2
"""The same of a part beside the whole sequence: kernels that compute in chunks may round more where they end
elsewhere."""
_SMALL = 1e-3
"""Of the whole gradient's norm: below it, a parameter's own differences are what rounding leaves of larger ones."""


@dataclass(slots=True)
class SmallCheckResult:
    """What is right: the `ways` to pack, the fastest first, with the reasons against the `others`; whether what
    sequences share may be computed once where they attend by `segments`, and else why not (`unshared`); whether hidden
    states may be selected before the output layer (`selects`); and what `fuse` may replace (`fused`). `unreached` are
    parameters that get no gradient in transformers either, and `seldom` those that some sequences give none, by
    `pattern_of`; `untried` is why nothing could be tried, or ""."""

    ways: list[Way] = field(default_factory=list)
    others: dict[str, str] = field(default_factory=dict)
    unshared: str = ""
    selects: bool = False
    fused: frozenset[str] = frozenset()
    unreached: frozenset[str] = frozenset()
    seldom: frozenset[str] = frozenset()
    untried: str = ""


def pattern_of(name: str) -> str:
    """A parameter's name without the numbers of layers and experts."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


def try_small(
    config: Any, *, attention: str, values: bool, device: torch.device, seed: int, fuses: bool = False
) -> SmallCheckResult:
    """Of models of the kind of `config`, transformers' own, with the implementation `attention`. With `fuses` the ways
    are tried with what may be fused. Raises ConfigError for a model that looks ahead: what it says of a token would
    depend on those after it."""
    own = None if attention in ("auto", packed_attention.NAME) else attention
    with _exact():
        try:
            causal = _small(config, own, seed).to(device)
        except NoSmallCopy as error:
            return SmallCheckResult(untried=error.message)
        try:
            check = _Check(causal, values, device, seed)
        except Exception as error:  # a model's own code, or a kernel that knows no float32
            return SmallCheckResult(untried=" ".join(f"{type(error).__name__}: {error}".split()))
        check.refuse_looking_ahead()
        found = SmallCheckResult(unreached=check.unreached, seldom=check.seldom - check.unreached)
        found.selects = not check.problem_with("alone", selects=True)
        if fuses:
            found.fused = check.fused(selects=found.selects)
        for way in WAYS if own is None else WAYS[1:]:
            problem = check.problem_with(way, selects=found.selects)
            if problem:
                found.others[way] = problem
            else:
                found.ways.append(way)
        if "segments" in found.ways:
            found.unshared = check.problem_with("segments", selects=found.selects, tree=True)
    return found


def _small(config: Any, own: str | None, seed: int) -> Any:
    for attention in [own] if own else [None, *UNPACKED]:
        try:
            return small_model(config, attention=attention, seed=seed)
        except NoSmallCopy as error:
            problem = error
    raise problem


@contextmanager
def _exact() -> Iterator[None]:
    """In the block convolutions of CUDA do not round to fewer digits than float32 has."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with on_one_thread():
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


class _Check:
    def __init__(self, causal: Any, values: bool, device: torch.device, seed: int) -> None:
        self._rows = [tokens_of(length, seed + number).to(device) for number, length in enumerate(LENGTHS)]
        for like, shared, own in _BRANCHES:
            new = tokens_of(own, seed + len(self._rows)).to(device)
            self._rows.append(torch.cat([self._rows[like][:shared], new]))
        generator = torch.Generator().manual_seed(seed)
        count = sum(len(row) - 1 for row in self._rows)
        self._weights = [torch.randn(count, generator=generator).to(device) for _ in range(2)]
        self._values = values
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model: Any = TokenModel(causal, values=values).to(device)
        self._model.take("alone")
        self.seldom: frozenset[str] = frozenset()
        self._wanted = self._by_transformers()
        self._wanted_gradients = self._gradients()
        self.unreached = frozenset(pattern_of(name) for name in self._without_gradient())

    def refuse_looking_ahead(self) -> None:
        short, long = _CAUSAL
        base = self._model.base
        with torch.no_grad():
            said = [
                base(input_ids=self._rows[0][None, :length], use_cache=False).last_hidden_state[0, :short]
                for length in (short, long)
            ]
        if not _difference(said[0], said[1]) <= _AHEAD:
            raise ConfigError(
                f"{type(self._model.causal).__name__} of transformers looks ahead: what it says of a token depends on "
                "those after it.",
                hint="Train a causal language model, whose tokens see those before them alone.",
            )

    def fused(self, *, selects: bool) -> frozenset[str]:
        """What is fused from here on: nothing, where the model then says something else."""
        names = fusable(self._model.causal)
        undo = fuse(self._model.causal, names)
        if not self.problem_with("alone", selects=selects):
            return names
        undo()
        return frozenset()

    def problem_with(self, way: Way, *, selects: bool, tree: bool = False) -> str:
        """Why the model does not say what transformers says, or has another gradient; "" where neither is so. With
        `tree` what the sequences share is there once."""
        try:
            self._model.take(way)
            self._model.selects = selects
            self._zero()
            mine = self._by_gyre(alone=way == "alone", tree=tree)
            problem = _compared("log-probs", mine, self._wanted) or self._compared_gradients()
        except (
            Exception
        ) as error:  # a model's own code raises anything where it is given what it does not know
            problem = " ".join(f"{type(error).__name__}: {error}".split())
        finally:
            self._model.take("alone")
        return problem

    def _by_gyre(self, *, alone: bool, tree: bool) -> Tensor:
        each = [(number, 0, len(row), -1) for number, row in enumerate(self._rows)]
        said, entropies = [], []
        for nodes in [[node] for node in each] if alone else [_TREE if tree else each]:
            lengths = [stop - start for _, start, stop, _ in nodes]
            parents = [parent for *_, parent in nodes]
            ends = {
                (number, stop): path
                for (number, _, stop, _), path in zip(nodes, paths_of(lengths, parents), strict=True)
            }
            rows = sorted({number for number, *_ in nodes})
            device = self._rows[0].device
            found = self._model(
                torch.cat([self._rows[number][start:stop] for number, start, stop, _ in nodes]),
                torch.from_numpy(np.concatenate(positions_of(lengths, parents))).to(device),
                torch.from_numpy(
                    np.concatenate([ends[number, len(self._rows[number])][:-1] for number in rows])
                ).to(device),
                torch.cat([self._rows[number][1:] for number in rows]),
                lengths=lengths,
                parents=parents if tree else (),
                entropy_gradient=not self._values,
            )
            said.append(found[0])
            entropies.append(found[1])
        return self._lost(torch.cat(said), torch.cat(entropies))

    def _by_transformers(self) -> Tensor:
        said, entropies = [], []
        for row in self._rows:
            if self._values:
                hidden = self._model.base(input_ids=row[None], use_cache=False).last_hidden_state[0, :-1]
                said.append(self._model.value_head(hidden)[:, 0])
                entropies.append(torch.zeros_like(said[-1]))
            else:
                logits = self._model.causal(input_ids=row[None], use_cache=False).logits[0, :-1]
                logprobs = logits.log_softmax(-1)
                said.append(logprobs.gather(1, row[1:, None])[:, 0])
                entropies.append(-(logprobs.exp() * logprobs).sum(-1))
            self._note_unreached(said[-1])
        return self._lost(torch.cat(said), torch.cat(entropies))

    def _lost(self, said: Tensor, entropies: Tensor) -> Tensor:
        """What was said, after the gradient of a loss over it."""
        both = torch.stack((said, entropies))
        (both * torch.stack(self._weights)).sum().backward()  # type: ignore[no-untyped-call]
        return both.detach()

    def _note_unreached(self, said: Tensor) -> None:
        named = [(name, one) for name, one in self._model.named_parameters() if one.requires_grad]
        found = torch.autograd.grad(
            said.sum(), [one for _, one in named], retain_graph=True, allow_unused=True
        )
        missing = [
            name.removeprefix("causal.") for (name, _), one in zip(named, found, strict=True) if one is None
        ]
        self.seldom |= {pattern_of(name) for name in missing}

    def _zero(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None

    def _gradients(self) -> dict[str, Tensor]:
        named = self._model.named_parameters()
        return {name: one.grad.clone() for name, one in named if one.grad is not None}

    def _without_gradient(self) -> list[str]:
        return [
            name.removeprefix("causal.")
            for name, one in self._model.named_parameters()
            if one.requires_grad and one.grad is None
        ]

    def _compared_gradients(self) -> str:
        mine, wanted = self._gradients(), self._wanted_gradients
        for name in wanted:
            if name not in mine:
                return f"{name} gets no gradient"
        whole = torch.cat([one.flatten() for one in wanted.values()])
        found = torch.cat([mine[name].flatten() for name in wanted])
        if problem := _compared("gradients", found, whole):
            return problem
        for name, one in wanted.items():
            if one.norm() > _SMALL * whole.norm() and (
                problem := _compared(f"gradients of {name}", mine[name], one, 30 * TOLERANCE)
            ):
                return problem
        return ""


def _compared(what: str, mine: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> str:
    difference = _difference(mine, wanted)
    return "" if difference <= tolerance else f"{what} differ by {difference:.2g} of their size"


def _difference(mine: Tensor, wanted: Tensor) -> float:
    """As a part of the size; not a number is as different as can be."""
    return float(torch.nan_to_num((mine - wanted).norm() / wanted.norm(), nan=float("inf")))
