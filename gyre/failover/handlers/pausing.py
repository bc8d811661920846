"""Decisions about pausing: the trainer holds after its step until it is resumed."""

from __future__ import annotations

from collections.abc import Iterable

from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.draft import Draft
from gyre.failover.layout import JobLayout
from gyre.failover.state import JobPhase
from gyre.failover.vertices import live_trainer


def pause_requested(
    layout: JobLayout, draft: Draft, event: e.PauseRequested, now: float
) -> Iterable[c.Command]:
    if draft.job.paused or draft.job.phase is JobPhase.STOPPING:
        return
    draft.set_job(paused=True)
    if (trainer := live_trainer(draft)) is not None:
        yield c.PauseTrainer(trainer.incarnation)


def resume_requested(
    layout: JobLayout, draft: Draft, event: e.ResumeRequested, now: float
) -> Iterable[c.Command]:
    if not draft.job.paused or draft.job.phase is JobPhase.STOPPING:
        return
    draft.set_job(paused=False)
    if (trainer := live_trainer(draft)) is not None:
        yield c.ResumeTrainer(trainer.incarnation)
