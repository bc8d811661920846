"""What a link carries is what all of it took together; what a socket's buffer holds is no measure."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.weights.codecs.link_rate import MEASURED_BYTES, LinkRate
from tests.weights.plane import MEASURED

MB = MEASURED_BYTES


@pytest.mark.parametrize(
    ("transfers", "rate"),
    [
        ([], None),
        ([(0.0, 2.0, 4 * MB)], 2 * MB),
        ([(0.0, 1.0, MB), (0.0, 1.0, MB)], 2 * MB),  # side by side
        ([(0.0, 1.0, MB), (5.0, 6.0, MB)], MB),  # nothing was asked of it in between
        ([(0.0, 1.0, MB), (2.0, 3.0, MB), (0.5, 2.5, 4 * MB)], 2 * MB),  # the long one joins the others
        ([(0.0, 4.0, 4 * MB), (1.0, 1.001, MB - 1)], MB),  # from a buffer
        ([(1.0, 1.0, MB)], None),  # within a tick of the clock
    ],
)
def test_the_rate_of_transfers_that_share_a_link(transfers, rate):
    link = LinkRate()
    for start, end, nbytes in transfers:
        link.add(start, end, nbytes)
    assert link.bytes_s() == (None if rate is None else pytest.approx(rate))


@given(spans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=30))
@settings(deadline=None)
def test_each_moment_counts_once_in_whatever_order_transfers_end(spans):
    link = LinkRate()
    for start, length in spans:
        link.add(start, start + length, MB)
    busy = {moment for start, length in spans for moment in range(start, start + length)}
    assert link.bytes_s() == pytest.approx(len(spans) * MB / len(busy))


def test_deltas_that_fit_into_a_buffer_do_not_make_a_slow_link_look_fast(peer):
    """They come within a millisecond each; the next version would be sent whole, and take fifteen times as long."""
    origin = peer(chunk_bytes=1 << 20)
    receiver = peer(forced_codec="delta")
    receiver.fetch(origin.publish(1, changed=0.2, **MEASURED), origin)
    receiver.receiver.link_bytes_s = 50e6
    manifest = origin.publish(2, changed=0.2, **MEASURED)
    fetched = receiver.fetch(manifest, origin)
    assert fetched.codecs["delta"] >= len(manifest.digests) - 2
    assert fetched.wire_bytes > 4 * (64 << 10)
    assert receiver.receiver.link_bytes_s == 50e6


def test_a_link_is_measured_by_what_comes_whole(peer):
    origin, receiver = peer(chunk_bytes=MEASURED_BYTES), peer(forced_codec="none")
    fetched = receiver.fetch(origin.publish(1, **MEASURED), origin)
    assert receiver.receiver.link_bytes_s > 0.8 * fetched.wire_bytes / fetched.seconds
    small = peer(forced_codec="none")
    small.fetch(origin.publish(2, layers=2), origin)
    assert small.receiver.link_bytes_s is None
