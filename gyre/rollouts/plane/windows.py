"""The sharing of the trainer's own devices: windows which the machine opens and closes.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gyre.rollouts.plane import leaving, placement
from gyre.rollouts.plane.admission import DeviceUse
from gyre.rollouts.plane.links import AgentLink
from gyre.rollouts.plane.peers import Peer
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

if TYPE_CHECKING:
    from gyre.rollouts.plane.state import Plane

PLAN_EVERY_S = 0.5
"""How often a window is planned anew. A plan sums up all samples, which takes some milliseconds for ten thousand."""

CLOSE_WITHIN_S = 10.0
"""How long a local instance may take to give its samples back and fall asleep; an engine takes well under a second."""

TOGETHER_S = 0.25
"""How long an instance that has woken and loaded waits for the others. They do so within some hundredths of a second of
each other; the trainer should not wait for one that takes longer."""

TRAINER_AWAY_S = 3.0
"""Absence of a trainer after which the window closes: when it is back, it brings its ranks up on the devices."""

NO_LOCAL = "there is no local instance"
"""Why a window does not open."""


@dataclass(slots=True)
class Lent:
    frame: LendDevices
    at: float
    delivered: int
    """Tokens that had been delivered when the devices were lent."""


class Windows:
    """The windows of one manager, which began at `now`. A trainer that lent its devices to the one before says so
    within `grace_s`."""

    def __init__(self, now: float, *, grace_s: float = 0.0, settings: WindowSettings | None = None) -> None:
        self.settings = settings or WindowSettings()
        self.window: Window | None = None
        """The plan; None while closed or closing."""
        self.lender: Peer | None = None
        """The trainer that is attached."""
        self.lent: Lent | None = None
        self.opened_at = 0.0
        self.opened_tokens = 0
        self.planned_at = -math.inf
        self.closing_since: float | None = None
        self.closing_why = ""
        self.quiet_until = now + grace_s
        """Time until which a trainer that lent its devices to the previous manager says so."""
        self.gone_at: float | None = None
        """When the trainer left."""
        self.gathering = False
        """Whether local instances wake and load, and none of them works yet."""
        self.ready_since: float | None = None
        """When the first of them was ready."""
        self.phases: dict[str, float] = {}
        """Seconds from the window's opening to each of its phases."""
        self.local_rate = Smoothed(self.settings.smoothing_s)
        self.switch_s = Smoothed(10.0 * self.settings.smoothing_s)

    @property
    def is_open(self) -> bool:
        return self.window is not None

    @property
    def is_lent(self) -> bool:
        return self.lent is not None

    def device_use(self, link: AgentLink) -> DeviceUse:
        """How the instance may use its devices now."""
        if not link.hello.local:
            return DeviceUse.OWN
        if not self.is_open:
            return DeviceUse.NO_WINDOW
        if link.resting:
            return DeviceUse.ASLEEP
        return DeviceUse.GATHERING if self.gathering else DeviceUse.LENT

    def may_load(self, link: AgentLink) -> bool:
        """Whether its engine may be started or load a policy now, both of which take memory."""
        return not link.hello.local or (self.is_open and not link.resting)

    def status(self, now: float) -> dict[str, Any]:
        window = self.window
        if window is None:
            state = "closing" if self.closing_since is not None else "closed"
            return {"state": state, "reason": self.closing_why}
        left_s = window.until_s - now
        return {
            "state": "open",
            "reason": window.reason,
            "open_s": round(now - self.opened_at, 3),
            "left_s": round(left_s, 3) if math.isfinite(left_s) else None,
        }


# -- the trainer --------------------------------------------------------------------------------


def lend(plane: Plane, frame: LendDevices) -> None:
    """Take the trainer's devices. A repetition, after a reconnect, changes nothing."""
    windows = plane.windows
    windows.gone_at = None
    if windows.lent is not None and windows.lent.frame.window == frame.window:
        return
    windows.lent = Lent(frame, plane.now, plane.groups.account.delivered)
    if not _locals(plane):
        if windows.window is not None:  # of a window before, which the trainer does not know any more
            _close(plane, NO_LOCAL)
        else:
            _hand_back(plane, NO_LOCAL)
        return
    if windows.closing_since is not None:
        return  # the last window is still closing; decided when it is closed
    _decide(plane)
    look(plane)  # they wake at once


def reclaim(plane: Plane, window: int) -> None:
    """Close the window, because the trainer needs its devices now."""
    windows = plane.windows
    if windows.lent is None or windows.lent.frame.window != window:
        # This manager does not know the window, or has handed it back: the devices are free when all sleep.
        windows.lent = Lent(
            LendDevices(window=window, begun=True, arrived_tokens=0, train_s_per_token=0.0, last_share=0.0),
            plane.now,
            plane.groups.account.delivered,
        )
    _close(plane, "the trainer needs its devices")


def trainer_left(plane: Plane) -> None:
    plane.windows.gone_at, plane.windows.lender = plane.now, None


