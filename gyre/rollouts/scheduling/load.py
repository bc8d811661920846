"""What instances are estimated to have still to do, and how fast they do it.

A sample's remaining tokens are predicted from how long samples got that finished (`LengthModel`); an instance's load is
the sum over its samples, less what it generated since. Rates are what instances measured of themselves.

Invariants:
- *constant cost*: news of an instance costs O(1). Its samples are predicted again only after it generated a quarter of
  what was predicted, so that this is O(1) per token, amortised;
- *part load is no capacity*: an instance that was measured with few samples is not taken for a slow one.

This module must not know which instance a sample should go to.
"""

from __future__ import annotations

import math

from gyre.rollouts.scheduling.fleet import Instance, PlacedSample
from gyre.rollouts.scheduling.lengths import LengthModel
from gyre.rollouts.scheduling.routing_settings import RoutingSettings
from gyre.rollouts.scheduling.step_time import FLAT, StepTime

_PREDICTIONS = 512
"""About how many samples' remainders are predicted again in one decision, so that none takes long."""

_NARROWEST, _WIDEST = 0.2, 1.5
"""Limits of the margin by which KV memory is reserved."""

_STEADY = 0.5
"""A measurement tells how long a step takes where this share, or more, of what ran at its one end ran at the other."""

_ADAPT_TOKENS = 32.0
"""How far each sample has to grow between two changes of that margin."""


