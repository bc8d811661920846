"""An agent's reports: the new tokens of its samples, how samples ended, and how full and fast the engine is.

Invariants:
- *dead together*: all samples that died with one engine are reported in one frame;
- *ends after tokens*: a sample's end is in no frame before its last token.

This module must not know about connections, or how samples are generated.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from gyre.rollouts.agent.held_samples import HeldSample
from gyre.rollouts.protocol.progress import End, GenerationProgress

PORTION_TOKENS = 1 << 20
"""Most tokens in one report: 8 MiB, well below the frame limit however long the manager was away."""


class Reports:
    """Numbers the reports of one connection after another, and measures the engine's rate between them."""

    def __init__(self, max_running: int) -> None:
        self.seq = 0
        """Number of the last report; counted anew on each connection."""
        self.max_running = max_running
        self._rate = 0.0
        self._rate_at = 0.0
        self._rate_tokens = 0

    def next(
        self,
        samples: Collection[HeldSample],
        *,
        everything: bool,
        made_tokens: int,
        interval_s: float,
        now: float,
        newest: int = 2**31 - 1,
    ) -> tuple[GenerationProgress, bool]:
        """The next report, and whether more tokens (of another version, say) need a further frame. It has the new
        tokens of all samples with `everything`, else of samples that ended. `made_tokens` counts all that the agent's
        engines generated. Tokens of a version above `newest`, of which the manager has not heard yet that it is loaded,
        wait."""
        self.seq += 1
        new = sorted(
            (held for held in samples if held.sent < held.made and (everything or held.end)),
            key=lambda held: held.row,
        )
        rows: list[int] = []
        leases, starts, counts, versions = [], [], [], []
        ids: list[NDArray[np.int32]] = []
        logprobs: list[NDArray[np.float32]] = []
        more, room = False, PORTION_TOKENS
        for held in new:
            if not room:
                more = True
                break
            if (
                rows and rows[-1] == held.row
            ):  # one of the two was cancelled, and its row was given away again
                more = True
                continue
            some_ids, some_logprobs, version = held.unsent()
            if version > newest:
                continue
            some_ids, some_logprobs = some_ids[:room], some_logprobs[:room]
            room -= len(some_ids)
            rows.append(held.row)
            leases.append(held.lease)
            starts.append(held.start + held.sent)
            counts.append(len(some_ids))
            versions.append(version)
            ids.append(some_ids)
            logprobs.append(some_logprobs)
            held.sent += len(some_ids)
            more = more or (held.sent < held.made and held.unsent()[2] <= newest)
        ends = []
        over = [held for held in samples if held.end and not held.end_seq]
        together = all(held.sent == held.made for held in over if held.end == "died")
        for held in over:
            if held.end and held.sent == held.made and (together or held.end != "died"):
                if any(version > newest for version, _ in held.true_runs):
                    continue
                held.end_seq = self.seq
                ends.append(End(held.row, held.lease, held.end, held.message, held.true_runs))
        if now - self._rate_at >= interval_s:
            made, seconds = made_tokens - self._rate_tokens, now - self._rate_at
            self._rate = made / seconds if self._rate_at else 0.0
            self._rate_at, self._rate_tokens = now, made_tokens
        running = [held for held in samples if not held.end]
        frame = GenerationProgress(
            self.seq,
            np.array(rows, np.uint32),
            np.array(leases, np.uint64),
            np.array(starts, np.uint32),
            np.array(counts, np.uint32),
            np.array(versions, np.int32),
            np.concatenate(ids) if ids else np.empty(0, np.int32),
            np.concatenate(logprobs) if logprobs else np.empty(0, np.float32),
            ends,
            running=min(len(running), self.max_running),
            waiting=max(0, len(running) - self.max_running),
            used_tokens=sum(len(held.prompt) + held.start + held.made for held in running),
            rate_tokens_s=self._rate,
        )
        return frame, more
