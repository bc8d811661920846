"""What a job did, in numbers: from its journal, and from what `Watch` wrote beside it. Times are in seconds from the
command's start."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from job_plane.case import Row

WARM = 5
"""Steps before a steady rate is taken: the engine begins empty, and the first groups all end together."""


def account(home: Path, out: Path, label: str, *, began: float, ended: float, stopped: float) -> Row:
    """The job by what is there of it, also while it runs."""
    try:
        events = events_of(home, began)
    except IndexError:
        return {"error": "no job was submitted"}
    with (out / f"{label}_events.jsonl").open("w") as lines:
        lines.writelines(json.dumps(event) + "\n" for event in events)
    looks = looks_in(out, label)
    gpus = list(gpu_samples(out / f"{label}_gpus.csv", began))
    return {
        **facts(events),
        "ledger": ledger_of(home),
        "gpu_peak_mib": {
            str(gpu): max(used for _, which, _, used in gpus if which == gpu)
            for gpu in sorted({which for _, which, _, _ in gpus})
        },
        **numbers(events, looks, gpus, ended_s=ended - began, stopped_s=stopped and stopped - began),
    }


def events_of(home: Path, began: float, after: int = 0) -> list[Row]:
    """The events of the home's job that are numbered after `after`. Raises IndexError where there is no job yet."""
    from gyre.store import open_store

    database = home / "gyre.db"
    if not database.exists():
        raise IndexError("there is no database yet")
    with open_store(f"sqlite:///{database}") as store:
        entries = store.journal(store.jobs()[0].job_id).events(after=after)
    return [
        {
            "seq": entry.seq,
            "at": entry.at,
            "at_s": round(entry.at - began, 3),
            "kind": entry.kind,
            "body": entry.body,
        }
        for entry in entries
    ]


def ledger_of(home: Path) -> Row:
    """What became of every prompt that was drawn: the counts, and the ids of what was lost or trained twice."""
    from gyre.rollouts.trainer.sample_ledger import account_of
    from gyre.store import open_store

    with open_store(f"sqlite:///{home / 'gyre.db'}") as store:
        told = account_of(store.ledger(store.jobs()[0].job_id))
    return {
        "drawn": told.drawn,
        "trained": told.trained,
        "waiting": told.waiting,
        "dropped": told.dropped,
        "lost": list(told.lost),
        "trained_twice": list(told.trained_twice),
    }


def facts(events: Sequence[Row]) -> Row:
    """What happened beside the steps: starts, deaths, silences and how many of them were false alarms, restores, passes
    that were halved, and the largest of what the ranks say of their memory, where they do."""
    started: dict[str, list[float]] = {}
    alarms: dict[str, int] = {}
    memory: dict[str, float] = {}
    rows: dict[str, list[Row]] = {kind: [] for kind in _TOLD}
    for event in events:
        at_s, kind, body = event["at_s"], event["kind"], event["body"]
        if kind == "VertexStarted":
            started.setdefault(body["vertex"], []).append(at_s)
        elif kind == "MasterStarted":
            started.setdefault("master", []).append(at_s)
        elif kind == "VertexHeardAgain":
            alarms[body["vertex"]] = alarms.get(body["vertex"], 0) + 1
        elif kind == "StepCompleted":
            for name, value in body["metrics"].items():
                if "memory" in name:
                    memory[name] = max(value, memory.get(name, value))
        if kind in _TOLD:
            rows[kind].append({"at_s": at_s} | {key: body.get(key) for key in _TOLD[kind]})
    return {
        "started_s": started,
        "false_alarms": alarms,
        "deaths": rows["VertexLost"],
        "silences": rows["VertexFellSilent"],
        "restored": rows["GangRestored"],
        "passes_halved": rows["PassesHalved"],
    } | ({"memory": memory} if memory else {})


_TOLD = {
    "VertexLost": ("vertex", "incarnation", "cause"),
    "VertexFellSilent": ("vertex", "incarnation", "life", "silent_s", "detail"),
    "GangRestored": ("role", "source", "step", "checkpoint_step", "seconds"),
    "PassesHalved": ("role", "pass_tokens", "passes"),
}
"""By kind of event, the fields that are kept of it."""


def events_in(out: Path, label: str) -> list[Row]:
    """The job's events, as the last account of it wrote them."""
    return list(_lines(out / f"{label}_events.jsonl"))


def looks_in(out: Path, label: str) -> list[Row]:
    """What `Watch` saw of the rollout plane."""
    return list(_lines(out / f"{label}_plane.jsonl"))


