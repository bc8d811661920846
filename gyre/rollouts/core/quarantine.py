"""Which samples answer for an engine that died with them.

Invariants:
- *alone*: a sample is convicted only of a death that it was alone at, all others having got on there or been
  convicted of nothing by it; among several, all that got nowhere are suspected and none is convicted;
- *acquitted by progress*: a sample that got further than where an engine died with it did not kill that engine.

This module must not know where samples are tried, or what follows upon a conviction.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre.rollouts.core.requests import InFlightSample

POISON_AFTER = 3
"""Engines that died with a sample, or failed at it, before it is set aside."""

CLEARED_AFTER_TOKENS = 64
"""A sample that got so much further than where an engine died with it did not kill that engine. More than what is
on its way between an engine and the book."""


def is_suspect(state: InFlightSample) -> bool:
    """One death more, and it is set aside: it is tried alone."""
    return state.deaths >= POISON_AFTER - 1


def acquit(state: InFlightSample) -> bool:
    """Whether it had been suspected, and is not any more."""
    if state.deaths and state.length > state.died_at + CLEARED_AFTER_TOKENS:
        state.deaths, state.failed_at = 0, ""
        return True
    return False


def strike(state: InFlightSample, failed_at: str, *, most: int = POISON_AFTER) -> bool:
    """One more that died with it, or failed at it at the instance `failed_at`. Whether it is to be set aside."""
    state.deaths = min(state.deaths + 1, most)
    state.died_at, state.failed_at = state.length, failed_at
    return state.deaths >= POISON_AFTER


def blame(dead: Sequence[InFlightSample], suspect: InFlightSample | None) -> list[InFlightSample]:
    """An engine died with these. If one of them was suspected already it answers for it, alone. Those that are to be
    set aside."""
    for state in dead:
        acquit(state)
    untested = [state for state in dead if state.length <= state.lent_at + CLEARED_AFTER_TOKENS]
    if suspect is not None and is_suspect(suspect) and untested == [suspect]:
        return [suspect] if strike(suspect, "") else []
    for state in untested or dead:
        strike(state, "", most=POISON_AFTER - 1)
    return []
