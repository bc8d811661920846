"""Which pool grows and which shrinks: prices by measured rates, bounds, and pools without room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.rollouts.scheduling.elasticity import ElasticSettings
from gyre.rollouts.scheduling.pools import Pool, in_all, share_out, token_price


def pools(**prices: float) -> dict[str, Pool]:
    return {name: Pool(ElasticSettings(min=1, max=4), price) for name, price in prices.items()}


def test_bounds_add_up_and_the_most_careful_of_the_limits_holds() -> None:
    made = in_all(
        {
            "a": Pool(ElasticSettings(min=1, max=4, up_cooldown_s=10.0, cores_full=0.5)),
            "b": Pool(ElasticSettings(min=0, max=3, up_cooldown_s=20.0)),
        }
    )
    assert (made.min, made.max, made.up_cooldown_s, made.cores_full) == (1, 7, 20.0, 0.5)


def test_what_tokens_cost_decides_and_not_what_an_instance_costs() -> None:
    two = pools(small=1.0, large=3.0)
    counts = {"small": 1, "large": 1}
    assert share_out(3, counts, two, {"small": 100.0, "large": 200.0}) == {"small": 2, "large": 1}
    assert share_out(3, counts, two, {"small": 100.0, "large": 400.0}) == {"small": 1, "large": 2}
    assert share_out(3, counts, two, {"small": 100.0}) == {"small": 2, "large": 1}, "as fast as the others"
    assert share_out(2, {"small": 2, "large": 2}, two, {"small": 100.0, "large": 400.0}) == {
        "small": 1,
        "large": 1,
    }


def test_the_first_given_grows_first_and_the_last_shrinks_first() -> None:
    two = pools(first=0.0, second=0.0)
    assert share_out(3, {"first": 1, "second": 1}, two, {}) == {"first": 2, "second": 1}
    assert share_out(3, {"first": 2, "second": 2}, two, {}) == {"first": 2, "second": 1}


def test_a_pool_without_room_is_left_out() -> None:
    two = pools(cheap=1.0, dear=2.0)
    assert share_out(4, {"cheap": 1, "dear": 1}, two, {}, full={"cheap"}) == {"cheap": 1, "dear": 3}


def test_a_million_tokens() -> None:
    assert token_price(3.6, 1000.0) == pytest.approx(1.0)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[dict[str, Pool], dict[str, int], dict[str, float], set[str]]:
    made, counts = {}, {}
    for name in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        low = draw(st.integers(0, 3))
        high = draw(st.integers(max(1, low), 6))
        made[name] = Pool(ElasticSettings(min=low, max=high), draw(st.floats(0, 10)))
        counts[name] = draw(st.integers(0, 8))
    rates = draw(st.dictionaries(st.sampled_from(sorted(made)), st.floats(0, 1e4)))
    return made, counts, rates, set(draw(st.lists(st.sampled_from(sorted(made)))))


@given(fleets(), st.integers(0, 30))
def test_it_is_as_near_to_the_target_as_bounds_and_room_permit(
    fleet: tuple[dict[str, Pool], dict[str, int], dict[str, float], set[str]], target: int
) -> None:
    made, counts, rates, full = fleet
    found = share_out(target, counts, made, rates, full)
    kept = {name: min(max(counts[name], pool.elastic.min), pool.elastic.max) for name, pool in made.items()}
    for name, pool in made.items():
        assert pool.elastic.min <= found[name] <= pool.elastic.max
        assert name not in full or found[name] <= kept[name]
    changes = {found[name] - kept[name] for name in made}
    assert not (min(changes) < 0 < max(changes)), "one direction"
    most = sum(kept[name] if name in full else pool.elastic.max for name, pool in made.items())
    least = sum(pool.elastic.min for pool in made.values())
    expected = (
        min(target, max(most, sum(kept.values()))) if target > sum(kept.values()) else max(target, least)
    )
    assert sum(found.values()) == expected
