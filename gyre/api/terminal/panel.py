"""The panel of a running job, drawn for a terminal of any size from one view and the run's history.

Invariants:
- *every row is whole*: a line is cut with an ellipsis or wrapped between two facts, and never runs into the next one;
- *it fits*: the panel is no higher than its room. Replicas of a role are folded into one row with counts, the largest
  role first; then the older incidents go, then the last vertices, and a row says how many are not shown.

Pure: it prints nothing and reads no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gyre.api.terminal.formats import duration, incident_message, one_line, sparkline
from gyre.api.terminal.run_end import held_out, ran_for, warning_lines
from gyre.api.terminal.run_history import RunHistory
from gyre.api.terminal.text_tables import COLOURS, Column, rows_of, table
from gyre.master.incident_words import came_to, has_recovered
from gyre.master.master_api import lacks, sessions_of
from gyre.master.session_words import sessions_fact
from gyre.observe.efficiency import makes_steps

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

View = Mapping[str, Any]
Row = tuple[str, str, str, str, str]
"""A row of `VERTEX_COLUMNS`."""

SHOWN_INCIDENTS = 6
LEAST_INCIDENTS = 2
"""Incidents that are shown before vertices are left out."""

SHOWN_REPLICAS = 8
"""Most replicas of a role that have rows of their own, however high the terminal is."""

SHOWN_OPERATORS = 2
"""Number of operators named in the row of several replicas, the most frequent first."""

BAR_WIDTH = 60
FRAME_ROWS, FRAME_COLUMNS = 2, 4
SEPARATOR = " · "

VERTEX_COLUMNS = (
    Column("VERTEX", least=12),
    Column("#", dispensable=1),
    Column("PID", dispensable=2),
    Column("STATE", least=22),
    Column("DOING", least=8),
)


def draw_panel(view: View, history: RunHistory, *, at: float, now: float, width: int, height: int) -> Panel:
    """The panel, at most `width` columns and `height` rows.

    `at` is the time of day in seconds since 1970, `now` is on the clock of `history`.
    """
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    inner = max(width - FRAME_COLUMNS, 1)
    room = max(height - FRAME_ROWS, 1)
    head = _head(view, history, at, now, inner)[:room]
    vertices, shown = share_rows(view, room - len(head))
    parts: list[Text | Table] = list(head)
    if vertices:
        parts.append(table(VERTEX_COLUMNS, vertices, inner))
    if shown:
        parts.append(_incidents(view, shown, inner))
    title = Text(f"gyre{SEPARATOR}{view['job']['name'] or 'job'}")
    return Panel(Group(*parts), title=title, title_align="left", width=width)


# -- the job ----------------------------------------------------------------------------------------


def _head(view: View, history: RunHistory, at: float, now: float, width: int) -> list[Text]:
    """The lines about the job as a whole, each within `width`."""
    progress = history.progress
    lines = []
    if progress.get("steps"):
        lines.append(_bar(int(progress.get("step") or 0), int(progress["steps"]), width))
    lines += _wrap(_course(view, history, at, now), width)
    if lacks(view):
        lines += _wrap([(one_line(view["job"]["message"]), "yellow")], width)
    if history.rewards:
        lines.append(_reward(history.rewards, width))
    lines += _wrap([(fact, "") for fact in facts(view, progress)], width)
    if view.get("bottleneck"):
        lines += _wrap([(f"bottleneck: {view['bottleneck']}", "dim")], width)
    lines += [line for warning in warning_lines(view) for line in _wrap([(warning, "yellow")], width)]
    return lines


def _bar(step: int, steps: int, width: int) -> Text:
    from rich.text import Text

    label = f"step {step} of {steps}"
    length = max(min(BAR_WIDTH, width - len(label) - 2), 0)
    done = round(length * min(step / steps, 1.0))
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("━" * done, style="green")
    line.append("━" * (length - done), style="dim")
    return line.append(f"  {label}" if length else label)


def _course(view: View, history: RunHistory, at: float, now: float) -> list[tuple[str, str]]:
    """The phase, the time elapsed, and the time to go."""
    job = view["job"]
    phase = str(job["phase"])
    facts = [(state_of(view), "yellow" if lacks(view) else COLOURS.get(phase, ""))]
    if job["submitted_at"]:
        facts.append((f"elapsed {duration(ran_for(view, at))}", ""))
    remaining_s, step_s = history.remaining_s(now), history.step_s()
    if remaining_s is not None and not lacks(view):
        facts.append((f"ETA {duration(remaining_s)}", ""))
    if step_s is not None and makes_steps(job):
        facts.append((f"{duration(step_s)} a step", ""))
    return facts


def _reward(rewards: Sequence[float], width: int) -> Text:
    from rich.text import Text

    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"reward {rewards[-1]:.3f}")
    line.append("  ")
    return line.append(sparkline(rewards, min(BAR_WIDTH, width - len(line))), style="cyan")


def facts(view: View, progress: Mapping[str, Any]) -> list[str]:
    """What the trainer last reported, besides the step and the reward."""
    found = []
    warm = warm_start(view)
    if warm:
        found.append(warm)
    if view.get("evaluations") or progress.get("accuracy") is None:
        found += held_out(view)
    else:  # a trainer of the user's own, which reports it
        found.append(f"held-out {progress['accuracy']:.1%}")
    if progress.get("tokens_per_s") and makes_steps(view["job"]):
        found.append(f"{progress['tokens_per_s']:,.0f} tok/s")
    if progress.get("version", -1) >= 0:
        found.append(f"policy v{progress['version']}")
    if progress.get("checkpoint_step", -1) > 0:
        found.append(f"checkpoint at step {progress['checkpoint_step']}")
    if sessions := sessions_of(view):
        found.append(sessions_fact(sessions))
    return found


def state_of(view: View) -> str:
    """The phase, and what the job lacks in it: `running (store lost)`."""
    missing, phase = lacks(view).replace("_", " "), str(view["job"]["phase"])
    return f"{phase} ({missing})" if missing else phase


def warm_start(view: View) -> str:
    """The step of the supervised warm start while an actor is in it; otherwise empty."""
    for vertex in view["vertices"]:
        step = vertex["fields"].get("warm_start_step")
        if vertex["busy"] == "warm_start" and step:
            return f"supervised warm start, step {step}"
    return ""


def _wrap(facts: Sequence[tuple[str, str]], width: int) -> list[Text]:
    """Lines of facts with their styles, as many on each as fit; a fact is never broken."""
    from rich.text import Text

    lines: list[Text] = []
    for fact, style in facts:
        if lines and lines[-1].cell_len + len(SEPARATOR) + Text(fact).cell_len <= width:
            lines[-1].append(SEPARATOR, style="dim")
        else:
            lines.append(Text(no_wrap=True, overflow="ellipsis"))
        lines[-1].append(fact, style=style)
    return lines


# -- vertices and incidents -------------------------------------------------------------------------


def share_rows(view: View, room: int) -> tuple[list[Row], int]:
    """The rows of vertices and the number of incidents that fit into `room` rows, with a header above each."""
    shown = min(len(view["incidents"]), SHOWN_INCIDENTS)
    rows = fold_vertices(view, room - _block(shown) - 1)
    over = _block(len(rows)) + _block(shown) - room
    if over > 0:
        shown -= min(over, max(shown - LEAST_INCIDENTS, 0))
        rows = _cut(rows, room - _block(shown) - 1)
    return rows, max(min(shown, room - _block(len(rows)) - 1), 0)


def _block(rows: int) -> int:
    """The height of a table with this many rows; 0 if it has none."""
    return rows + 1 if rows else 0


def fold_vertices(view: View, room: int) -> list[Row]:
    """The master and the vertices, replicas folded into one row a role until there are at most `room` rows.

    There may be more, if the job has more roles.
    """
    roles: dict[str, list[dict[str, Any]]] = {}
    for vertex in view["vertices"]:
        roles.setdefault(vertex["role"], []).append(vertex)
    folded = {role for role, replicas in roles.items() if len(replicas) > SHOWN_REPLICAS}

    def height() -> int:
        return 1 + sum(1 if role in folded else len(replicas) for role, replicas in roles.items())

    for role in sorted(roles, key=lambda role: -len(roles[role])):
        if height() <= room or len(roles[role]) == 1:
            break
        folded.add(role)
    master = view["master"]
    answering = "answering" if master["answering"] else "away"
    rows: list[Row] = [("master", str(master["epoch"]), str(master["pid"]), answering, "")]
    for role, replicas in roles.items():
        if role in folded:
            rows.append(_folded(role, replicas))
            continue
        rows += [
            (
                vertex["id"],
                str(vertex["incarnation"]),
                str(vertex["pid"] or "–"),
                str(vertex["phase"]),
                vertex["busy"],
            )
            for vertex in replicas
        ]
    return rows


def _folded(role: str, replicas: Sequence[Mapping[str, Any]]) -> Row:
    """All replicas of a role as one row: the count in each phase, and their most frequent operators."""
    phases = Counter(str(vertex["phase"]) for vertex in replicas)
    doing = Counter(vertex["busy"] for vertex in replicas if vertex["busy"])
    return (
        f"{role} ×{len(replicas)}",
        "",
        "",
        ", ".join(f"{count} {phase}" for phase, count in phases.most_common()),
        ", ".join(f"{operator} ×{count}" for operator, count in doing.most_common(SHOWN_OPERATORS)),
    )


def _cut(rows: list[Row], room: int) -> list[Row]:
    """The first rows, and a last one with the number that is left out."""
    if len(rows) <= room:
        return rows
    return [*rows[: room - 1], (f"… {len(rows) - room + 1} more", "", "", "", "")] if room > 0 else []


def _incidents(view: View, shown: int, width: int) -> Table:
    """The newest incidents; the header has the total if some are not shown."""
    incidents = view["incidents"]
    name, *others = INCIDENT_COLUMNS
    if shown < len(incidents):
        name = replace(name, name=f"INCIDENTS ({len(incidents)})")
    return table((name, *others), rows_of(INCIDENT_COLUMNS, incidents[-shown:]), width)


def _took(incident: View, now: float) -> str:
    return duration(incident["recovery_s"]) if has_recovered(incident) else came_to(incident)


INCIDENT_COLUMNS = (
    Column("INCIDENTS", least=11, cell="vertex"),
    Column("CAUSE", least=12, cell="cause"),
    Column("TOOK", least=6, dispensable=1, cell=_took),
    Column("MESSAGE", least=16, cell=lambda one, now: incident_message(one) or one["decision"]),
)
