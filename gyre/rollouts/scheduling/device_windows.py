"""Until when the trainer's own GPUs generate, before they train.

While they generate, the remote instances do too; when they train, these go on alone. Let `W` tokens be left to
generate, at `l` tokens/s locally and `r` remotely; let training what is not trained yet take `a` seconds, switching
from one to the other `h`, and let `e` of the training be left when the last sample comes. Handing over at `t` from
now, training ends no sooner than `t + h + a`, which grows with `t`, and no sooner than `(W - l t) / r + x + e`,
which falls. The step ends soonest where they meet, at

    t = (W + r (x + e - a - h)) / (l + r)

`x` is for the tail. No instance makes a sample faster than token by token, so that slots fall idle one after the
other while the longest sample, which needs `T` seconds more, runs on. If the mean sample needs `p T`, those slots
lack `x = T (1 - p)` of full use. (List scheduling, R. L. Graham 1966, whose bound has the same two terms.) And where
the longest sample takes the step's end beyond that point, generating locally for longer wins nothing: the hand-over
is between as early as the other samples allow and as late as training allows.

Invariants:
- *no idle wait*: the window ends when nothing is left to generate, and lasts until then where no remote instance is;
- *nothing tuned*: rates and times are measured, and no constant here has a model's size in it;
- *closed loop*: each plan starts from what is left now, so that errors of earlier plans do not add up;
- *damped*: measurements are averaged over time, and a plan within the noise of the one before is the one before.

This module must not know how work is handed over, nor read the time: `now` is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

UNTIL_DONE = math.inf

_TAIL = "the longest sample ends the step, and generating locally for longer would not end it sooner"


@dataclass(frozen=True, slots=True)
class WindowSettings:
    smoothing_s: float = 20.0
    """The time over which measured rates are averaged."""
    deadband_share: float = 0.05
    """An end that moves by less than this share of what is left of the window does not move."""
    reopen_switches: float = 3.0
    """After the hand-over, local engines start again only for a window of this many times the switch's duration."""


@dataclass(frozen=True, slots=True)
class WindowState:
    """What is known at `now_s`, by the caller's clock."""

    now_s: float
    tokens_left: float
    """Predicted for all unfinished samples: local, remote and queued."""
    samples_left: int
    """Unfinished samples."""
    longest_left_tokens: float
    """Predicted for the sample that has most left."""
    sample_tokens_s: float
    """How fast one sample grows on a remote instance; 0 before measured."""
    local_tokens_s: float
    """What the local engines make, or made when they last generated."""
    remote_tokens_s: float
    """What the instances that take work now make together with their slots in use. 0: there are none."""
    train_s: float
    """Predicted duration of training everything of this step that is not trained yet."""
    last_train_s: float = 0.0
    """Predicted duration of the part of it that can begin only when the last sample is there."""
    switch_s: float = 0.0
    """Duration of a switch from generating to training, or back."""
    generating: bool = True
    """Whether local engines generate; False once they have handed over."""
    planned_until_s: float | None = None
    """What was planned before."""


@dataclass(frozen=True, slots=True)
class Window:
    """Local engines generate until `until_s`. A time that is past means that they do not; `UNTIL_DONE`, to the end."""

    until_s: float
    reason: str

    def is_open(self, now_s: float) -> bool:
        return now_s < self.until_s


def plan_window(state: WindowState, settings: WindowSettings | None = None) -> Window:
    """The plan as of now. Ask again whenever something was measured, and when instances come or go."""
    settings = settings or WindowSettings()
    if state.tokens_left <= 0:
        return Window(state.now_s, "nothing is left to generate")
    if state.remote_tokens_s <= 0:
        return Window(UNTIL_DONE, "no remote instance takes work, so the local engines generate until done")
    if state.local_tokens_s <= 0 and not state.generating:
        return Window(state.now_s, "there are no local engines")

    best_s, reason = _best_s(state)
    if not state.generating:
        if best_s <= settings.reopen_switches * state.switch_s or best_s <= 0:
            return Window(
                state.now_s, "training has begun, and to generate again would not end the step sooner"
            )
        reason = f"the remote instances alone would keep the trainer waiting; {reason}"
    if best_s <= 0:
        return Window(state.now_s, reason)
    until_s, planned_s = state.now_s + best_s, state.planned_until_s
    if (
        planned_s is not None
        and planned_s > state.now_s
        and abs(until_s - planned_s) < settings.deadband_share * best_s
    ):
        until_s = planned_s
    return Window(until_s, reason)


def _best_s(state: WindowState) -> tuple[float, str]:
    """How much longer to generate locally, and why."""
    left, local, remote = state.tokens_left, state.local_tokens_s, state.remote_tokens_s
    # A closed engine takes a switch to open, and another one to hand over again.
    opening_s = 0.0 if state.generating else state.switch_s
    busy_s = state.train_s + state.switch_s + opening_s
    tail_s = state.longest_left_tokens / state.sample_tokens_s if state.sample_tokens_s > 0 else 0.0
    mean_s = left / max(state.samples_left, 1) / state.sample_tokens_s if state.sample_tokens_s > 0 else 0.0
    unused_s = max(tail_s - mean_s, 0.0)
    meeting_s = (left + remote * (unused_s + state.last_train_s - busy_s)) / (local + remote)
    if meeting_s <= 0:
        return 0.0, "the remote instances finish before the trainer has trained what there is"
    latest_s = tail_s + state.last_train_s - busy_s
    if latest_s > meeting_s and local > 0:
        earliest_s = max((left - remote * (tail_s - unused_s)) / local, 0.0)
        if earliest_s < meeting_s:
            # Anything between does not delay the end. Half way, as both are predictions.
            return (earliest_s + min(meeting_s, latest_s)) / 2, _TAIL
    return meeting_s, "then training and the remote instances end together"


class Smoothed:
    """An average over time of measurements that come at any interval: the newest weighs `1 - exp(-dt / over_s)`."""

    def __init__(self, over_s: float) -> None:
        self.over_s = over_s
        self._value: float | None = None
        self._at_s = 0.0

    @property
    def value(self) -> float:
        """0 before the first measurement."""
        return self._value or 0.0

    def observe(self, measured: float, now_s: float) -> float:
        if self._value is None:
            self._value = measured
        else:
            weight = -math.expm1(-max(now_s - self._at_s, 0.0) / self.over_s) if self.over_s > 0 else 1.0
            self._value += weight * (measured - self._value)
        self._at_s = now_s
        return self._value


class TrainTime:
    """Predicts how long training takes from a measured rate: a ratio of sums whose old terms fade."""

    def __init__(self, *, half_life: float = 16.0) -> None:
        """`half_life`: after how many further measurements one counts half."""
        self._keep = 0.5 ** (1.0 / half_life)
        self._tokens = self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A micro-batch or a whole step was trained, not counting what was waited for."""
        self._tokens = self._tokens * self._keep + tokens
        self._seconds = self._seconds * self._keep + seconds

    def predict_s(self, tokens: float) -> float:
        """Returns 0 before anything was measured: the first window is as long as if training were instant."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0
