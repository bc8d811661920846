"""The frame that comes often: what an agent's samples got, as columns of one element a sample.

On the wire a GenerationProgress is an array of ten. Its columns are raw little-endian bytes; they are checked as
arrays, when somebody needs them (`Report`).

This module must not know what the tokens are for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from gyre.rollouts.protocol.columns import COLUMNS, ColumnFault, ReportColumns, join_columns
from gyre.rollouts.protocol.fields import MAX_LIST, Count, Text, refuse

SLOWEST_TOKENS_S = 1e-3
"""A rate of no more is none, and divides nothing."""

EndKind = Literal["stop", "length", "released", "failed", "died"]

_Run = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Load = Annotated[int, Meta(ge=0, lt=2**40)]


class End(Struct, array_like=True, forbid_unknown_fields=True):
    """How a sample's stay on an instance ended. `stop` and `length` end the sample; `released` hands it back
    unharmed; `failed` hands it back with a reason, which counts against it; `died` says that the engine died with it,
    all that ran there in one frame. `runs`, where there are any, is the truth about the versions of the sample's last
    tokens, which came from this instance under this lease or those before: (version, tokens) one after another."""

    row: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    lease: Annotated[int, Meta(ge=0)]
    kind: EndKind
    message: Text
    runs: Annotated[tuple[tuple[_Run, _Run], ...], Meta(max_length=MAX_LIST)]


@dataclass(slots=True)
class GenerationProgress:
    """What was generated since the last frame: element `i` of each column belongs to one sample.

    `rows` uint32, strictly increasing; `leases` uint64; `starts` uint32, the tokens the sample had before;
    `counts` uint32, none 0; `versions` int32, the policy of these tokens. `tokens` int32 and `logprobs` float32 hold
    the samples' tokens one after another. `ends` are judged after the tokens. `running`, `waiting` and `used_tokens`
    say how full the engine is, `rate_tokens_s` how fast it has been lately.
    """

    seq: int
    rows: NDArray[np.uint32]
    leases: NDArray[np.uint64]
    starts: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    versions: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ends: list[End] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    rate_tokens_s: float = 0.0

    @property
    def columns(self) -> ReportColumns:
        return ReportColumns(
            self.rows, self.leases, self.starts, self.counts, self.versions, self.tokens, self.logprobs
        )


@dataclass(slots=True)
class Report:
    """A GenerationProgress as it came: its ends and its load are checked, its columns are bytes that nobody has looked
    at."""

    seq: int
    columns: list[bytes]
    """Rows, leases, starts, counts, versions, tokens, log-probs."""
    ends: list[End]
    load: tuple[int, int, int, float]
    """running, waiting, used_tokens, rate_tokens_s."""

    def unfold(self) -> GenerationProgress:
        """Raises FrameError where a column is not what it should be."""
        joined = join_columns([self.columns])
        if isinstance(joined, ColumnFault):
            raise refuse(joined.reason, joined.message)
        return GenerationProgress(self.seq, *joined.columns, self.ends, *self.load)


class ReportBody(Struct, array_like=True, forbid_unknown_fields=True):
    """A GenerationProgress on the wire."""

    seq: Count
    rows: bytes
    leases: bytes
    starts: bytes
    counts: bytes
    versions: bytes
    tokens: bytes
    logprobs: bytes
    ends: Annotated[list[End], Meta(max_length=MAX_LIST)]
    load: tuple[_Load, _Load, _Load, Annotated[float, Meta(ge=0, lt=1e12)]]

    def report(self) -> Report:
        running, waiting, used_tokens, rate = self.load
        columns = [
            *(self.rows, self.leases, self.starts, self.counts, self.versions),
            *(self.tokens, self.logprobs),
        ]
        if rate <= SLOWEST_TOKENS_S:
            rate = 0.0
        return Report(self.seq, columns, self.ends, (running, waiting, used_tokens, rate))


def body_of(frame: GenerationProgress) -> list[Any]:
    """What goes on the wire."""
    return [
        frame.seq,
        *(np.ascontiguousarray(getattr(frame, name), dtype=dtype).data for name, dtype in COLUMNS),
        frame.ends,
        [frame.running, frame.waiting, frame.used_tokens, frame.rate_tokens_s],
    ]
