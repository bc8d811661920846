"""Pools of rollout instances: of which there are to be more, and of which fewer, where their tokens cost differently.

`elasticity` says how many instances there should be in all. A pool grows if its tokens cost least, and shrinks if they
cost most; its tokens cost what an instance costs an hour by the tokens that one makes, as measured. Who has not
generated yet is taken to be as fast as the others on average.

Invariants:
- *within bounds*: each pool stays between its own min and max, whatever the number in all;
- *one direction*: unless a pool is outside its bounds, either some grow or some shrink;
- *the first given goes first*: pools whose tokens cost the same grow in their order, and shrink in the opposite one.

This module must not know how instances are started.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gyre.rollouts.scheduling.elasticity import ElasticSettings

SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Pool:
    """`price` is of one instance an hour, in a currency of the user's own."""

    elastic: ElasticSettings
    price: float = 0.0


def in_all(pools: Mapping[str, Pool]) -> ElasticSettings:
    """The bounds of all pools together, with the longest of their cool-downs and the least of their limits."""
    each = [pool.elastic for pool in pools.values()]
    return ElasticSettings(
        min=sum(one.min for one in each),
        max=sum(one.max for one in each),
        up_cooldown_s=max(one.up_cooldown_s for one in each),
        down_cooldown_s=max(one.down_cooldown_s for one in each),
        cores_full=min(one.cores_full for one in each),
    )


def share_out(
    target: int,
    counts: Mapping[str, int],
    pools: Mapping[str, Pool],
    rates: Mapping[str, float],
    full: Collection[str] = (),
) -> dict[str, int]:
    """How many instances each pool should have, so that there are `target`, or as near to it as bounds and the pools
    that are `full` permit. `counts` are the present numbers, `rates` the tokens/s of one instance where measured."""
    found = {
        name: min(max(counts.get(name, 0), pool.elastic.min), pool.elastic.max)
        for name, pool in pools.items()
    }
    prices = _prices(pools, rates)
    cheapest = sorted(pools, key=lambda name: prices[name])  # stable: in their order
    for name in cheapest:
        if name not in full:
            lack = max(0, target - sum(found.values()))
            found[name] += min(lack, pools[name].elastic.max - found[name])
    for name in reversed(cheapest):
        excess = max(0, sum(found.values()) - target)
        found[name] -= min(excess, found[name] - pools[name].elastic.min)
    return found


def token_price(price: float, rate: float) -> float:
    """Of a million tokens, where an instance costs `price` an hour and makes `rate` tokens/s."""
    return price / SECONDS / rate * 1e6


def _prices(pools: Mapping[str, Pool], rates: Mapping[str, float]) -> dict[str, float]:
    known = [rate for rate in rates.values() if rate > 0]
    usual = sum(known) / len(known) if known else 1.0
    return {name: token_price(pool.price, rates.get(name) or usual) for name, pool in pools.items()}
