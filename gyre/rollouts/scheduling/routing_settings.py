"""The knobs of routing and rebalancing, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    prefill_cost: float = 0.1
    """What a prompt token costs, in generated tokens: an engine's decode rate over its prefill rate."""
    overcommit: float = 0.06
    """Samples given out beyond `max_running`, as a share of it (at least one), so that no slot waits for a round trip.
    0 for none."""
    sticky_worth: float = 0.02
    """A sample waits for its group's instance only where its prompt costs this share of what it is expected to get."""
    sticky_patience: float = 4.0
    """A group is passed over at most this many times the number of instances."""
    home_gain_share: float = 0.25
    """A turn leaves the instance that has its prefix only where it is predicted to be better off by this share of what
    it takes elsewhere: lengths are guessed, and at both places the prefix takes memory."""
    rate_smoothing: float = 0.3
    """Weight of the newest measurement of a rate."""
    kv_full: float = 0.92
    """Share of an instance's KV memory in use above which it is given less."""
    kv_roomy: float = 0.80
    """Share in use below which it is given more."""
    move_gain_s: float = 2.0
    """A move must be predicted to win more than this."""
    move_gain_share: float = 0.2
    """And more than this share of the source's drain time."""
    move_cooldown_s: float = 30.0
    """A sample that was moved is not moved again for this long."""
    cheap_moves: int = 4
    """But so many of its moves may follow each other while they are cheap: instances load a version one by one."""
    cheap_share: float = 0.1
    """A move is cheap if what is done again costs no more than this share of what the sample is still to get."""
    move_s: float = 0.1
    """How long a sample that moves makes no token: recalled, reported, committed and given out again."""
    deal_gain_s: float = 0.2
    """Where a slot has come that was not there before, moves begin if an instance that shares its samples is predicted
    to be done this much sooner."""
    deal_gain_share: float = 0.1
    """And by more than this share of the time that it takes."""
    moves_per_s: float = 32.0
    """How many moves rebalancing may ask for over time."""
    moves_burst: int = 128
    """And how many at once."""
    tail_share: float = 0.25
    """Stragglers are looked for while no more than this share of the fleet's slots is in use."""
    straggler_factor: float = 1.5
    """A straggler would take this many times as long where it is as on an idle instance."""
