"""The types of what a frame may hold, each with its bounds, and the error for what is out of them.

Bounds are checked while a frame is decoded: a list that is too long, or of something else than what belongs there, is
refused before it is built.

This module must not know which frames there are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

from msgspec import Meta

from gyre.engines.dialect import SamplingParams
from gyre.errors import GyreError, nearest
from gyre.weights.transfer.address import ADDRESS

MAX_LIST = 1 << 18
"""Elements of one list: ends, held samples, ids."""

MAX_TEXT = 64 << 10
"""Characters of one text in a frame, an engine's last words included."""


class FrameError(GyreError):
    """A frame that is not what the protocol says. `details["reason"]` is a stable code."""

    code = "rollouts.frame"


LATER = "later"
"""The reason of a refusal that does not stand: whoever is refused dials again, after a longer pause each time."""


def refuse(reason: str, message: str) -> FrameError:
    return FrameError(message, details={"reason": reason})


Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+\Z")]
Address = Annotated[str, Meta(max_length=300, pattern=ADDRESS)]
"""host:port where weights are served."""
AddressOrNone = Annotated[str, Meta(max_length=300, pattern=rf"^\Z|{ADDRESS}")]
"""host:port where weights are served; "" where nobody serves them."""
Addresses = Annotated[list[Address], Meta(max_length=256)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Version = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""A policy version; -1 for none."""
Seconds = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Number = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""Neither NaN nor infinite."""
Ids = Annotated[list[int], Meta(max_length=MAX_LIST)]
Sampling = Annotated[
    dict[
        Annotated[str, Meta(max_length=100)],
        bool | int | Number | Annotated[Sequence[int], Meta(max_length=MAX_LIST)] | None,
    ],
    Meta(max_length=1000),
]
"""By the dialect's names."""
SAMPLING_KEYS = {one.name for one in fields(SamplingParams)} - {"sampling_seed"}
"""Those that a request's sampling may have; the seed is each sample's own."""


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raises FrameError for a key that no engine is told: what it asks for would be left out, and nobody would see
    it."""
    for key in sampling:
        if key not in SAMPLING_KEYS:
            near = nearest(key, SAMPLING_KEYS)
            raise refuse("invalid", f"request.sampling.{key:.100}: no engine is told this key; {near}")
