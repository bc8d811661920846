"""Where every prompt and every token of a job is: what the promise of Gyre is counted by.

    prompts   drawn = trained + dropped + in flight, 0 lost, 0 trained twice
    tokens    generated = delivered + in flight + discarded (by reason), 0 missing

Prompts are counted in SQL from the sample ledger, which the trainer writes. Tokens are counted by the rollout manager:
while it runs they are what it last said, else what it committed last.

Invariant *one moment*: the parts of a sum are of the same moment, so that it is exact in every phase and after every
end; what no count has is said (`told`).

Pure: `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gyre.api.terminal.formats import efficiency_words
from gyre.failover import JobPhase
from gyre.master.master_api import ENGINES_OF, View, plane_of, pools_of_view
from gyre.observe.efficiency import efficiency_of

_RUNS = "The rollout manager said so last."
_COMMITTED = (
    "The rollout manager committed this last; what engines had made and not reported by then is in no count."
)
_NOTHING = "The rollout manager has counted nothing yet."
_NOTHING_EVER = "The rollout manager never counted anything."
_NO_PLANE = "This job has no rollout manager, so nobody counts the tokens that are generated."


@dataclass(kw_only=True)
class PromptTotals:
    """Groups. `drawn` = `trained` + `dropped` + `in_flight` + `lost`."""

    drawn: int
    trained: int
    dropped: int
    in_flight: int
    lost: int
    twice: int


@dataclass(kw_only=True)
class TokenTotals:
    """`generated` = `delivered` + `in_flight` + `discarded` + `missing`, all of one moment; null where no rollout
    manager has counted. `told` says what the count is of, `waiting` how what is in flight is called. `not_trained` are
    those that the trainer left out after their delivery, by reason."""

    generated: int | None
    delivered: int | None
    in_flight: int | None
    waiting: str
    told: str
    discarded: dict[str, int]
    missing: int | None
    not_trained: dict[str, int]


@dataclass(kw_only=True)
class PoolPrice:
    role: str
    instances: int
    price_per_hour: float
    price_per_million_tokens: float | None


def account_of(
    view: View, audit: Mapping[str, Any], committed: Callable[[], Mapping[str, Any] | None], *, now: float
) -> dict[str, Any]:
    """`prompts` (a `PromptTotals`), `tokens` (a `TokenTotals`), `money` (a `PoolPrice` for each pool) and `cost`, all
    of them, `audit` too (a `LedgerAudit`), as plain data. `committed` gives the plane's account as the store has it
    (`MasterApi.plane_account`), and is asked where no manager runs. `tokens` has nulls where none has ever counted.
    `cost` has what the job costs in words, as `gyre show` has it, until `now` (seconds since 1970) or its end; it is
    empty where the job has no prices."""
    counts = audit["counts"]
    lost = sum(last - first + 1 for first, last in audit["gaps"])
    return {
        "prompts": vars(
            PromptTotals(
                drawn=audit["cursor"],
                trained=counts["trained"],
                dropped=counts["dropped"],
                in_flight=counts["queued"] + counts["done"],
                lost=lost,
                twice=len(audit["duplicates"]),
            )
        ),
        "tokens": vars(_tokens(view, committed, not_trained=dict(audit["discarded"]))),
        "money": [
            vars(
                PoolPrice(
                    role=role,
                    instances=pool.get("instances", 0),
                    price_per_hour=pool.get("price_per_hour", 0.0),
                    price_per_million_tokens=pool.get("price_per_million_tokens"),
                )
            )
            for role, pool in pools_of_view(view).items()
        ],
        "cost": [
            {"label": label, "value": value}
            for label, value in efficiency_words(efficiency_of(view, now))
            if label.startswith("cost")
        ],
    }


def lines_of(account: Mapping[str, Any]) -> dict[str, str]:
    """The sums of `prompts` and `tokens` as sentences, for a terminal."""
    prompts, tokens = account["prompts"], account["tokens"]
    lines = {
        "prompts": f"{prompts['drawn']:,} drawn = {prompts['trained']:,} trained + {prompts['in_flight']:,} "
        f"{tokens['waiting']} + {prompts['dropped']:,} dropped + {prompts['lost']:,} lost; "
        f"{prompts['twice']:,} trained twice"
    }
    if tokens["generated"] is None:
        return lines | {"tokens": tokens["told"]}
    discarded = "".join(
        f" + {count:,} {reason.replace('_', ' ')}" for reason, count in tokens["discarded"].items()
    )
    return lines | {
        "tokens": f"{tokens['generated']:,} generated = {tokens['delivered']:,} delivered + {tokens['in_flight']:,} "
        f"{tokens['waiting']}{discarded or ' + 0 discarded'}, {tokens['missing']:,} missing. {tokens['told']}"
    }


def _tokens(
    view: View, committed: Callable[[], Mapping[str, Any] | None], *, not_trained: dict[str, int]
) -> TokenTotals:
    ended = JobPhase(view["job"]["phase"]).ended
    said: Any = None if ended else _said(view)
    told = _RUNS
    if said is None:
        said, told = committed(), _COMMITTED
    if said is None:
        has_plane = any(vertex["role"] == ENGINES_OF for vertex in view["vertices"])
        told = (_NOTHING_EVER if ended else _NOTHING) if has_plane else _NO_PLANE
    account = said if isinstance(said, Mapping) else {}
    discarded = account.get("discarded")
    return TokenTotals(
        generated=account.get("generated"),
        delivered=account.get("delivered"),
        in_flight=account.get("in_flight"),
        waiting="in flight when the job ended" if ended else "in flight",
        told=told,
        discarded=dict(discarded) if isinstance(discarded, Mapping) else {},
        missing=account.get("missing"),
        not_trained=not_trained,
    )


def _said(view: View) -> Mapping[str, Any] | None:
    """What a manager that runs last said; None where none does, or its master does not answer."""
    runs = any(
        vertex["role"] == ENGINES_OF and str(vertex["phase"]) == "running" for vertex in view["vertices"]
    )
    said = plane_of(view).get("account") if runs and view["master"]["answering"] else None
    return said if isinstance(said, Mapping) and "generated" in said else None
