"""How ranks meet."""

from __future__ import annotations

from tests.rank_pool import RankPool
from tests.workloads.gang.rendezvous_work import meet

LATE_S = 0.5


def test_no_rank_goes_on_before_all_are_joined(ranks: RankPool) -> None:
    """One that refused its model at once would close connections that another still waits for."""
    went_on = ranks.run(meet, 3, LATE_S)
    assert max(went_on) - min(went_on) < LATE_S
