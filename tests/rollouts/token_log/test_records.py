"""How a delta looks in the store, and that what comes out is what went in."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from gyre.rollouts.protocol.columns import ReportColumns
from gyre.rollouts.token_log.records import LeaseRecord, PendingDelta, delta_in, delta_out

STORED = bytes.fromhex(
    "9a01c41000000100000000000100010000000000c4080000000005000000c408020000000100000000c4060b000c000d0002"
    "c40c000000bf000080bf000000c09192ce00010001a473746f7090"
)
"""`pending()` in the store."""

LEASES = [
    LeaseRecord(key=1 << 16, lease=3 << 40 | 1, incarnation="a" * 32, length=0),
    LeaseRecord(key=1 << 62, lease=(1 << 63) - 1, incarnation="b", length=(1 << 32) - 1),
    LeaseRecord(key=1 << 16, lease=3 << 40 | 2, incarnation="a" * 32, length=7),
]


def pending() -> PendingDelta:
    report = ReportColumns(
        np.array([3, 9], np.uint32),
        np.array([1 << 40 | 1, 1 << 40 | 2], np.uint64),
        np.array([0, 5], np.uint32),
        np.array([2, 1], np.uint32),
        np.array([0, 0], np.int32),
        np.array([11, 12, 13], np.int32),
        np.array([-0.5, -1, -2], np.float32),
    )
    return PendingDelta(1, reports=[report], keys=[np.array([65536, 65537])], ends=[[65537, "stop"]])


def test_a_stored_delta_is_read_and_is_written_the_same() -> None:
    stored = delta_in(STORED)
    assert stored.leases == []
    assert (stored.keys, stored.starts, stored.counts, stored.versions) == (
        [65536, 65537],
        [0, 5],
        [2, 1],
        [0, 0],
    )
    assert stored.tokens.tolist() == [11, 12, 13]
    assert stored.logprobs.tolist() == [-0.5, -1, -2]
    assert stored.ends == [[65537, "stop"]]
    assert delta_out(pending()) == STORED


@pytest.mark.parametrize("with_tokens", [True, False])
def test_leases_come_back_beside_whatever_else_a_delta_has(with_tokens: bool) -> None:
    delta = pending() if with_tokens else PendingDelta(1)
    delta.leases = LEASES
    stored = delta_in(delta_out(delta))
    assert stored.leases == LEASES
    assert stored.tokens.tolist() == ([11, 12, 13] if with_tokens else [])
    assert stored.ends == delta.ends


def test_a_delta_of_a_newer_gyre_is_refused() -> None:
    with pytest.raises(ValueError, match="format 2; this Gyre reads 1"):
        delta_in(msgpack.packb([2, *msgpack.unpackb(STORED)[1:]]))
