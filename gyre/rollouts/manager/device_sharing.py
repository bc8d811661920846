"""The sharing of the trainer's own devices: windows that the rollout manager opens and closes.

The trainer lends its devices while it has nothing to train (`LendDevices`), and holds its micro-batches until they are
handed back (`DevicesReturned`). `plan_window` computes the window's end from measured rates. At the end samples on
local instances are recalled and go on elsewhere from their last token; then the local engines give their memory back,
and only then does the trainer hear of it.

    closed ── LendDevices ──▶ open ── planned end, nothing left, ReclaimDevices, trainer gone ──▶ closing
    closing ── all asleep ──▶ closed

Invariants:
- *lent or not*: outside of a window no local instance gets work or a policy to load, and its engine is asleep or
  absent;
- *together*: local instances that wake for a window get work together, so that the first does not take samples that the
  others could begin as soon; none waits for another longer than `TOGETHER_S`;
- *handed back when free*: the trainer is told after the last local engine said that it sleeps, was lost, or did not
  answer within its deadline;
- *nothing waits for ever*: an instance that does not give its samples back in time is lost, like one that fell silent;
- *explained*: opening and closing have a reason.

This module must not know about sockets, or how a plan is made; it reads no clock: `now` is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gyre.rollouts.core.admission import DeviceUse
from gyre.rollouts.core.groups import OpenGroups
from gyre.rollouts.core.requests import InFlightSample
from gyre.rollouts.manager.sessions import AgentSession
from gyre.rollouts.protocol.frames import (
    Asleep,
    Awake,
    DevicesReturned,
    Frame,
    LendDevices,
    Sleep,
    Wake,
    WindowStatus,
)
from gyre.rollouts.scheduling.device_windows import Smoothed, Window, WindowSettings, WindowState, plan_window

PLAN_EVERY_S = 0.5
"""How often a window is planned anew. A plan sums up all samples, which takes some milliseconds for ten thousand."""

CLOSE_WITHIN_S = 10.0
"""How long a local instance may take to give its samples back and fall asleep; an engine takes well under a second."""

TOGETHER_S = 0.25
"""How long an instance that has woken and loaded waits for the others. They do so within some hundredths of a second of
each other; the trainer should not wait for one that takes longer."""

TRAINER_AWAY_S = 3.0
"""Absence of a trainer after which the window closes: when it is back, it brings its ranks up on the devices."""


@dataclass(slots=True)
class _Lent:
    frame: LendDevices
    at: float
    delivered: int
    """Tokens that had been delivered when the devices were lent."""


class DeviceSharing:
    """The windows of one manager, whose `sessions` and `groups` it uses. It calls `tell(session, frame)`,
    `recall(states)`, `lose(session, reason)`, `refresh(session)` (send what the instance lacks, and compute its
    admission again), `answer(frame)` (to the trainer) and `on_event(kind, fields)` (for people)."""

    def __init__(
        self,
        groups: OpenGroups,
        sessions: Mapping[str, AgentSession],
        *,
        tell: Callable[[AgentSession, Frame], None],
        recall: Callable[[Iterable[InFlightSample]], None],
        lose: Callable[[AgentSession, str], None],
        refresh: Callable[[AgentSession], None],
        answer: Callable[[Frame], None],
        on_event: Callable[[str, dict[str, Any]], None],
        now: float,
        settings: WindowSettings | None = None,
        grace_s: float = 0.0,
    ) -> None:
        self.settings = settings or WindowSettings()
        self.window: Window | None = None
        """The plan; None while closed or closing."""
        self._groups = groups
        self._sessions = sessions
        self._tell = tell
        self._recall = recall
        self._lose = lose
        self._refresh = refresh
        self._answer = answer
        self._on_event = on_event
        self._lent: _Lent | None = None
        self._opened_at = 0.0
        self._opened_tokens = 0
        self._planned_at = -math.inf
        self._closing_since: float | None = None
        self._closing_why = ""
        self._quiet_until = now + grace_s
        """Time until which a trainer that lent its devices to the previous manager says so."""
        self._gone_at: float | None = None
        self._gathering = False
        """Whether local instances wake and load, and none of them works yet."""
        self._ready_since: float | None = None
        """When the first of them was ready."""
        self._phases: dict[str, float] = {}
        """Seconds from the window's opening to each of its phases."""
        self._local_rate = Smoothed(self.settings.smoothing_s)
        self._switch_s = Smoothed(10.0 * self.settings.smoothing_s)

    # -- what others ask ----------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self.window is not None

    @property
    def is_lent(self) -> bool:
        return self._lent is not None

    def device_use(self, session: AgentSession) -> DeviceUse:
        """How the instance may use its devices now."""
        if not session.hello.local:
            return DeviceUse.OWN
        if not self.is_open:
            return DeviceUse.NO_WINDOW
        if session.resting:
            return DeviceUse.ASLEEP
        return DeviceUse.GATHERING if self._gathering else DeviceUse.LENT

    def may_load(self, session: AgentSession) -> bool:
        """Whether its engine may be started or load a policy now, both of which take memory."""
        return not session.hello.local or (self.is_open and not session.resting)

    def status(self, now: float) -> dict[str, Any]:
        window = self.window
        if window is None:
            state = "closing" if self._closing_since is not None else "closed"
            return {"state": state, "reason": self._closing_why}
        left_s = window.until_s - now
        return {
            "state": "open",
            "reason": window.reason,
            "open_s": round(now - self._opened_at, 3),
            "left_s": round(left_s, 3) if math.isfinite(left_s) else None,
        }

    # -- the trainer --------------------------------------------------------------------------------

    def lend(self, frame: LendDevices, now: float) -> None:
        """Take the trainer's devices. A repetition, after a reconnect, changes nothing."""
        self._gone_at = None
        if self._lent is not None and self._lent.frame.window == frame.window:
            return
        self._lent = _Lent(frame, now, self._groups.account.delivered)
        if not self._locals():
            self._hand_back(now, "there is no local instance")
            return
        if self._closing_since is not None:
            return  # the last window is still closing; decided when it is closed
        self._decide(now)
        self.look(now)  # they wake at once

    def reclaim(self, window: int, now: float) -> None:
        """Close the window, because the trainer needs its devices now."""
        if self._lent is None or self._lent.frame.window != window:
            # This manager does not know the window, or has handed it back: the devices are free when all sleep.
            self._lent = _Lent(
                LendDevices(
                    window=window, begun=True, arrived_tokens=0, train_s_per_token=0.0, last_share=0.0
                ),
                now,
                self._groups.account.delivered,
            )
        self._close(now, "the trainer needs its devices")

    def trainer_left(self, now: float) -> None:
        self._gone_at = now

    def trainer_attached(self, now: float, *, other: bool) -> None:
        """Note that a trainer is attached. With `other` it is not the one that lent its devices, and says itself what
        it needs."""
        self._gone_at = None
        if other and self._lent is not None:
            self._lent = None
            self._close(now, "another trainer has taken over")

    # -- local instances ----------------------------------------------------------------------------

    def asleep(self, session: AgentSession, frame: Asleep, now: float) -> None:
        session.resting = "asleep"
        if frame.error:
            self._on_event("MemoryNotReleased", {"instance": session.name, "error": frame.error[:2000]})
        self.look(now)

    def awake(self, session: AgentSession, frame: Awake, now: float) -> None:
        session.resting = ""
        self._refresh(session)
        self._passed("awake_s", now)
        self.look(now)

    def loaded(self, session: AgentSession, now: float) -> None:
        """Note that the instance serves the version that it was told to load."""
        if session.hello.local:
            self._passed("loaded_s", now)
            self._gather(now)
            if self._closing_since is not None:
                self._put_to_sleep(now)

    def ended(self, session: AgentSession, now: float) -> None:
        """Note that samples of the instance ended."""
        if self.window is not None:
            self._passed("last_ended_s", now)
            if not any(one.held for one in self._groups.instances.values()) and self._is_done():
                self.look(now)
        elif self._closing_since is not None and session.hello.local:
            instance = self._groups.instances.get(session.name)
            if instance is not None and not instance.held:
                self._put_to_sleep(now)

    def engine_died(self, session: AgentSession) -> None:
        session.resting = ""

    def _passed(self, what: str, now: float) -> None:
        if self.window is not None:
            self._phases[what] = round(now - self._opened_at, 4)

    def _gather(self, now: float) -> None:
        """Let all local instances work when the last is ready, or the first has waited long enough."""
        if not self._gathering:
            return
        waking = [
            session
            for session in self._locals()
            if session.connection is not None
            and not session.draining
            and self._groups.instances[session.name].version >= 0
        ]
        ready = [session for session in waking if not session.resting and session.loading is None]
        if ready and self._ready_since is None:
            self._ready_since = now
        waited = self._ready_since is not None and now - self._ready_since >= TOGETHER_S
        if len(ready) < len(waking) and not waited:
            return
        self._gathering = False
        self._passed("working_s", now)
        for session in self._locals():
            self._refresh(session)

    def _locals(self) -> list[AgentSession]:
        return [session for session in self._sessions.values() if session.hello.local]

    # -- time ---------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Plan and act; called every so often, and after changes."""
        if self._gone_at is not None and now - self._gone_at > TRAINER_AWAY_S:
            self._gone_at = None
            self._lent = None
            self._close(now, "the trainer is gone")
        if self.window is not None:
            self._measure(now)
            if now - self._planned_at >= PLAN_EVERY_S or not self.window.is_open(now) or self._is_done():
                self._decide(now)
        if self.window is not None:
            for session in self._locals():
                if session.resting == "asleep" and session.connection is not None and not session.draining:
                    session.resting, session.resting_since = "waking", now
                    self._tell(session, Wake())
            self._gather(now)
        elif self._closing_since is not None or now >= self._quiet_until:
            self._put_to_sleep(now)
        if (
            self._closing_since is not None
            and self._lent is not None
            and now - self._planned_at >= PLAN_EVERY_S
        ):
            # It may take long, while an instance loads; whoever hears nothing takes its devices back from under it.
            self._planned_at = now
            self._answer(WindowStatus(window=self._lent.frame.window, left_s=0.0, reason=self._closing_why))

    def _is_done(self) -> bool:
        """Whether all is generated, so that the trainer waits only for its devices."""
        return next(self._groups.unfinished(), None) is None

    def _measure(self, now: float) -> None:
        rate = sum(s.rate_tokens_s for s in self._locals() if self._groups.instances[s.name].held)
        if rate > 0:
            self._local_rate.observe(rate, now)

    def _decide(self, now: float) -> None:
        """Open, continue or close the window by the present plan."""
        lent = self._lent
        assert lent is not None, "a window is open or opens for a trainer that lent its devices"
        self._planned_at = now
        before = self.window
        plan_state = self._state(lent, now)
        plan = plan_window(plan_state, self.settings)
        if not plan.is_open(now):
            if before is None:
                self._hand_back(now, plan.reason)
            else:
                as_planned = before.until_s - now < 2.0 * PLAN_EVERY_S and plan_state.tokens_left > 0
                self._close(now, before.reason if as_planned else plan.reason)
            return
        self.window = plan
        if before is None:
            self._opened_at, self._opened_tokens = now, self._made()
            self._phases = {}
            self._gathering, self._ready_since = True, None
            self._on_event("WindowOpened", {"window": lent.frame.window, "reason": plan.reason})
            for session in self._locals():
                self._refresh(session)
        left_s = plan.until_s - now
        self._answer(
            WindowStatus(
                window=lent.frame.window,
                left_s=left_s if math.isfinite(left_s) else None,
                reason=plan.reason,
            )
        )

    def _state(self, lent: _Lent, now: float) -> WindowState:
        groups = self._groups
        unfinished = [(state.length, state.request.max_new_tokens) for state in groups.unfinished()]
        outlook = groups.placement.load.lengths.outlook(unfinished)
        remote = [
            name
            for name, session in self._sessions.items()
            if not session.hello.local and groups.instances[name].accepting
        ]
        frame = lent.frame
        train_tokens = (
            frame.arrived_tokens
            + (groups.account.delivered - lent.delivered)
            + groups.in_flight_tokens
            + outlook.tokens_left
        )
        train_s = frame.train_s_per_token * train_tokens
        generating = self.window is not None or not frame.begun
        planned = self.window.until_s if self.window is not None else None
        return WindowState(
            now_s=now,
            tokens_left=outlook.tokens_left,
            samples_left=outlook.samples_left,
            longest_left_tokens=outlook.longest_left_tokens,
            sample_tokens_s=max((groups.instances[name].sample_tokens_s for name in remote), default=0.0),
            local_tokens_s=self._local_rate.value,
            remote_tokens_s=sum(groups.instances[name].rate_tokens_s for name in remote),
            train_s=train_s,
            last_train_s=train_s * frame.last_share,
            switch_s=self._switch_s.value,
            generating=generating,
            planned_until_s=planned if planned is not None and math.isfinite(planned) else None,
        )

    # -- the end ------------------------------------------------------------------------------------

    def _close(self, now: float, why: str) -> None:
        if self.window is not None:
            self._on_event(
                "WindowClosed",
                {
                    "window": self._lent.frame.window if self._lent is not None else -1,
                    "reason": why,
                    "open_s": round(now - self._opened_at, 3),
                    "tokens": max(0, self._made() - self._opened_tokens),  # without those of the lost
                    **self._phases,
                },
            )
        self.window = None
        self._gathering = False
        if self._closing_since is None:
            self._closing_since = now
        self._closing_why = why
        for session in self._locals():
            self._refresh(session)
        self._put_to_sleep(now)

    def _made(self) -> int:
        return sum(
            self._groups.instances[s.name].generated_tokens
            for s in self._locals()
            if s.name in self._groups.instances
        )

    def _put_to_sleep(self, now: float) -> None:
        late = self._closing_since is not None and now - self._closing_since > CLOSE_WITHIN_S
        busy = 0
        for session in self._locals():
            instance = self._groups.instances.get(session.name)
            if session.resting == "asleep" or instance is None:
                continue
            if instance.held:
                if late:
                    self._lose(session, "window_not_closed")
                    continue
                self._recall(self._groups.held_by(session.name))
            elif session.connection is None or session.loading is not None:
                pass  # it is lost, or has loaded, within deadlines of their own
            elif instance.version < 0:
                continue  # it has no engine
            elif not session.resting:
                session.resting, session.resting_since = "falling", now
                self._tell(session, Sleep())
            elif now - session.resting_since > CLOSE_WITHIN_S:
                self._lose(session, "window_not_closed")
                continue
            busy += 1
        if busy or self._closing_since is None:
            return
        self._switch_s.observe(now - self._closing_since, now)
        self._on_event("DevicesFree", {"after_s": round(now - self._closing_since, 4)})
        self._closing_since = None
        if self._lent is not None:
            self._hand_back(now, self._closing_why)

    def _hand_back(self, now: float, why: str) -> None:
        assert self._lent is not None
        frame, self._lent = self._lent.frame, None
        self._closing_why = why
        self._answer(DevicesReturned(window=frame.window, reason=why))
