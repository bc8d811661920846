"""What a person asks first of a job: is it well, does it learn, what is slow, and because of what.

    Trains at step 41 of 80, 5.2k tok/s; the actor waits 38 % of its time for samples of rollout.

The page, `gyre top` and REST (`/now`) say the same words. Pure: from a view of the job and the metrics of its steps;
`now` is an argument, in seconds since 1970.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, Literal, TypedDict

from gyre.api.terminal.formats import duration, efficiency_words, incident_message, one_line
from gyre.api.terminal.run_end import held_out, incidents_of_this_run, learnt, outcome
from gyre.observe.efficiency import efficiency_of
from gyre.workloads.trainer.learning.step_line import percent, short, thousands

View = Mapping[str, Any]
Tone = Literal["good", "attention", "bad", "over"]
Verdict = Literal["yes", "no", "too early", "unknown"]

AT_LEAST_STEPS = 6
"""Fewer steps say nothing of a trend: a third of them at each end would be one."""
SHARE_COMPARED = 0.3
"""Of the steps, at each end, whose mean rewards are compared."""
MOST_COMPARED = 50
DEVIATIONS = 2.0
"""By so many standard errors the end must be above the start to be more than chance."""
MESSAGE_WIDTH = 240


class Learns(TypedDict):
    verdict: Verdict
    because: str


class Slow(TypedDict):
    what: str
    because: str


class Fact(TypedDict):
    """`view` is the name of the page's view that has more of it."""

    label: str
    value: str
    view: str


class Now(TypedDict):
    sentence: str
    tone: Tone
    learns: Learns
    slow: Slow
    facts: list[Fact]


def now_of(view: View, steps: Sequence[Mapping[str, Any]], now: float) -> Now:
    """`steps` are the metrics of the job's steps, in order: all of them, or the first and the newest."""
    sentence, tone = _sentence(view, now)
    what, _, because = str(view.get("bottleneck") or "").partition("; ")
    return {
        "sentence": sentence,
        "tone": tone,
        "learns": learns(view, steps),
        "slow": {"what": what, "because": because},
        "facts": _facts(view, now),
    }


# -- is it well -------------------------------------------------------------------------------------


def _sentence(view: View, now: float) -> tuple[str, Tone]:
    job = view["job"]
    phase, message = str(job["phase"]), one_line(job["message"])
    if phase in ("succeeded", "stopped", "failed"):
        return _end(view, phase, message)
    if not view["master"]["answering"]:
        return (
            f"The master does not answer; the journal's last word is {phase} at step {job['step']}.",
            "attention",
        )
    if view["store"]["error"]:
        return f"The store is out of reach: {one_line(view['store']['error'])} Training goes on.", "bad"
    if job["reason"] in ("no_room", "disk_full") and message:
        return _sentence_of(message), "attention"
    if phase in ("submitted", "starting"):
        return _starting(view), "good"
    if phase == "paused":
        return f"Paused after step {job['step']}{f': {message}' if message else ''}.", "attention"
    if phase == "stopping":
        return f"Stops at the end of step {int(job['step']) + 1}.", "attention"
    if phase == "recovering" or _open_incidents(view):
        return _recovering(view, now)
    return _trains(view), "attention" if view.get("warnings") else "good"


def _end(view: View, phase: str, message: str) -> tuple[str, Tone]:
    facts = ", ".join(learnt(view)).replace("->", "→")
    sentence = f"{outcome(view).capitalize()}{f': {facts}' if facts else ''}."
    if phase == "failed":
        return f"{sentence} {_sentence_of(_cut(message))}".rstrip(), "bad"
    return sentence, "over"


def _starting(view: View) -> str:
    vertices = view["vertices"]
    waits = next((vertex for vertex in vertices if vertex["no_room"]), None)
    if waits is not None:
        return f"Starts; {waits['id']} waits for room: {one_line(waits['no_room'])}."
    ready = sum(str(vertex["phase"]) == "running" for vertex in vertices)
    if not vertices:
        return "Submitted; no vertex has started yet."
    late = next((vertex["id"] for vertex in vertices if str(vertex["phase"]) == "starting"), "")
    more = f"; {late} is still starting" if late else "; the trainer gets ready"
    return f"Starts: {ready} of {len(vertices)} vertices run{more}."


def _open_incidents(view: View) -> list[Mapping[str, Any]]:
    return [one for one in incidents_of_this_run(view) if one["outcome"] == "open"]


def _recovering(view: View, now: float) -> tuple[str, Tone]:
    open_ones = _open_incidents(view)
    if not open_ones:
        return f"Recovers at step {view['job']['step']}.", "attention"
    newest = open_ones[-1]
    why = incident_message(newest)
    cause = str(newest["cause"]).replace("_", " ")
    told = f"{newest['vertex']}: {cause}{f' ({_cut(why, 120)})' if why else ''}"
    others = f", and {len(open_ones) - 1} more" if len(open_ones) > 1 else ""
    since = duration(max(now - newest["at"], 0.0))
    return f"Recovers for {since} from {told}{others}; decided: {newest['decision']}.", "attention"


def _trains(view: View) -> str:
    progress, job = view["progress"], view["job"]
    planned = progress.get("steps")
    where = f"step {job['step']}{f' of {planned}' if isinstance(planned, int) and planned else ''}"
    rate = progress.get("tokens_per_s")
    speed = f", {thousands(rate)} tok/s" if isinstance(rate, int | float) and rate else ""
    _, _, because = str(view.get("bottleneck") or "").partition("; ")
    warnings = view.get("warnings") or ()
    warned = f" Warning: {one_line(warnings[-1]['message'])}." if warnings else ""
    if not view["training"]["last"] and not progress.get("step"):
        return f"Runs; no step is made yet{f' ({because})' if because else ''}.{warned}"
    return f"Trains at {where}{speed}{f'; {because}' if because else ''}.{warned}"


