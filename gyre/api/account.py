"""Where every prompt and every token of a job is: what the promise of Gyre is counted by.

    prompts   drawn = trained + dropped + in flight, 0 lost, 0 trained twice
    tokens    generated = delivered + in flight + discarded (by reason), 0 missing

Prompts are counted in SQL from the sample ledger, which the trainer writes; tokens as the rollout manager last said,
which is in the job's series when the job has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gyre.master.master_api import View, plane_of, pools_of_view


def account_of(
    view: View, audit: Mapping[str, Any], plane_series: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    """`prompts`, `tokens` and `money`, all of them, `audit` too (a `LedgerAudit`), as plain data. `plane_series` gives
    the series of the rollout plane, and is asked where the view has nothing of it. `tokens` has nulls where no rollout
    plane has ever reported."""
    counts = audit["counts"]
    lost = sum(last - first + 1 for first, last in audit["gaps"])
    return {
        "prompts": {
            "drawn": audit["cursor"],
            "trained": counts["trained"],
            "dropped": counts["dropped"],
            "in_flight": counts["queued"] + counts["done"],
            "lost": lost,
            "twice": len(audit["duplicates"]),
        },
        "tokens": _tokens(plane_of(view).get("account") or last_account(plane_series()), audit["discarded"]),
        "money": [
            {
                "role": role,
                "instances": pool.get("instances", 0),
                "price_per_hour": pool.get("price_per_hour", 0.0),
                "price_per_million_tokens": pool.get("price_per_million_tokens"),
            }
            for role, pool in pools_of_view(view).items()
        ],
    }


_ACCOUNT = "account/"
"""What the names of the account's numbers begin with in a series."""


def last_account(series: Mapping[str, Any]) -> dict[str, Any]:
    """The newest account in a plane's series (`MasterApi.series`); empty where there is none."""
    found: dict[str, Any] = {}
    for name, points in series.get("series", {}).get("plane", {}).items():
        if name.startswith(_ACCOUNT) and points:
            first, _, rest = name.removeprefix(_ACCOUNT).partition("/")
            value = int(points[-1][1])
            if rest:
                found.setdefault(first, {})[rest] = value
            else:
                found[first] = value
    return found


def _tokens(said: Any, not_trained: Mapping[str, int]) -> dict[str, Any]:
    """`discarded` is what the plane threw away, `not_trained` what the trainer left out after its delivery."""
    account = said if isinstance(said, Mapping) else {}
    discarded = account.get("discarded")
    return {
        "generated": account.get("generated"),
        "delivered": account.get("delivered"),
        "in_flight": account.get("in_flight"),
        "discarded": dict(discarded) if isinstance(discarded, Mapping) else {},
        "missing": account.get("missing"),
        "not_trained": dict(not_trained),
    }
