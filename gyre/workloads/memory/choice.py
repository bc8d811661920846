"""What a learner does with its device's memory: how large its passes are, and whether activations are kept until their
gradient or computed again.

Computing them again is a third more work; a smaller pass costs next to nothing while it keeps the device busy. So the
order is: as large as the job says, or as is of use, with activations kept; else computed again. Smaller than the job
says is no pass before one did not fit (`gyre.workloads.trainer.learning.pass_sizes`), and then activations are computed
again first (`smaller`).

Invariants:
- *one rule*: `gyre plan` and a learner ask the same function, so that the plan tells what ranks on such a device do;
- *known or said*: where it is not known what a rank or its neighbours take, activations are computed again;
- *of its arguments alone*: ranks that start again on a device of the same size come to the same.

This module must not import torch, nor know where a device's size comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gyre.workloads.memory.passes import (
    GIB,
    LEAST,
    MARGIN,
    free_bytes,
    largest_pass,
    need,
    tokens_of,
)
from gyre.workloads.memory.rank import PassSize, RankMemory

ENOUGH = 4096
"""Tokens of a pass that is large enough to keep activations for, where `pass_tokens` is `auto` too. At 4B on two H200s
one of 8,192 computes for 412 ms and communicates for 164 ms beside that, so that half of one still computes for longer
than it communicates, where computing activations again takes 1.27 of the time (`bench/results/speed.md`)."""


@dataclass(frozen=True, slots=True)
class PassSettings:
    """`pass_tokens` and `recompute` as the job has them."""

    tokens: int | Literal["auto"]
    recompute: bool | Literal["auto"]

    @property
    def is_auto(self) -> bool:
        return "auto" in (self.tokens, self.recompute)


@dataclass(frozen=True, slots=True)
class PassChoice:
    """`tokens` of a pass, and whether its activations are computed again. Both reasons are words, "" where the job
    itself says so. `kept` and `again` are the bytes of a device that are foretold with either, neighbours' included;
    None where that is not known. `keeps_up_to`: the largest pass whose activations would be kept, 0 if none would."""

    tokens: int
    recompute: bool
    why_tokens: str = ""
    why: str = ""
    kept: int | None = None
    again: int | None = None
    keeps_up_to: int = 0
    by_another: bool = False
    """Whether another rank's device is what it was chosen by, because that has less memory."""

    @property
    def may_change(self) -> bool:
        """Whether the job leaves it open, and activations that are kept may be computed again later."""
        return bool(self.why) and not self.recompute

    @property
    def said(self) -> str:
        """In words what was chosen; "" where the job leaves nothing open."""
        words = []
        if self.why_tokens:
            words.append(f"passes of {self.tokens} tokens: {self.why_tokens}")
        if self.why:
            words.append(f"activations are {'computed again' if self.recompute else 'kept'}: {self.why}")
        if words and self.by_another:
            words.append("so it is for another rank's device, which has less memory than this one's")
        return "; ".join(words)


def choose(
    asked: PassSettings,
    ranks: Sequence[RankMemory] | None,
    device_bytes: int | None,
    *,
    longest: int,
    several: bool,
    beside: Mapping[str, int | None] | None = None,
) -> PassChoice:
    """Of a gang whose differing `ranks` these are, None where the model's shape is not known here; sequences have up to
    `longest` tokens, and `several` says that the gang has more than one rank. `device_bytes` is the memory of the
    smallest device, None where there is no GPU; `beside` what others have on each, by role, None where that is not
    known."""
    others = beside or {}
    unknown = [role for role, size in others.items() if size is None]
    taken = sum(size or 0 for size in others.values())
    on = asked.recompute if asked.recompute != "auto" else device_bytes is not None
    if device_bytes is None or ranks is None or unknown:
        return _unjudged(asked, on, device_bytes, unknown)
    kept, again = (_computing(ranks, again=value) for value in (False, True))
    room = free_bytes(device_bytes, taken)
    most = largest_pass(kept, room, longest=longest, several=several)
    if asked.recompute == "auto":
        wanted = ENOUGH if asked.tokens == "auto" else asked.tokens
        on = need(kept, PassSize.of(max(wanted, longest), longest), several=several).total > room
    tokens, why_tokens = tokens_of(
        asked.tokens, again if on else kept, device_bytes, longest=longest, several=several, beside=taken
    )
    part = PassSize.of(max(tokens, longest), longest)
    size, smaller_size = (need(some, part, several=several).total + taken for some in (kept, again))
    return PassChoice(
        tokens=tokens,
        recompute=on,
        why_tokens=why_tokens,
        why=_why(on, size, smaller_size, device_bytes) if asked.recompute == "auto" else "",
        kept=size,
        again=smaller_size,
        keeps_up_to=most if max(most, longest) == most else 0,
    )


def _unjudged(asked: PassSettings, on: bool, device_bytes: int | None, unknown: Sequence[str]) -> PassChoice:
    """Where nothing can be foretold, or nothing needs to be."""
    tokens, why_tokens = tokens_of(asked.tokens, None, device_bytes, longest=1, several=False)
    why = "there is no device whose memory would bound it"
    if device_bytes is not None:
        why = "what this model needs is not known"
    if device_bytes is not None and unknown:
        why = f"what {', '.join(unknown)} takes of the device is not known"
        if asked.tokens == "auto":
            tokens, why_tokens = LEAST, why
    return PassChoice(tokens, on, why_tokens, why if asked.recompute == "auto" else "")


def _why(on: bool, kept: int, again: int, device_bytes: int) -> str:
    of = f"of a device's {device_bytes / GIB:.0f} GiB, of which {MARGIN:.0%} stay free"
    if on:
        return f"kept they would need {kept / GIB:.1f} GiB {of}; computed again {again / GIB:.1f}"
    return f"{kept / GIB:.1f} GiB is foretold {of}; computed again {again / GIB:.1f}"


def _computing(ranks: Sequence[RankMemory], *, again: bool) -> list[RankMemory]:
    return [replace(rank, recompute=again) for rank in ranks]


def smaller(whole: Mapping[str, int], times: int) -> dict[str, int]:
    """What passes become that did not fit so many times. `whole` says how large they are to begin with: the most tokens
    as `pass_tokens`, or as `passes` in how many a micro-batch is computed; and where activations are kept that may be
    computed again, `recompute`, which is then the first thing to become true. Each other time halves passes."""
    halved = times
    found = dict(whole)
    if "recompute" in whole:
        halved = max(0, times - 1)
        found["recompute"] = times > 0
    if "pass_tokens" in whole:
        found["pass_tokens"] = max(1, whole["pass_tokens"] >> halved)
    if "passes" in whole:
        found["passes"] = whole["passes"] << halved
    return found