# -- does it learn ----------------------------------------------------------------------------------


def learns(view: View, steps: Sequence[Mapping[str, Any]]) -> Learns:
    """By the evaluations where they tell, else by the rewards of the first and the last steps; what a learning warning
    says goes before both."""
    for warning in view.get("warnings") or ():
        if warning["code"] != "not_evaluated":
            return {"verdict": "no", "because": one_line(warning["message"])}
    by_evaluation = _by_evaluation(view)
    if by_evaluation is not None:
        return by_evaluation
    return _by_reward(steps)


def _by_evaluation(view: View) -> Learns | None:
    form: Callable[[float], str]
    for name, rows in (view.get("evaluations") or {}).items():
        if len(rows) < 2:
            continue
        first, last = rows[0], rows[-1]
        called = "held-out" if name == "held_out" else name
        what, form = "accuracy", percent
        begin, end = first.get("accuracy"), last.get("accuracy")
        if isinstance(begin, int | float) and isinstance(end, int | float):
            error = math.sqrt(
                begin * (1 - begin) / max(first["count"], 1) + end * (1 - end) / max(last["count"], 1)
            )
        else:
            begin, end = first.get("reward_mean"), last.get("reward_mean")
            if not isinstance(begin, int | float) or not isinstance(end, int | float):
                continue
            spread = [float(one.get("reward_std") or 0.0) for one in (first, last)]
            counts = [max(one["count"], 1) for one in (first, last)]
            error = math.sqrt(sum(s * s / n for s, n in zip(spread, counts, strict=True)))
            what, form = "reward", short
        versions = first["version"], last["version"]
        change = (
            f"{called} {what} {form(begin)} at version {versions[0]}, {form(end)} at version {versions[1]}"
        )
        if end - begin > DEVIATIONS * error and end > begin:
            return {"verdict": "yes", "because": change}
        if begin - end > DEVIATIONS * error and end < begin:
            return {"verdict": "no", "because": f"{change}: it fell"}
        if last["version"] > 0:
            return {"verdict": "unknown", "because": f"{change}: no more than chance"}
    return None


def _by_reward(steps: Sequence[Mapping[str, Any]]) -> Learns:
    rewards = [float(one["reward_mean"]) for one in steps if isinstance(one.get("reward_mean"), int | float)]
    if len(rewards) < AT_LEAST_STEPS:
        made = f"{len(rewards)} step{'' if len(rewards) == 1 else 's'}"
        return {"verdict": "too early", "because": f"{made} so far"}
    compared = min(max(int(len(rewards) * SHARE_COMPARED), 3), MOST_COMPARED)
    first, last = rewards[:compared], rewards[-compared:]
    begin, end = fmean(first), fmean(last)
    error = math.sqrt((stdev(first) ** 2 + stdev(last) ** 2) / compared)
    change = f"mean reward {short(begin)} in the first {compared} steps, {short(end)} in the last {compared}"
    if end - begin > DEVIATIONS * error and end > begin:
        return {"verdict": "yes", "because": change}
    if begin - end > DEVIATIONS * error and end < begin:
        return {"verdict": "no", "because": f"{change}: it fell"}
    return {"verdict": "unknown", "because": f"{change}: no more than chance"}


# -- facts ------------------------------------------------------------------------------------------


def _facts(view: View, now: float) -> list[Fact]:
    job, progress, last = view["job"], view["progress"], view["training"]["last"]
    found: list[Fact] = []

    def add(label: str, value: str, where: str) -> None:
        if value:
            found.append({"label": label, "value": value, "view": where})

    planned = progress.get("steps")
    add("step", f"{job['step']}{f' of {planned}' if isinstance(planned, int) and planned else ''}", "curves")
    if isinstance(last.get("reward_mean"), int | float):
        add("reward", short(last["reward_mean"]), "curves")
    add("held-out", ", ".join(held_out(view)).removeprefix("held-out ").replace("->", "→"), "curves")
    for label, key, form, where in (
        ("tokens/s", "tokens_per_s", thousands, "timeline"),
        ("step time", "step_s", duration, "timeline"),
        ("staleness", "staleness", short, "curves"),
    ):
        value = progress.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            add(label, form(value), where)
    for label, text in efficiency_words(efficiency_of(view, now)):
        add(label, text, "account" if label.startswith("cost") else "curves")
    if int(job["version"]) >= 0:
        add("policy version", str(job["version"]), "weights")
    if int(job["checkpoint_step"]) > 0:
        add("checkpoint", f"at step {job['checkpoint_step']}", "account")
    incidents = incidents_of_this_run(view)
    if incidents:
        recovered = sum(one["recovered_at"] is not None for one in incidents)
        add("incidents", f"{len(incidents)}, {recovered} recovered", "incidents")
    add("runs for" if not job["ended_at"] else "ran for", duration(_age(view, now)), "timeline")
    return found


def _age(view: View, now: float) -> float | None:
    job = view["job"]
    began = (view["training"] or {}).get("continued_at") or job["submitted_at"]
    return max((job["ended_at"] or now) - began, 0.0) if began else None


def _cut(text: str, width: int = MESSAGE_WIDTH) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _sentence_of(text: str) -> str:
    return text if not text or text[-1] in ".!?…" else f"{text}."