def trainer_attached(plane: Plane, lender: Peer, *, other: bool) -> None:
    """Note that a trainer is attached. With `other` it is not the one that lent its devices, and says itself what
    it needs."""
    plane.windows.gone_at, plane.windows.lender = None, lender
    if other and plane.windows.lent is not None:
        plane.windows.lent = None
        _close(plane, "another trainer has taken over")


# -- local instances ----------------------------------------------------------------------------


def asleep(plane: Plane, link: AgentLink, frame: Asleep) -> None:
    link.resting = "asleep"
    if frame.error:
        plane.report_event("MemoryNotReleased", {"instance": link.name, "error": frame.error[:2000]})
    look(plane)


def awake(plane: Plane, link: AgentLink, frame: Awake) -> None:
    link.resting = ""
    leaving.refresh(plane, link)
    _passed(plane, "awake_s")
    look(plane)


def loaded(plane: Plane, link: AgentLink) -> None:
    """Note that the instance serves the version that it was told to load."""
    if link.hello.local:
        _passed(plane, "loaded_s")
        _gather(plane)
        if plane.windows.closing_since is not None:
            _put_to_sleep(plane)


def ended(plane: Plane, link: AgentLink) -> None:
    """Note that samples of the instance ended."""
    if plane.windows.window is not None:
        _passed(plane, "last_ended_s")
        if not any(one.held for one in plane.groups.instances.values()) and _is_done(plane):
            look(plane)
    elif plane.windows.closing_since is not None and link.hello.local:
        instance = plane.groups.instances.get(link.name)
        if instance is not None and not instance.held:
            _put_to_sleep(plane)


def _passed(plane: Plane, what: str) -> None:
    windows = plane.windows
    if windows.window is not None:
        windows.phases[what] = round(plane.now - windows.opened_at, 4)


def _gather(plane: Plane) -> None:
    """Let all local instances work when the last is ready, or the first has waited long enough."""
    windows = plane.windows
    if not windows.gathering:
        return
    waking = [
        link
        for link in _locals(plane)
        if link.connection is not None
        and not link.draining
        and plane.groups.instances[link.name].version >= 0
    ]
    ready = [link for link in waking if not link.resting and link.loading is None]
    if ready and windows.ready_since is None:
        windows.ready_since = plane.now
    waited = windows.ready_since is not None and plane.now - windows.ready_since >= TOGETHER_S
    if len(ready) < len(waking) and not waited:
        return
    windows.gathering = False
    _passed(plane, "working_s")
    for link in _locals(plane):
        leaving.refresh(plane, link)


def _locals(plane: Plane) -> list[AgentLink]:
    return [link for link in plane.links.values() if link.hello.local]


# -- time ---------------------------------------------------------------------------------------


def look(plane: Plane) -> None:
    """Plan and act; called every so often, and after changes."""
    windows = plane.windows
    if windows.gone_at is not None and plane.now - windows.gone_at > TRAINER_AWAY_S:
        windows.gone_at = None
        windows.lent = None
        _close(plane, "the trainer is gone")
    if windows.window is not None:
        _measure(plane)
        if (
            plane.now - windows.planned_at >= PLAN_EVERY_S
            or not windows.window.is_open(plane.now)
            or _is_done(plane)
        ):
            _decide(plane)
    if windows.window is not None:
        for link in _locals(plane):
            if link.resting == "asleep" and link.connection is not None and not link.draining:
                link.resting, link.resting_since = "waking", plane.now
                placement.send(plane, link, Wake())
        _gather(plane)
    elif windows.closing_since is not None or plane.now >= windows.quiet_until:
        _put_to_sleep(plane)
    if (
        windows.closing_since is not None
        and windows.lent is not None
        and plane.now - windows.planned_at >= PLAN_EVERY_S
    ):
        # It may take long, while an instance loads; whoever hears nothing takes its devices back from under it.
        windows.planned_at = plane.now
        _answer(plane, WindowStatus(window=windows.lent.frame.window, left_s=0.0, reason=windows.closing_why))


def _is_done(plane: Plane) -> bool:
    """Whether all is generated, so that the trainer waits only for its devices."""
    return next(plane.groups.unfinished(), None) is None


def _measure(plane: Plane) -> None:
    rate = sum(s.rate_tokens_s for s in _locals(plane) if plane.groups.instances[s.name].held)
    if rate > 0:
        plane.windows.local_rate.observe(rate, plane.now)


