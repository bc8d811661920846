"""The trainer lends its devices to the rollout plane while it has nothing to train, and takes them back to train.

Invariants:
- *never both*: from `LendDevices` until `DevicesReturned` nothing is trained and no rank is brought up;
- *nothing waits for ever*: a manager that has the devices and says nothing for `SILENT_S` is taken to be gone;
- *take back first*: a new trainer asks for the devices before it uses them, since the one before may have lent them.

This module must not know how windows are planned, nor read the time: `now` is an argument, in monotonic seconds.
"""

from __future__ import annotations

import math
import threading
from typing import Protocol

from gyre.rollouts.protocol.frames import DevicesReturned, LendDevices, ReclaimDevices, WindowStatus
from gyre.rollouts.scheduling.device_windows import TrainTime

SILENT_S = 30.0
"""A manager that was killed is back within seconds, and reports the status of its window every half second."""

AGAIN_S = 1.0
"""Pause after devices came back before they are lent again within a step, since the plan does not change at once."""


class SendsFrames(Protocol):
    def lend(self, frame: LendDevices | ReclaimDevices, /) -> bool:
        """Send the frame to the rollout manager. Whether it could."""


class DeviceLending:
    """`last_share` is the part of a step's training that can begin only after its last sample is delivered. `on_frame`
    may be called from any thread, everything else from one."""

    def __init__(self, plane: SendsFrames, *, last_share: float, now: float) -> None:
        self.lent_s = 0.0
        """For how long devices were lent, in all windows that have ended."""
        self.closed_because = ""
        """Why the last window ended."""
        self._plane = plane
        self._last_share = last_share
        self._lock = threading.Lock()
        self._window = 0
        self._lent = True
        self._lent_at = now
        self._has_frame = False
        self._last_frame_at = now
        self._back: DevicesReturned | None = None
        self._reclaimed = False
        self._not_before = now
        self._time = TrainTime()
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._delivered = self._trained = 0

    @property
    def is_lent(self) -> bool:
        return self._lent

    # -- what is measured ---------------------------------------------------------------------------

    def delivered(self, tokens: int) -> None:
        """Samples to train on were delivered, of so many tokens."""
        self._delivered += tokens

    def step_done(self) -> None:
        """Every sample delivered for the step is trained."""
        if self._busy_s > 0 and self._delivered:
            self._time.observe(self._delivered, self._busy_s)
        self._delivered, self._busy_s, self._trained = 0, 0.0, 0
        self._not_before = -math.inf

    # -- lending ------------------------------------------------------------------------------------

    def on_frame(self, frame: DevicesReturned | WindowStatus) -> None:
        with self._lock:
            if frame.window != self._window:
                return
            self._has_frame = True
            if isinstance(frame, DevicesReturned):
                self._back = frame

    def observe(self, now: float, *, training: bool, could_train: bool, waits: bool) -> None:
        """Called in every turn of the trainer's loop. `training` is whether a gang is at work, `could_train` whether
        there is something for it to do, or no gang, and `waits` whether requested samples are not delivered yet."""
        self._clock(now, training)
        with self._lock:
            has_frame, back = self._has_frame, self._back
            self._has_frame, self._back = False, None
        if has_frame:
            self._last_frame_at = now
        if self._lent:
            if back is not None:
                self._returned(now, back.reason)
            elif now - self._last_frame_at > SILENT_S:
                self._plane.lend(ReclaimDevices(window=self._window))
                self._returned(now, f"the rollout manager said nothing for {SILENT_S:g} s")
        elif waits and not training and not could_train and now >= self._not_before:
            window = self._window + 1
            lend = LendDevices(
                window=window,
                begun=self._trained > 0,
                arrived_tokens=self._delivered,
                train_s_per_token=self._time.predict_s(1.0),
                last_share=self._last_share,
            )
            with self._lock:
                self._window, self._back, self._has_frame = window, None, False
            if self._plane.lend(lend):
                self._lent, self._reclaimed = True, False
                self._lent_at = self._last_frame_at = now

    def take_back(self, now: float) -> bool:
        """Ask for lent devices back, since the trainer wants to use them now. Whether it has them."""
        if self._lent and not self._reclaimed:
            self._reclaimed = self._plane.lend(ReclaimDevices(window=self._window))
        return not self._lent

    def _returned(self, now: float, why: str) -> None:
        self._lent = False
        if self._window:
            self.lent_s += now - self._lent_at
            self.closed_because = why
        self._not_before = -math.inf if self._reclaimed else now + AGAIN_S

    def _clock(self, now: float, training: bool) -> None:
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
        self._busy_since = now if training else None
        if training:
            self._trained = 1
