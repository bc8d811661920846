"""The rollout plane's token account as the store has it, for whoever looks when no manager answers.

Invariant *one commit*: counters, open groups and deltas are read as of one moment and were written in one transaction,
so the sum is exact whatever was killed. What engines had made and not reported by then is in no part of it.

This module must not know how the rows are stored.
"""

from __future__ import annotations

from typing import Any

from gyre.rollouts.plane.groups import OpenGroups
from gyre.store import RolloutRows


def account_in(groups: OpenGroups) -> dict[str, Any]:
    """`generated`, `delivered`, `in_flight`, `discarded` (by reason) and `missing`, in tokens."""
    account = groups.account
    return {
        "generated": account.generated,
        "delivered": account.delivered,
        "in_flight": groups.in_flight_tokens,
        "discarded": dict(account.discarded),
        "missing": groups.missing_tokens(),
    }


def stored_account(rows: RolloutRows) -> dict[str, Any] | None:
    """The same of what was committed last; None where no manager has written anything."""
    if not rows.term:
        return None
    groups = OpenGroups(epoch=rows.term)
    groups.restore(rows.counters, rows.groups, rows.deltas)
    return account_in(groups)
