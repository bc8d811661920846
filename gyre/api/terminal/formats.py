"""Formats of times, numbers and failures for people. Pure: `now` is an argument, and nothing is printed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from gyre.users_code import is_gyres

LEAST_SHARE = 0.005
"""Smallest share of a role's time that is shown: what rounds to a percent."""

SPARKS = "▁▂▃▄▅▆▇█"

_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_EXIT_DETAIL = "exit detail: "
"""The words, below several lines of ids, after which Ray says how a worker process ended."""


def local_time(at: float | None) -> str:
    """Seconds since 1970 as local ISO time with its offset; empty for None."""
    return "" if not at else datetime.fromtimestamp(at).astimezone().isoformat(timespec="seconds")


def ago(at: float | None, now: float) -> str:
    """`just now`, `3 min ago`, `2 h ago`; empty for None. A time ahead of this machine's clock is now."""
    if not at:
        return ""
    passed_s = now - at
    for name, size in _UNITS:
        if passed_s >= size:
            return f"{int(passed_s // size)} {name} ago"
    return "just now"


def duration(seconds: float | None) -> str:
    """`0.8 s`, `12 s`, `3 min 5 s`, `2 h 14 min`, `3 d 4 h`; empty for None."""
    if seconds is None:
        return ""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    for index, (name, size) in enumerate(_UNITS):
        if whole >= size:
            first, rest = divmod(whole, size)
            if index == len(_UNITS) - 1:
                return f"{first} {name}"
            smaller, small = _UNITS[index + 1]
            second = rest // small
            return f"{first} {name} {second} {smaller}" if second else f"{first} {name}"
    return "0 s"


def number(value: Any) -> str:
    """A number with four significant digits; empty for None."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def waits_of(progress: Mapping[str, Any]) -> dict[str, float]:
    """The share of recent time by who waited for whom; empty if a user's `fit()` uses `waits` for something else."""
    waits = progress.get("waits")
    shares = waits.items() if isinstance(waits, dict) else ()
    return {who: share for who, share in shares if isinstance(share, int | float)}


def times_of(progress: Mapping[str, Any]) -> dict[str, str]:
    """How each role spent its recent time, as in `waits for rollout (generating) 57%, training 43%`; empty if a user's
    `fit()` uses `times` for something else."""
    times = progress.get("times")
    found = {}
    for role, shares in times.items() if isinstance(times, dict) else ():
        told = shares.items() if isinstance(shares, dict) else ()
        parts = [f"{what} {s:.0%}" for what, s in told if isinstance(s, int | float) and s >= LEAST_SHARE]
        if parts:
            found[str(role)] = ", ".join(parts)
    return found


def efficiency_words(found: Mapping[str, float]) -> list[tuple[str, str]]:
    """What `gyre.observe.efficiency` found, beside the tokens/s of all, as pairs of what and how much."""
    lines = []
    if "tokens_per_s_per_gpu" in found:
        lines.append(("tokens/s by GPU", f"{found['tokens_per_s_per_gpu']:,.0f}"))
    if "mfu" in found:
        lines.append(("MFU", f"{100 * found['mfu']:.1f} %"))
    if "gpu_busy" in found:
        used, whole = found["gpu_memory_used_bytes"] / 2**30, found["gpu_memory_bytes"] / 2**30
        lines.append(("GPUs", f"busy {100 * found['gpu_busy']:.0f} %, {used:.0f} of {whole:.0f} GiB in use"))
    if "cost" in found:
        hour = f", {_price(found['cost_per_hour'])} an hour" if found["cost_per_hour"] else ""
        lines.append(("cost so far" if hour else "cost", f"{_price(found['cost'])}{hour}"))
    if "cost_per_million_tokens" in found:
        lines.append(("cost by million tokens", _price(found["cost_per_million_tokens"])))
    return lines


def _price(amount: float) -> str:
    """With two digits behind the point, or two that matter where it is less than one."""
    return f"{amount:,.2f}" if amount >= 0.995 or amount == 0 else f"{amount:.2g}"


def accuracy_name(row: Mapping[str, Any]) -> str:
    """What the accuracy of an evaluation is called: with the number of the reward function that says what is right,
    where it is that and no threshold."""
    return f"accuracy ({row['right_by']})" if row.get("right_by") else "accuracy"


ENOUGH_ANSWERS = 8
"""Of different prompts: fewer may well have the same answer."""


def all_same(row: Mapping[str, Any]) -> bool:
    """Whether the answers to the prompts of an evaluation are all the same, and enough to say so."""
    return row.get("distinct") == 1 and (row.get("prompts") or 0) >= ENOUGH_ANSWERS


def right_rule(row: Mapping[str, Any]) -> tuple[Any, str]:
    """What an evaluation calls right; results by different rules are not compared."""
    return row.get("threshold"), row.get("right_by") or ""


def one_line(text: object) -> str:
    """The text with every run of white space as one space."""
    return " ".join(str(text).split())


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as at most `width` bars, from the lowest to the highest; each bar is the mean of its neighbours."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    bars = min(width, len(finite))
    edges = [index * len(finite) // bars for index in range(bars + 1)]
    means = [sum(finite[first:end]) / (end - first) for first, end in pairwise(edges)]
    low, high = min(means), max(means)
    if low == high:
        return SPARKS[len(SPARKS) // 2] * bars
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((mean - low) / (high - low) * top)] for mean in means)


def incident_message(incident: Mapping[str, Any]) -> str:
    """Why an incident happened, on one line; empty if its evidence does not say. An error in the job's own code comes
    with the line that raised it."""
    evidence = incident["evidence"]
    traceback = str(evidence.get("traceback") or "").rstrip()
    error = str(evidence.get("error") or evidence.get("exit") or "").strip()
    if incident["cause"] == "unhealthy" and traceback:
        error = f"{error}: {traceback.splitlines()[-1]}"
    elif not error:
        error = traceback.rpartition("\n")[2]
    if _EXIT_DETAIL in error:
        error = error.partition(_EXIT_DETAIL)[2]
    message = one_line(error)
    frames = [frame for frame in _FRAME.findall(traceback) if not is_gyres(frame[0])]
    if message and incident["user_code"] and frames and f"line {frames[-1][1]}" not in message:
        path, line = frames[-1]
        message = f"{message} ({path.rpartition('/')[2]}:{line})"
    return message
