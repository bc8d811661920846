"""The last lines about a job: how it ended, what it learnt, and what says that it did not.

    demo succeeded after 71 s: 80 steps, reward 0.34 -> 0.96, held-out 34 % -> 97 %, 0.4 M tokens; 0 prompts lost,
    0 trained twice
    ! learning: 60 % of the groups of the last 10 steps have no gradient: all of their samples earned the same

Pure: from the job's view alone, so that `run`, `resume`, `demo` and `show` say the same, also when the cluster is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.api.terminal.formats import accuracy_name, all_same, duration, number, one_line, right_rule
from gyre.failover.state import Reason
from gyre.master.incident_words import counted
from gyre.workloads.trainer.learning.step_line import percent, short

View = Mapping[str, Any]

INTERRUPTED_BY = "interrupted by "
"""What the reason of a stop begins with where a signal asked for it, before the signal's name."""

SHOWN_RESULTS = 6
"""Most entries of what a user's own `fit()` returned that the last line has."""
RESULT_WIDTH = 40
MESSAGE_WIDTH = 300

HELD_OUT = "held_out"
"""The only set of a job that names none."""

_OWN = frozenset({"accuracy_first", "accuracy_last", "tokens", "tokens_discarded", "digest"})
"""Entries of the built-in trainer's result that other words stand for, or that are for programs."""


def last_lines(view: View) -> list[str]:
    """The line about the end of a job, and one for each warning that still holds."""
    job = view["job"]
    line = f"{job['name']} {outcome(view)}"
    if facts := learnt(view):
        line += f": {', '.join(facts)}"
    if account := _account(view):
        line += f"; {account}"
    if str(job["phase"]) == "failed" and job["message"]:
        line += f"; {_cut(one_line(job['message']), MESSAGE_WIDTH)}"
    return [line, *warning_lines(view)]


def nothing_left(view: View, spec: Mapping[str, Any], *, changed: bool = True) -> list[str]:
    """Why a job that has ended has nothing left to do with this spec, and how to have more; empty where there is
    something. The steps of a user's own trainer are unknown: once its `fit()` has returned there is something to do
    only if the spec has `changed`."""
    job, run = view["job"], spec.get("run")
    steps = run.get("steps") if isinstance(run, Mapping) else None
    done = int(((view.get("training") or {}).get("last") or {}).get("step", 0))
    if str(job["phase"]) == "succeeded" and not changed and not done and not _is_gyres(job["result"]):
        return [
            f"There is nothing left to do: fit() of {job['name']} has returned.",
            f"To call it again with other settings: gyre resume {job['name']} --set KEY=VALUE",
        ]
    if str(job["phase"]) != "succeeded" or not isinstance(steps, int) or not 0 < steps <= done:
        return []
    return [
        f"There is nothing left to do: all {_steps(done)} of {job['name']} are trained.",
        f"For more: gyre resume {job['name']} --set run.steps={2 * done}",
    ]


def warning_lines(view: View) -> list[str]:
    return [f"! learning: {warning['message']}" for warning in view.get("warnings") or ()]


def outcome(view: View) -> str:
    """`succeeded after 71 s`, `stopped by Ctrl-C after 3 min`, `failed after 12 s`."""
    job = view["job"]
    phase, message = str(job["phase"]), str(job["message"])
    took = duration(ran_for(view))
    after = f" after {took}" if took else ""
    if phase == "stopped" and message.startswith(INTERRUPTED_BY):
        return f"stopped by {message.removeprefix(INTERRUPTED_BY)}{after}"
    reason = f" ({one_line(message)})" if phase == "stopped" and message else ""
    return f"{phase}{after}{reason}"


def how_to_go_on(view: View) -> str:
    """`gyre resume NAME goes on from its last checkpoint` where nothing is wrong with the job itself; else ""."""
    job = view["job"]
    if job["reason"] != Reason.CLUSTER_LOST.value or job["phase"] != "failed":
        return ""
    where = "from its last checkpoint" if int(job["checkpoint_step"]) > 0 else "from its beginning"
    return f"gyre resume {job['name']} goes on {where}"


def ran_for(view: View, now: float | None = None) -> float | None:
    """Seconds of the job's last run: since it went on, where it ended before. Of a job that runs, until `now`."""
    job, training = view["job"], view.get("training") or {}
    began, ended = training.get("continued_at") or job["submitted_at"], job["ended_at"] or now
    return max(ended - began, 0.0) if began and ended else None


def incidents_of_this_run(view: View) -> list[Mapping[str, Any]]:
    """The incidents since the job went on; all where it never ended before."""
    since = (view.get("training") or {}).get("continued_at") or 0.0
    return [incident for incident in view["incidents"] if incident["at"] >= since]


