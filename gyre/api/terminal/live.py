"""A live view of a running job for people, on stderr: a panel on a terminal, a line every so often elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

LINE_EVERY_S = 5.0
SAME_LINE_EVERY_S = 60.0
SHOWN_INCIDENTS = 6
LINE_WIDTH = 240
"""Where nobody looks a line is not folded to a terminal that is not there."""


class LiveProgress:
    """`show` takes views of the job as they come, `say` puts a line above the panel. Not thread-safe but for `say`."""

    def __init__(self, title: str) -> None:
        from rich.console import Console

        self._title = title
        terminal = sys.stderr.isatty()
        self._console = Console(stderr=True, highlight=False, width=None if terminal else LINE_WIDTH)
        self._live: Any = None
        self._said, self._said_at = "", 0.0
        self._told: set[str] = set()
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        self.say(title)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def show(self, view: dict[str, Any]) -> None:
        for incident in view["incidents"]:
            if incident["id"] not in self._told:
                self._told.add(incident["id"])
                whose = " in the job's own code" if incident["user_code"] else ""
                self.say(f"! {incident['vertex']}: {incident['cause']}{whose} → {incident['decision']}")
        for vertex in view["vertices"]:
            change = f"{vertex['id']}/{vertex['incarnation']}/{vertex['phase']}"
            if vertex["reason"] == "scaled" and vertex["message"] and change not in self._told:
                self._told.add(change)
                if vertex["phase"] in ("starting", "stopping"):
                    self.say(f"~ {vertex['id']} is {vertex['phase']}: {vertex['message']}")
        if self._live is not None:
            self._live.update(_panel(view))
        else:
            self._say_line(line_of(view))

    def _say_line(self, line: str) -> None:
        """Where nobody watches: a line every so often, and one that says nothing new less often."""
        waited_s = time.monotonic() - self._said_at
        if waited_s >= (LINE_EVERY_S if line != self._said else SAME_LINE_EVERY_S):
            self._said, self._said_at = line, time.monotonic()
            self.say(line)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        sys.stderr.flush()


def line_of(view: dict[str, Any]) -> str:
    """The view as one line."""
    progress = view["progress"]
    parts = [str(view["job"]["phase"])]
    if progress.get("steps"):
        parts.append(f"step {progress.get('step')}/{progress['steps']}")
    warm = _warm_start(view)
    if warm:
        parts.append(warm)
    if progress.get("reward") is not None:
        parts.append(f"reward {progress['reward']:.2f}")
    if progress.get("accuracy") is not None:
        parts.append(f"held-out {progress['accuracy']:.1%}")
    if progress.get("tokens_per_s"):
        parts.append(f"{progress['tokens_per_s']:,.0f} tok/s")
    if progress.get("version", -1) >= 0:
        parts.append(f"policy v{progress['version']}")
    waits = _top_wait(progress)
    if waits:
        parts.append(waits)
    count = len(view["incidents"])
    parts.append(f"{count} incident{'' if count == 1 else 's'}")
    return " · ".join(parts)


def _warm_start(view: dict[str, Any]) -> str:
    for vertex in view["vertices"]:
        step = vertex["fields"].get("warm_start_step")
        if vertex["busy"] == "warm_start" and step:
            return f"supervised warm start, step {step}"
    return ""


def _top_wait(progress: dict[str, Any]) -> str:
    waits = progress.get("waits") or {}
    top = next(iter(waits.items()), None)
    return f"{top[0]} {top[1]:.0%}" if top else ""


def _panel(view: dict[str, Any]) -> Any:
    from rich.columns import Columns
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    progress = view["progress"]
    facts = Table.grid(padding=(0, 2))
    for name, value in (
        ("phase", str(view["job"]["phase"])),
        ("step", f"{progress.get('step', 0)} of {progress['steps']}" if progress.get("steps") else "–"),
        ("reward", _number(progress.get("reward"), "{:.3f}")),
        ("held-out accuracy", _number(progress.get("accuracy"), "{:.1%}")),
        ("tokens/s", _number(progress.get("tokens_per_s"), "{:,.0f}")),
        ("policy version", str(progress.get("version", "–"))),
        ("checkpoint", f"step {progress['checkpoint_step']}" if progress.get("checkpoint_step") else "–"),
        ("warm start", _warm_start(view) or "–"),
    ):
        facts.add_row(Text(name, style="dim"), value)
    waits = Table.grid(padding=(0, 2))
    for who, share in list((progress.get("waits") or {}).items())[:4]:
        waits.add_row(Text(who, style="dim"), f"{share:.0%}")
    vertices = Table.grid(padding=(0, 2))
    master = view["master"]
    answering = "answering" if master["answering"] else "away"
    vertices.add_row("master", f"epoch {master['epoch']}", str(master["pid"]), answering)
    for vertex in view["vertices"]:
        busy = vertex["busy"] or str(vertex["phase"])
        vertices.add_row(vertex["id"], f"#{vertex['incarnation']}", str(vertex["pid"] or "–"), busy)
    incidents = Table.grid(padding=(0, 2))
    for incident in view["incidents"][-SHOWN_INCIDENTS:]:
        took = (
            f"{incident['recovery_s']:.1f} s" if incident["recovery_s"] is not None else incident["outcome"]
        )
        incidents.add_row(incident["vertex"], incident["cause"], str(incident["scope"]), took)
    bar = ProgressBar(total=progress.get("steps") or 1, completed=progress.get("step") or 0, width=60)
    parts: list[Any] = [bar, Columns([facts, vertices], padding=(0, 4))]
    if progress.get("waits"):
        parts += [Text("who waits for whom", style="bold"), waits]
    if view["incidents"]:
        parts += [Text(f"incidents ({len(view['incidents'])})", style="bold"), incidents]
    return Panel(Group(*parts), title=f"gyre · {view['job']['name'] or 'job'}", title_align="left")


def _number(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) else "–"