class FleetLoad:
    def __init__(self, lengths: LengthModel, settings: RoutingSettings) -> None:
        self.lengths = lengths
        self.changed: dict[Instance, None] = {}
        """Instances whose load or admission changed since the last decision."""
        self._settings = settings
        self._rate_tokens_s = 0.0
        self._measured_rates = 0.0
        """The sum of the rates of the `_measured` instances that were measured."""
        self._measured = 0
        self._unmeasured: dict[Instance, None] = {}
        self._typical_rate = 1.0
        """The rate that unmeasured instances are credited with."""
        self._typical_step = StepTime()
        """Of all instances together."""

    @property
    def rate_tokens_s(self) -> float:
        """What the accepting instances are estimated to make together, with all slots in use."""
        return max(self._rate_tokens_s, 0.0)

    def left_s(self, instance: Instance, *, more: int = 0, more_tokens: float = 0.0) -> float:
        """How long the instance takes for what it has and `more` samples, which are to get `more_tokens` together, by
        how long its steps take with so many. `more` below 0 is for samples that it had no more."""
        running = min(len(instance.counted) + more, instance.max_running)
        if running <= 0:
            return 0.0
        tokens = instance.outstanding_tokens + more_tokens
        if not instance.step_time.weight and (instance.measured or not self._typical_step.weight):
            return tokens / instance.rate_tokens_s
        return tokens / running * self.step_s(instance, running)

    def step_s(self, instance: Instance, running: int) -> float:
        """Seconds of a step in which so many samples get a token each. Before any is measured, by the rate with all
        slots in use, of which a share does not grow with them."""
        if instance.step_time.weight:
            return instance.step_time.at(running)
        if self._typical_step.weight:
            return self._typical_step.at(running)
        most = instance.max_running
        return most / instance.rate_tokens_s * (FLAT + (1.0 - FLAT) * running / most)

    def taken_s(self, instance: Instance, sample: PlacedSample, beside: int, typical_tokens: float) -> float:
        """What the sample takes at the instance with `beside` others, in seconds of samples: its own, those that the
        others take longer by it, and those in which all of them wait until what the instance lacks of its prompt's
        prefix is read. Samples that are spread in time free a slot each; one has `typical_tokens`."""
        most = instance.max_running
        running = min(beside + 1, most)
        step_s = self.step_s(instance, running)
        waits_s = max(beside + 1 - most, 0) * typical_tokens / most * step_s
        slower_s = (
            (running - 1) * sample.expected * (step_s - self.step_s(instance, running - 1))
            if running > 1
            else 0.0
        )
        prefix = sample.prefix
        lacks = prefix.tokens if prefix is not None and not instance.has_prefix_of(sample) else 0
        read_s = lacks * self._settings.prefill_cost / instance.rate_tokens_s
        return waits_s + sample.expected * step_s + max(slower_s, 0.0) + read_s * running

    # -- instances ----------------------------------------------------------------------------------

    def join(self, instance: Instance, rate_tokens_s: float | None) -> None:
        instance.rate_tokens_s = self._typical_rate
        self._unmeasured[instance] = None
        if instance.accepting:
            self._rate_tokens_s += instance.rate_tokens_s
        if rate_tokens_s:
            self._set_rate(instance, rate_tokens_s)
        self.changed[instance] = None

    def leave(self, instance: Instance) -> None:
        if instance.measured:
            self._measured_rates -= instance.rate_tokens_s
            self._measured -= 1
        self._unmeasured.pop(instance, None)
        if instance.accepting:
            self._rate_tokens_s -= instance.rate_tokens_s
        self.changed.pop(instance, None)

    def accepting_changed(self, instance: Instance) -> None:
        self._rate_tokens_s += instance.rate_tokens_s if instance.accepting else -instance.rate_tokens_s
        self.changed[instance] = None

    # -- samples ------------------------------------------------------------------------------------

    def predict(self, sample: PlacedSample, done_tokens: float) -> None:
        """For a sample that has so many tokens and is counted nowhere."""
        sample.done_tokens = done_tokens
        sample.expected = max(self.lengths.expected_remaining(done_tokens, sample.max_new_tokens), 1.0)
        sample.kv_tokens = done_tokens + sample.expected

    def add(self, sample: PlacedSample, instance: Instance, *, prompt_tokens: int) -> None:
        """The sample counts at the instance now. `prompt_tokens` is what of its prompt takes memory anew."""
        sample.clock = instance.clock
        instance.promised += sample.expected
        instance.kv_reserved += sample.kv_tokens + prompt_tokens
        self.changed[instance] = None

    def remove(self, sample: PlacedSample, instance: Instance, *, prompt_tokens: int) -> None:
        """The sample does not count there any more: neither what it was to get, nor what it is inferred to have got.
        `prompt_tokens` is what of its prompt takes no memory any more."""
        instance.promised -= sample.expected
        instance.made = max(instance.made - (instance.clock - sample.clock), 0.0)
        instance.kv_reserved -= sample.kv_tokens + prompt_tokens
        if not instance.counted:  # what rounding left
            instance.promised = instance.made = instance.kv_reserved = 0.0
        self.changed[instance] = None

    # -- what instances report ----------------------------------------------------------------------

    def generated(self, instance: Instance, tokens: int) -> None:
        """The instance's samples got `tokens` further, together."""
        instance.generated_tokens += tokens
        if instance.held:
            instance.made += tokens * min(instance.staying, instance.running) / instance.running
            instance.clock += tokens / instance.running
            self.changed[instance] = None

    def observe(self, instance: Instance, *, rate_tokens_s: float, running: int, kv_used_tokens: int) -> None:
        """What the instance measured of itself over its last interval, and how many samples run there now. A rate that
        it tells again, because a sample ended in between, is no new measurement.

        A rate under part load is no capacity: with `b` of `s` slots in use, an instance that makes `r` tokens/s
        would make between `r` and `r * s / b` with all of them. The estimate moves to the nearest end of that
        interval, so that an idle instance is not taken for a slow one, and a slow one is noticed all the same.
        """
        running = min(running, instance.max_running)
        if rate_tokens_s == instance.told_tokens_s:
            instance.running_before = min(instance.running_before, running)
        else:
            if instance.counted and rate_tokens_s > 0:
                self._measure(instance, rate_tokens_s, running)
            instance.told_tokens_s, instance.running_before = rate_tokens_s, running
        self._adapt(instance, kv_used_tokens / instance.kv_tokens)
        self.changed[instance] = None

    def predict_again(self) -> None:
        """Predict the remainders of samples whose instances generated much since the last time."""
        budget = _PREDICTIONS
        for instance in self.changed:
            if budget <= 0:
                break  # the others are as good as their last prediction, until their next news
            if instance.made > instance.promised / 4:
                budget -= len(instance.counted)
                self.predict_anew(instance)

    def predict_anew(self, instance: Instance) -> None:
        """Predict all of the instance's samples by what has been learnt of lengths until now."""
        promised = reserved = 0.0
        prompts: dict[int, int] = {}
        for position, sample in enumerate(instance.counted.values()):
            # A sample beyond the engine's slots still waits there.
            running = position < instance.max_running
            self.predict(sample, instance.done_tokens(sample) if running else sample.done_tokens)
            sample.clock = instance.clock
            promised += sample.expected
            reserved += sample.kv_tokens
            prompts.setdefault(sample.group, sample.prompt_tokens)
        instance.promised, instance.made = promised, 0.0
        instance.kv_reserved = reserved + sum(prompts.values())

    def _measure(self, instance: Instance, rate: float, running: int) -> None:
        before = instance.running_before
        fewest = min(running, before)
        highest = rate * instance.max_running / fewest if fewest else math.inf
        smoothing = self._settings.rate_smoothing
        nearest = min(max(instance.rate_tokens_s, rate), highest)
        if instance.measured:
            self._set_rate(instance, instance.rate_tokens_s + smoothing * (nearest - instance.rate_tokens_s))
        elif fewest:
            self._set_rate(instance, nearest if self._measured else math.sqrt(rate * highest))
        mean = (running + before) / 2.0
        speed = rate / max(mean, 1.0)
        if fewest and fewest >= _STEADY * max(running, before):
            instance.step_time.observe(mean, mean / rate)
            self._typical_step.observe(mean, mean / rate)
        known = instance.present_sample_tokens_s
        instance.present_sample_tokens_s += (smoothing if known else 1.0) * (speed - known)
        present, best = instance.present_sample_tokens_s, instance.sample_tokens_s
        if present > best:
            instance.sample_tokens_s = present
        elif instance.is_lightly_used:
            instance.sample_tokens_s += smoothing * (present - best)

    def _adapt(self, instance: Instance, used_share: float) -> None:
        """Additive increase, multiplicative decrease of the KV margin, and neither before the last one could show.

        Memory fills and empties as slowly as samples grow: news that came before they grew by `_ADAPT_TOKENS` is
        old news. What is beyond the margin by more than a tenth got there under a wider one, and a narrower one would
        not make it go. Unused memory may be used later: the increase is small and has an end.
        """
        if instance.clock - instance.adapted_at < _ADAPT_TOKENS:
            return
        instance.adapted_at = instance.clock
        budget = instance.kv_tokens * instance.kv_margin
        if used_share > self._settings.kv_full and instance.kv_reserved <= 1.1 * budget:
            instance.kv_margin = max(instance.kv_margin * 0.95, _NARROWEST)
        elif used_share < self._settings.kv_roomy and instance.kv_reserved >= budget:
            instance.kv_margin = min(instance.kv_margin + 0.01, _WIDEST)

    def _set_rate(self, instance: Instance, rate: float) -> None:
        if instance.accepting:
            self._rate_tokens_s += rate - instance.rate_tokens_s
        if instance.measured:
            self._measured_rates += rate - instance.rate_tokens_s
        else:
            self._measured_rates += rate
            self._measured += 1
            instance.measured = True
            self._unmeasured.pop(instance, None)
        instance.rate_tokens_s = rate
        typical = self._measured_rates / self._measured
        if not 0.9 < typical / self._typical_rate < 1.1:
            self._typical_rate = typical
            for other in self._unmeasured:
                if other.accepting:
                    self._rate_tokens_s += typical - other.rate_tokens_s
                other.rate_tokens_s = typical
            self.changed.update(self._unmeasured)