def _decide(plane: Plane) -> None:
    """Open, continue or close the window by the present plan."""
    windows = plane.windows
    lent = windows.lent
    assert lent is not None, "a window is open or opens for a trainer that lent its devices"
    windows.planned_at = plane.now
    before = windows.window
    plan_state = _state(plane, lent)
    plan = plan_window(plan_state, windows.settings)
    if not plan.is_open(plane.now):
        if before is None:
            _hand_back(plane, plan.reason)
        else:
            as_planned = before.until_s - plane.now < 2.0 * PLAN_EVERY_S and plan_state.tokens_left > 0
            _close(plane, before.reason if as_planned else plan.reason)
        return
    windows.window = plan
    if before is None:
        windows.opened_at, windows.opened_tokens = plane.now, _made(plane)
        windows.phases = {}
        windows.gathering, windows.ready_since = True, None
        plane.report_event("WindowOpened", {"window": lent.frame.window, "reason": plan.reason})
        for link in _locals(plane):
            leaving.refresh(plane, link)
    left_s = plan.until_s - plane.now
    _answer(
        plane,
        WindowStatus(
            window=lent.frame.window,
            left_s=left_s if math.isfinite(left_s) else None,
            reason=plan.reason,
        ),
    )


def _state(plane: Plane, lent: Lent) -> WindowState:
    windows = plane.windows
    groups = plane.groups
    unfinished = [(state.length, state.request.max_new_tokens) for state in groups.unfinished()]
    outlook = groups.placement.load.lengths.outlook(unfinished)
    remote = [
        name
        for name, link in plane.links.items()
        if not link.hello.local and groups.instances[name].accepting
    ]
    frame = lent.frame
    train_tokens = (
        frame.arrived_tokens
        + (groups.account.delivered - lent.delivered)
        + groups.in_flight_tokens
        + outlook.tokens_left
    )
    train_s = frame.train_s_per_token * train_tokens
    generating = windows.window is not None or not frame.begun
    planned = windows.window.until_s if windows.window is not None else None
    return WindowState(
        now_s=plane.now,
        tokens_left=outlook.tokens_left,
        samples_left=outlook.samples_left,
        longest_left_tokens=outlook.longest_left_tokens,
        sample_tokens_s=max((groups.instances[name].sample_tokens_s for name in remote), default=0.0),
        local_tokens_s=windows.local_rate.value,
        remote_tokens_s=sum(groups.instances[name].rate_tokens_s for name in remote),
        train_s=train_s,
        last_train_s=train_s * frame.last_share,
        switch_s=windows.switch_s.value,
        generating=generating,
        planned_until_s=planned if planned is not None and math.isfinite(planned) else None,
    )


# -- the end ------------------------------------------------------------------------------------


def _close(plane: Plane, why: str) -> None:
    windows = plane.windows
    if windows.window is not None:
        plane.report_event(
            "WindowClosed",
            {
                "window": windows.lent.frame.window if windows.lent is not None else -1,
                "reason": why,
                "open_s": round(plane.now - windows.opened_at, 3),
                "tokens": max(0, _made(plane) - windows.opened_tokens),  # without those of the lost
                **windows.phases,
            },
        )
    windows.window = None
    windows.gathering = False
    if windows.closing_since is None:
        windows.closing_since = plane.now
    windows.closing_why = why
    for link in _locals(plane):
        leaving.refresh(plane, link)
    _put_to_sleep(plane)


def _made(plane: Plane) -> int:
    return sum(
        plane.groups.instances[s.name].generated_tokens
        for s in _locals(plane)
        if s.name in plane.groups.instances
    )


def _put_to_sleep(plane: Plane) -> None:
    windows = plane.windows
    late = windows.closing_since is not None and plane.now - windows.closing_since > CLOSE_WITHIN_S
    busy = 0
    for link in _locals(plane):
        instance = plane.groups.instances.get(link.name)
        if link.resting == "asleep" or instance is None:
            continue
        if instance.held:
            if late:
                leaving.lose(plane, link, "window_not_closed")
                continue
            placement.recall(plane, plane.groups.held_by(link.name))
        elif link.connection is None or link.loading is not None:
            pass  # it is lost, or has loaded, within deadlines of their own
        elif instance.version < 0:
            continue  # it has no engine
        elif not link.resting:
            link.resting, link.resting_since = "falling", plane.now
            placement.send(plane, link, Sleep())
        elif plane.now - link.resting_since > CLOSE_WITHIN_S:
            leaving.lose(plane, link, "window_not_closed")
            continue
        busy += 1
    if busy or windows.closing_since is None:
        return
    windows.switch_s.observe(plane.now - windows.closing_since, plane.now)
    plane.report_event("DevicesFree", {"after_s": round(plane.now - windows.closing_since, 4)})
    windows.closing_since = None
    if windows.lent is not None:
        _hand_back(plane, windows.closing_why)


def _hand_back(plane: Plane, why: str) -> None:
    windows = plane.windows
    assert windows.lent is not None
    frame, windows.lent = windows.lent.frame, None
    windows.closing_why = why
    _answer(plane, DevicesReturned(window=frame.window, reason=why))


def _answer(plane: Plane, frame: Frame) -> None:
    """Send it to the trainer that is attached, if any."""
    if plane.windows.lender is not None:
        plane.send(plane.windows.lender, frame)
