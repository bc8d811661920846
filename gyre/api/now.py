"""What a person asks first of a job: is it well, does it learn, what is slow, and because of what.

    Trains at step 41 of 80, 5.2k tok/s; the actor waits 38 % of its time for samples of rollout.

The page, `gyre top` and REST (`/now`) say the same words. Pure: from a view of the job and the metrics of its steps;
`now` is an argument, in seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict

from gyre.api.terminal.formats import duration, efficiency_words, incident_message, one_line
from gyre.api.terminal.run_end import held_out, how_to_go_on, incidents_of_this_run, learnt, outcome, steps_of
from gyre.api.verdict import Learns, Tone, learns
from gyre.master.incident_words import counted
from gyre.master.master_api import lacks
from gyre.observe.efficiency import STORE_LOST, efficiency_of
from gyre.workloads.trainer.learning.step_line import short, thousands

View = Mapping[str, Any]

MESSAGE_WIDTH = 240


class Slow(TypedDict):
    """The role that the job's speed depends on, and in which way; both empty where that is not known. `words` are a
    sentence, also then."""

    what: str
    because: str
    words: str


class Fact(TypedDict):
    """`view` is the name of the page's view that has more of it."""

    label: str
    value: str
    view: str


class Now(TypedDict):
    """What the job does now, in a sentence, and whether that is as it should be."""

    sentence: str
    tone: Tone
    learns: Learns
    slow: Slow
    facts: list[Fact]


def now_of(view: View, steps: Sequence[Mapping[str, Any]] | None, now: float) -> Now:
    """`steps` are the metrics of the steps that the job is judged by (`gyre.api.verdict.judged_steps`), in order; None
    where they cannot be read now."""
    sentence, tone = _sentence(view, now)
    return {
        "sentence": sentence,
        "tone": tone,
        "learns": learns(view, steps),
        "slow": _slow(view),
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
    if lacks(view) and message:
        return _sentence_of(message), "bad" if lacks(view) == STORE_LOST else "attention"
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
    sentence = f"{_capital(outcome(view))}{f': {facts}' if facts else ''}."
    if phase == "failed":
        more = (_sentence_of(_capital(_cut(message))), _sentence_of(how_to_go_on(view)))
        return " ".join(filter(None, (sentence, *more))), "bad"
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
    where = f"step {steps_of(view, job['step'])}"
    rate = progress.get("tokens_per_s")
    speed = f", {thousands(rate)} tok/s" if isinstance(rate, int | float) and rate else ""
    _, _, because = str(view.get("bottleneck") or "").partition("; ")
    warnings = view.get("warnings") or ()
    since = f" since step {warnings[-1]['step']}" if warnings and warnings[-1]["step"] else ""
    warned = f" Warning{since}: {one_line(warnings[-1]['message'])}." if warnings else ""
    if not view["training"]["last"] and not progress.get("step"):
        return f"Runs; no step is made yet{f' ({because})' if because else ''}.{warned}"
    return f"Trains at {where}{speed}{f'; {because}' if because else ''}.{warned}"


# -- what is slow -----------------------------------------------------------------------------------


def _slow(view: View) -> Slow:
    what, _, because = str(view.get("bottleneck") or "").partition("; ")
    if what:
        return {"what": what, "because": because, "words": f"{what}{f': {because}' if because else ''}."}
    trained, missing = bool(view["training"]["last"]), lacks(view).replace("_", " ")
    if missing:
        words = f"The job lacks something first ({missing}). What else is slow is said when that is over."
    elif view["job"]["ended_at"]:
        words = "It is not known how the job spent its time." if trained else "No step was made."
    else:
        words = "Nothing in particular." if trained else "No step is made yet."
    return {"what": "", "because": "", "words": words}


# -- facts ------------------------------------------------------------------------------------------


def _facts(view: View, now: float) -> list[Fact]:
    job, progress, last = view["job"], view["progress"], view["training"]["last"]
    found: list[Fact] = []

    def add(label: str, value: str, where: str) -> None:
        if value:
            found.append({"label": label, "value": value, "view": where})

    add("step", steps_of(view, job["step"]), "curves")
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
    add("incidents", counted(incidents_of_this_run(view)), "incidents")
    add("runs for" if not job["ended_at"] else "ran for", duration(_age(view, now)), "timeline")
    return found


def _age(view: View, now: float) -> float | None:
    job = view["job"]
    began = (view["training"] or {}).get("continued_at") or job["submitted_at"]
    return max((job["ended_at"] or now) - began, 0.0) if began else None


def _cut(text: str, width: int = MESSAGE_WIDTH) -> str:
    """At the end of a sentence where one ends in the second half of what there is room for."""
    if len(text) <= width:
        return text
    end = text.rfind(". ", width // 2, width)
    return text[: end + 1] if end > 0 else f"{text[: width - 1]}…"


def _capital(text: str) -> str:
    """The first letter alone, unlike `str.capitalize`; a file's name stays as it is."""
    word = text.split(" ", 1)[0]
    return text if set("./:_") & set(word) else text[:1].upper() + text[1:]


def _sentence_of(text: str) -> str:
    return text if not text or text[-1] in ".!?…" else f"{text}."
