"""What is said of a job, from what its journal holds: one table, of which the page, the running lines, the panel, the
last line and `gyre show` each have their words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from gyre.api.cli.look import show_view
from gyre.api.now import now_of
from gyre.api.terminal.live import line_of
from gyre.api.terminal.panel import draw_panel
from gyre.api.terminal.run_end import last_lines
from gyre.api.terminal.run_history import RunHistory
from gyre.failover import JobPhase, JobState, Reason
from gyre.failover.state import Incident, JobRecord, Scope, TrainingRecord
from gyre.master.master_api import view_of

STEP = {"step": 25, "reward_mean": 0.7}
SPENT = {"spent_s": {"actor": {"waits for rollout (generating)": 62.0, "training": 37.0, "publishing": 1.0}}}
TIMES = {"times": {"actor": {"waits for rollout (generating)": 0.98, "training": 0.02}}}
LIVE = {"step": 25, "steps": 40, "version": 25, "tokens_per_s": 1234.0, "step_s": 7.5} | TIMES
SPEED = ("tok/s", "1,234", "1.2k", "7.5 s", "8 s a step", "bottleneck")
"""What no sentence has of a job that makes no steps: none of these is so any longer."""
DONE = {"step": 25, "steps": 25, "version": 25} | SPENT
DISK = {
    "disk": {
        "where": "/data",
        "node": "",
        "required_bytes": 9,
        "available_bytes": 1,
        "since": 5.0,
        "said": True,
    }
}
GONE = "gyre.db is gone: it was deleted or moved."


def state(
    phase: str = "running", *, step: int = 25, incidents: tuple[Incident, ...] = (), **job: Any
) -> JobState:
    record = JobRecord("j-1", "small", JobPhase(phase), submitted_at=100.0, step=step, version=step)
    if record.phase.ended:
        job = {"ended_at": 160.0} | job
    training = TrainingRecord({"step": 1, "reward_mean": 0.1}, STEP, 9) if step else TrainingRecord()
    return JobState(
        job=replace(record, **job), training=training, incidents={one.id: one for one in incidents}
    )


def incident(
    number: int, *, user: bool = False, scope: Scope = Scope.REGION, outcome: str = "recovered"
) -> Incident:
    cause = "user_code" if user else "process_died"
    back = None if outcome != "recovered" else 120.0 if scope is Scope.RETRY else 130.0
    return Incident(
        f"reward-0/{number}", 120.0, "reward-0", 1, cause, scope, "d", {"error": "ValueError"}, user,
        recovered_at=back, outcome=outcome,
    )  # fmt: skip


BUG = (
    *(incident(at, user=True, scope=Scope.RETRY) for at in range(3)),
    incident(3, user=True, scope=Scope.GIVE_UP, outcome="gave up"),
)

SENTENCES: dict[str, tuple[JobState, dict[str, Any], dict[str, Any]]] = {
    "it runs": (
        state(),
        {"progress": LIVE, "asked": 40},
        {
            "page": "Trains at step 25 of 40, 1.2k tok/s; the actor waits 98 % of its time for samples.",
            "slow": "rollout: the actor waits 98 % of its time for samples.",
            "step": "25 of 40",
            "line": "running · step 25/40 · 1,234 tok/s · policy v25 · bottleneck: rollout; the actor waits 98 %",
            "panel": "1,234 tok/s",
            "tokens/s": "1.2k",
        },
    ),
    "its store is lost": (
        state(),
        {"progress": LIVE, "asked": 40, "store_error": GONE},
        {
            "page": f"The store is out of reach, and training waits for it: {GONE}",
            "slow": "The job lacks something first (store lost). What else is slow is said when that is over.",
            "line": "running (store lost) · step 25/40",
            "panel": "The store is out of reach",
            "show": f"phase running (store_lost) The store is out of reach, and training waits for it: {GONE}",
            "never": SPEED,
        },
    ),
    "it is paused": (
        state("paused"),
        {"progress": LIVE, "asked": 40},
        {
            "page": "Paused after step 25.",
            "line": "paused · step 25/40 · policy v25",
            "panel": "policy v25",
            "never": SPEED,
        },
    ),
    "a disk is full": (
        state(reason=Reason.DISK_FULL, message="/data has no room", full_disks=DISK),
        {"progress": LIVE, "asked": 40},
        {
            "page": "/data has no room.",
            "slow": "The job lacks something first (disk full).",
            "line": "running (disk full)",
            "panel": "/data has no room",
            "show": "phase running (disk_full) /data has no room",
            "never": "bottleneck",
        },
    ),
    "a disk is full, and the journal does not have it": (
        state(),
        {
            "progress": LIVE,
            "decided": state(reason=Reason.DISK_FULL, message="/data has no room", full_disks=DISK),
            "store_error": "database or disk is full",
        },
        {"page": "/data has no room.", "line": "running (disk full)", "never": "bottleneck"},
    ),
    "it waits for room": (
        state("recovering", reason=Reason.NO_ROOM, message="actor-0 needs 8 GPUs, 4 are free"),
        {"progress": LIVE, "asked": 40},
        {
            "page": "actor-0 needs 8 GPUs, 4 are free.",
            "slow": "The job lacks something first (no room).",
            "line": "recovering (no room)",
            "panel": "actor-0 needs 8 GPUs",
            "never": "bottleneck",
        },
    ),
    "it is finished": (
        state("succeeded", reason=Reason.FINISHED),
        {"progress": DONE, "asked": 25},
        {
            "page": "Succeeded after 1 min: 25 steps, reward 0.1 → 0.7",
            "slow": "rollout: the actor waited 62 % of its time for samples.",
            "step": "25",
            "last": "small succeeded after 1 min: 25 steps, reward 0.1 -> 0.7",
            "show": "bottleneck rollout; the actor waited 62 % of its time for samples",
        },
    ),
    "it was stopped before its end": (
        state("stopped", reason=Reason.STOP_REQUESTED, message="interrupted by Ctrl-C"),
        {"progress": DONE, "asked": 40},
        {
            "page": "Stopped by Ctrl-C after 1 min: 25 of 40 steps",
            "slow": "rollout: the actor waited 62 %",
            "step": "25 of 40",
            "last": "small stopped by Ctrl-C after 1 min: 25 of 40 steps, reward",
            "show": "learnt 25 of 40 steps",
        },
    ),
    "its cluster is gone, and with it what it was slow by": (
        state("failed", reason=Reason.CLUSTER_LOST, message="its Ray cluster is gone"),
        {"progress": {"step": 25}, "asked": 40, "answering": False},
        {
            "page": "Its Ray cluster is gone. gyre resume small goes on from its beginning.",
            "show": "to go on gyre resume small goes on from its beginning",
            "slow": "It is not known how the job spent its time.",
            "last": "25 of 40 steps, reward 0.1 -> 0.7, 9 tokens; its Ray cluster is gone",
        },
    ),
    "it failed for want of room": (
        state("failed", reason=Reason.NO_ROOM, message="no room for 600 s", step=0),
        {"progress": {"step": 0}, "asked": 40},
        {"page": "No room for 600 s.", "slow": "No step was made.", "step": "0 of 40"},
    ),
    "the user's function raised until the job failed": (
        state("failed", incidents=BUG, message="ValueError"),
        {"progress": DONE, "asked": 40},
        {
            "incidents": "the job's own code raised 4 times",
            "last": "the job's own code raised 4 times; ValueError",
            "show": "called again",
            "never": "recovered",
        },
    ),
    "an engine died, and another has started": (
        state(incidents=(replace(incident(7), cause="engine_died", scope=Scope.RETRY),)),
        {"progress": LIVE},
        {"incidents": "1 incident, 1 recovered", "show": "10 s", "never": "called again"},
    ),
    "a machine died, and code raised": (
        state(incidents=(incident(7), incident(8, outcome="left alone"), *BUG[:1])),
        {"progress": LIVE},
        {"incidents": "2 incidents, 1 recovered, the job's own code raised once", "show": "10 s"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SENTENCES)
def test_what_is_said_of_a_job(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts, more, expected = SENTENCES[name]
    view = view_of(facts, seq=1, **more)
    now = now_of(view, [], 200.0)
    history = RunHistory()
    if not facts.job.phase.ended:  # whoever watches saw it train before
        history.observe(view_of(state(step=24), seq=0, progress=LIVE | {"step": 24}), 0.0)
    history.observe(view, 0.0)
    show_view(view)
    shown = " ".join(capsys.readouterr().out.split())
    console = Console(width=200, record=True)
    with console.capture() as captured:
        console.print(draw_panel(view, history, at=200.0, now=0.0, width=200, height=60))
    found = {
        "page": now["sentence"],
        "slow": now["slow"]["words"],
        "line": line_of(view, history),
        "panel": captured.get(),
        "last": " ".join(last_lines(view)),
        "show": shown,
        **{fact["label"]: fact["value"] for fact in now["facts"]},
    }
    for where, words in expected.items():
        if where == "never":
            for word in words if isinstance(words, tuple) else (words,):
                told = {place: text for place, text in found.items() if word in text}
                assert told == {}, f"{word!r} is said"
        elif where in ("step", "incidents"):
            assert found[where] == words
        else:
            assert words in found[where]