def numbers(
    events: Sequence[Row],
    looks: Sequence[Row],
    gpus: Sequence[tuple[float, int, float, float]],
    *,
    ended_s: float,
    stopped_s: float = 0.0,
) -> Row:
    """`looks` are those of `Watch` at the rollout plane, `gpus` are (time, GPU, percent busy, MiB in use)."""
    steps = steps_of(events)
    serving = next((look["at_s"] for look in looks if living(look) > 0), None)
    row: Row = {"engine_serves_s": serving, "steps": steps}
    if len(steps) < 4:
        return row
    laps = laps_of(steps)
    since = steps[min(WARM, len(steps) // 2) - 1]["at_s"]
    until = steps[-1]["at_s"]
    during = [look for look in looks if since <= look["at_s"] <= until]
    row |= {
        "first_step_s": steps[0]["at_s"],
        "median_lap_s": statistics.median(lap["seconds"] for lap in laps),
        "tokens_s": rate(steps, since, until),
        "decay": decay(steps),
        **versions(events, looks, steps),
        **checkpoints(events, laps),
        "engine_idle": share(
            [any(one["version"] >= 0 and not one["samples"] for one in _of(look)) for look in during]
        ),
        "engine_runs": _mean([sum(one["running"] or 0 for one in _of(look)) for look in during]),
        "queued": _mean([look["queued"] for look in during]),
        "gpu_busy": {
            str(gpu): _mean([busy for at, which, busy, _ in gpus if which == gpu and since <= at <= until])
            for gpu in sorted({which for _, which, _, _ in gpus})
        },
        "end_s": round(ended_s - (stopped_s or until), 1),
    }
    return row


def steps_of(events: Sequence[Row]) -> list[Row]:
    """Each step once, as it was first told."""
    found: dict[int, Row] = {}
    for event in events:
        if event["kind"] == "StepCompleted":
            metrics = event["body"]["metrics"]
            found.setdefault(
                event["body"]["step"],
                {"step": event["body"]["step"], "at_s": event["at_s"], "tokens": metrics["tokens"]}
                | {"staleness": metrics.get("staleness_mean")},
            )
    return [found[step] for step in sorted(found)]


def laps_of(steps: Sequence[Row]) -> list[Row]:
    return [
        {"step": now["step"], "seconds": now["at_s"] - before["at_s"], "tokens": now["tokens"]}
        for before, now in pairwise(steps)
    ]


def rate(steps: Sequence[Row], since: float, until: float) -> float | None:
    """Tokens/s of the steps that ended after `since` and not after `until`, which are times of steps."""
    tokens = sum(step["tokens"] for step in steps if since < step["at_s"] <= until)
    return tokens / (until - since) if until > since else None


def decay(steps: Sequence[Row]) -> float | None:
    """The rate of the last ten steps by that of steps 6 to 15; None where there are fewer than 26."""
    if len(steps) < 26:
        return None
    first = rate(steps, steps[4]["at_s"], steps[14]["at_s"])
    last = rate(steps, steps[-11]["at_s"], steps[-1]["at_s"])
    return last / first if first and last else None


def versions(events: Sequence[Row], looks: Sequence[Row], steps: Sequence[Row]) -> Row:
    """Medians from a step to its publication, and to the first engine and to all engines that serve it, by looks that
    are a tenth of a second apart."""
    published = {
        event["body"]["version"]: event["at_s"] for event in events if event["kind"] == "WeightsPublished"
    }
    first: list[float] = []
    every: list[float] = []
    for step in steps:
        for reached, into in ((max, first), (min, every)):
            at = next(
                (
                    look["at_s"]
                    for look in looks
                    if look["at_s"] >= step["at_s"] - 1.0
                    and look["instances"]
                    and reached(one["version"] for one in look["instances"]) >= step["step"]
                ),
                None,
            )
            if at is not None:
                into.append(at - step["at_s"])
    told = [published[step["step"]] - step["at_s"] for step in steps if step["step"] in published]
    return {
        "to_published_s": _median(told),
        "to_served_s": _median(first),
        "to_served_by_all_s": _median(every),
    }


def checkpoints(events: Sequence[Row], laps: Sequence[Row]) -> Row:
    """What the lap after a checkpointed step takes beyond the others, and how long until the checkpoint is there."""
    ended = {lap["step"]: lap["seconds"] for lap in laps}
    done = {
        event["body"]["step"]: event["at_s"]
        for event in events
        if event["kind"] == "CheckpointCommitted" and not event["body"].get("again")
    }
    told = {
        event["body"]["step"]: event["at_s"] for event in reversed(events) if event["kind"] == "StepCompleted"
    }
    others = [seconds for step, seconds in ended.items() if step - 1 not in done]
    stands = [ended[step + 1] - statistics.median(others) for step in done if step + 1 in ended and others]
    return {
        "checkpoint_stands_s": _median(stands),
        "checkpoint_written_s": _median([at - told[step] for step, at in done.items() if step in told]),
        "checkpoints": len(done),
    }


def living(look: Row) -> int:
    """Engines that have a policy."""
    return sum(one["version"] >= 0 for one in look["instances"])


def share(found: Sequence[bool]) -> float | None:
    return sum(found) / len(found) if found else None


def gpu_samples(file: Path, began: float) -> Iterator[tuple[float, int, float, float]]:
    """Of nvidia-smi's lines: timestamp, index, utilization in percent, memory in MiB."""
    if not file.exists():
        return
    with file.open() as lines:
        for fields in csv.reader(lines, skipinitialspace=True):
            try:
                at = datetime.strptime(fields[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
                busy, used = (
                    float(fields[2].removesuffix("%").strip()),
                    float(fields[3].removesuffix("MiB").strip()),
                )
                yield at - began, int(fields[1]), busy, used
            except (IndexError, ValueError):  # cut off at the end, or not supported
                continue


def _of(look: Row) -> list[Row]:
    found: list[Row] = look["instances"]
    return found


def _lines(file: Path) -> Iterator[Row]:
    if file.exists():
        for line in file.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # cut off at the end
                continue


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 2) if values else None