def learnt(view: View) -> list[str]:
    """Steps, rewards, evaluations and tokens; for a job with a trainer of the user's own, what its `fit()` returned."""
    training = view.get("training") or {}
    first, last = training.get("first") or {}, training.get("last") or {}
    if not last:
        return ["0 steps"] if _is_gyres(view["job"]["result"]) else own_result(view)
    step, before = int(last["step"]), int(training.get("continued_step") or 0)
    if before:
        facts = [f"{_steps(step - before)} ({steps_of(view, step)} in all)"]
    else:
        made = steps_of(view, step)
        facts = [f"{made} steps" if made != str(step) else _steps(step)]
    begin = training.get("continued_reward") if before else first.get("reward_mean")
    if last.get("reward_mean") is not None and step > before:
        facts.append(f"reward {_change(begin, last['reward_mean'], short)}")
    facts += held_out(view)
    if training.get("tokens"):
        facts.append(f"{_millions(training['tokens'])} tokens")
    return facts


def steps_of(view: View, step: int) -> str:
    """`25 of 40`: the steps made, of those asked for; the first alone where that is not known, or all are made and the
    job has ended."""
    asked = view["job"].get("steps_asked")
    if asked is None and not view["job"]["ended_at"]:
        asked = view["progress"].get("steps")  # as a trainer of the user's own says it
    shown = isinstance(asked, int) and asked > 0 and (asked != step or not view["job"]["ended_at"])
    return f"{step} of {asked}" if shown else str(step)


def held_out(view: View) -> list[str]:
    """What each evaluated set went from and came to: accuracies where the first and the last evaluation have one by the
    same rule, else mean rewards. Of a job that went on it is from where it went on."""
    evaluations = view.get("evaluations")
    before = int((view.get("training") or {}).get("continued_step") or 0)
    found = []
    for name, rows in evaluations.items() if isinstance(evaluations, Mapping) else ():
        if not rows:
            continue
        if before:  # from the last one of before on
            earlier = [row for row in rows if row["version"] <= before]
            rows = [*earlier[-1:], *rows[len(earlier) :]]
        called = "held-out" if name == HELD_OUT else str(name)
        first, last = rows[0], rows[-1]
        both = first.get("accuracy") is not None and last.get("accuracy") is not None
        if both and right_rule(first) == right_rule(last):
            by = f" ({last['right_by']})" if last.get("right_by") else ""
            found.append(
                f"{called} {_change(first['accuracy'], last['accuracy'], percent, len(rows) > 1)}{by}"
            )
        elif last.get("reward_mean") is not None:
            begin = first.get("reward_mean")
            found.append(f"{called} reward {_change(begin, last['reward_mean'], short, len(rows) > 1)}")
    if not found:
        known = {**view["progress"], **view["job"]["result"]}
        first, last = known.get("accuracy_first"), known.get("accuracy_last", known.get("accuracy"))
        if isinstance(last, int | float):
            found.append(f"held-out {_change(first, last, percent, first != last)}")
    return found


def evaluated(view: View) -> list[tuple[str, str]]:
    """Each evaluated set with its last evaluation, as in `version 80: reward 0.97 ±0.1, accuracy 97 %, 512 answers`."""
    evaluations = view.get("evaluations")
    found = []
    for name, rows in evaluations.items() if isinstance(evaluations, Mapping) else ():
        if not rows:
            continue
        last = rows[-1]
        parts = []
        if last.get("reward_mean") is not None:
            spread = f" ±{short(last['reward_std'])}" if last.get("reward_std") is not None else ""
            parts.append(f"reward {short(last['reward_mean'])}{spread}")
        if last.get("accuracy") is not None:
            parts.append(f"{accuracy_name(last)} {percent(last['accuracy'])}")
        if last.get("count"):
            same = ", all the same" if all_same(last) else ""
            parts.append(f"{last['count']} answers{same}")
        found.append((str(name), f"version {last.get('version')}: {', '.join(parts)}"))
    return found


def own_result(view: View) -> list[str]:
    """The first entries of what a user's own `fit()` returned, short."""
    result = view["job"]["result"]
    facts = [
        f"{_cut(str(key), RESULT_WIDTH)} {_cut(one_line(number(value)), RESULT_WIDTH)}"
        for key, value in result.items()
        if isinstance(value, int | float | str) and value != "" and key not in _OWN
    ]
    left = len(facts) - SHOWN_RESULTS
    return [*facts[:SHOWN_RESULTS], *([f"and {left} more"] if left > 0 else [])]


def _account(view: View) -> str:
    result = view["job"]["result"]
    parts = []
    if _is_gyres(result):
        lost, twice = result["prompts_lost"], result["trained_twice"]
        if result["prompts"] == 0:
            parts.append("no prompt was drawn")
        elif isinstance(lost, int) and isinstance(twice, int):
            parts += [f"{lost} prompt{'' if lost == 1 else 's'} lost", f"{twice} trained twice"]
    if incidents := counted(incidents_of_this_run(view)):
        parts.append(incidents)
    return ", ".join(parts)


def _is_gyres(result: Mapping[str, Any]) -> bool:
    """Whether the built-in trainer returned it."""
    return result.keys() >= {"steps", "prompts", "prompts_lost", "trained_twice"}


def _change(first: Any, last: float, form: Any, several: bool = True) -> str:
    return f"{form(first)} -> {form(last)}" if several and isinstance(first, int | float) else form(last)


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _millions(count: float) -> str:
    """`9400`, `12.3 k`, `0.4 M`."""
    if count >= 99_950:
        return f"{count / 1e6:.1f} M"
    return f"{count / 1e3:.1f} k" if count >= 9_950 else str(int(count))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
