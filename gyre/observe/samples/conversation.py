"""A row of a session as the conversation that it was: by turn what was put there, and what the policy answered.

Pure. What is told of a row, the terminal and the page tell alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def conversation_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of a row, in order; none where it is no row of a session. `values` are its columns.

    Each part has the tokens `start` to `end`, and is `drawn` by the policy or was put there; the former is `trained`
    unless an earlier row of the rollout has it. `versions` and `instances` are those that drew any of it. `waited_s` is
    of what was put there: for how long the answer before it had been there."""
    parts = []
    for turn in values.get("turns") or ():
        for start, end, drawn in (
            (turn["start"], turn["drawn"], False),
            (turn["drawn"], turn["end"], True),
        ):
            if start >= end:
                continue
            parts.append(
                {
                    "turn": turn["turn"],
                    "drawn": drawn,
                    "trained": drawn and _covers(values.get("drawn"), start),
                    "start": start,
                    "end": end,
                    "versions": _of(values.get("versions"), "version", start, end) if drawn else [],
                    "instances": _of(values.get("instances"), "name", start, end) if drawn else [],
                    "waited_s": None if drawn else turn["waited_s"],
                    "text": _text(values.get("pieces"), start, end),
                }
            )
    return parts


def session_sentence(rollout: int | None, session: Mapping[str, Any]) -> str:
    """How the session went whose row this is, as far as the row says it."""
    here = session["turns_here"]
    told = [f"A row of rollout {rollout}" if rollout is not None else "A session"]
    if session["turns"] is not None and session["turns"] != here:
        told.append(f"with {here} of its {session['turns']} turns")
    else:
        told.append(f"with {here} {'turn' if here == 1 else 'turns'}")
    ended = [session["outcome"].replace("_", " "), *([session["reason"]] if session["reason"] else [])]
    parts = [" ".join(told), f"ended as {': '.join(ended)}"]
    if session["tool_s"] is not None and session["engine_s"] is not None:
        parts.append(
            f"{session['tool_s']:.2f} s between turns with its agent and tools, {session['engine_s']:.2f} s in turns"
        )
    return "; ".join(parts)


def _covers(runs: Sequence[Mapping[str, int]] | None, at: int) -> bool:
    return runs is None or any(run["start"] <= at < run["end"] for run in runs)


def _of(runs: Sequence[Mapping[str, Any]] | None, what: str, start: int, end: int) -> list[Any]:
    """Which of the runs have any token of these, each once."""
    return list(dict.fromkeys(run[what] for run in runs or () if run["start"] < end and start < run["end"]))


def _text(pieces: Sequence[str] | None, start: int, end: int) -> str | None:
    return None if pieces is None else "".join(pieces[start:end])
