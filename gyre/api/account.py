"""Where every prompt and every token of a job is: what the promise of Gyre is counted by.

    prompts   drawn = trained + dropped + in flight, 0 lost, 0 trained twice
    tokens    generated = delivered + in flight + discarded (by reason), 0 missing

Prompts are counted in SQL from the sample ledger, which the trainer writes; tokens as the rollout manager last said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.master.master_api import View, plane_of, pools_of_view


def account_of(view: View, audit: Mapping[str, Any]) -> dict[str, Any]:
    """`prompts`, `tokens` and `money`, all of them, `audit` too (a `LedgerAudit`), as plain data. `tokens` has nulls
    where no rollout plane has reported."""
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
        "tokens": _tokens(plane_of(view), audit["discarded"]),
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


def _tokens(plane: Mapping[str, Any], not_trained: Mapping[str, int]) -> dict[str, Any]:
    """`discarded` is what the plane threw away, `not_trained` what the trainer left out after its delivery."""
    said = plane.get("account")
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
