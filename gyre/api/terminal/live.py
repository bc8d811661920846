"""A live view of a running job for people, on stderr: a panel on a terminal, elsewhere a line every so often."""

from __future__ import annotations

import sys
import time
import webbrowser
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gyre.api.page_files import is_built
from gyre.api.terminal.formats import duration, incident_message, waits_of
from gyre.api.terminal.panel import SEPARATOR, draw_panel, facts, state_of
from gyre.api.terminal.run_end import incidents_of_this_run
from gyre.api.terminal.run_history import RunHistory
from gyre.errors import GyreError
from gyre.master.master_api import door_url, lacks
from gyre.workloads.trainer.learning.step_line import step_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console, ConsoleOptions, RenderResult

    ReadSteps = Callable[[int], Sequence[Mapping[str, Any]]]

MOST_LINES = 256
"""Most lines of steps between two looks at a job, which are a fraction of a second apart."""
STEPLESS_S = 30.0
"""Where no step came for so long, a pipe has lines of the job's state again."""
LINE_EVERY_S = 5.0
SAME_LINE_EVERY_S = 60.0
LINE_WIDTH = 240
"""Width of a line if stderr is no terminal."""

SAID_MESSAGE = 300
"""Characters of an incident's message that are printed; `gyre show` and `gyre events --json` have all of it."""


def door_lines(view: Mapping[str, Any]) -> list[str]:
    """Where a fleet's door is, and the command that makes a key; empty of another job, or before it is open."""
    url = door_url(view)
    if not url:
        return []
    name = view["job"]["name"]
    return [
        f"door {url}",
        f"a key for it: gyre token create {name} --name lab --scope generate --scope publish",
    ]


class LiveProgress:
    """The live view: `show` takes views of the job as they come, `say` puts a line above the panel. Only `say` is
    thread-safe."""

    def __init__(self, title: str) -> None:
        from rich.console import Console

        self._title = title
        terminal = sys.stderr.isatty()
        self._console = Console(stderr=True, highlight=False, width=None if terminal else LINE_WIDTH)
        self._live: Any = None
        self._said, self._said_at = "", 0.0
        self._told: set[str] = set()
        self._warned: set[str] = set()
        self._waits = ""
        self._page_told = self._door_told = False
        self.opens_page = False
        """Whether a browser is opened at the page's address once that is known."""
        self._steps = StepLines()
        self.read_steps: ReadSteps | None = None
        """Gives the metrics of the job's steps beyond one; a look may come after several."""
        self._history = RunHistory()
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        self.say(title)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=self._live is None)  # a pipe has it on one line

    def show(self, view: dict[str, Any]) -> None:
        self._history.observe(view, time.monotonic())
        self._say_address(view)
        self._say_door(view)
        self._say_steps(view)
        for incident in incidents_of_this_run(view):
            if incident["id"] not in self._told:
                self._told.add(incident["id"])
                self.say(_incident_line(incident))
        for vertex in view["vertices"]:
            change = f"{vertex['id']}/{vertex['incarnation']}/{vertex['phase']}"
            if vertex["reason"] == "scaled" and vertex["message"] and change not in self._told:
                self._told.add(change)
                if vertex["phase"] in ("starting", "stopping"):
                    self.say(f"~ {vertex['id']} is {vertex['phase']}: {vertex['message']}")
        waits = lacks(view)
        if waits and waits != self._waits:  # one line, however many wait
            self.say(f"~ {view['job']['message']}")
        self._waits = waits
        if self._live is not None:
            self._live.update(LivePanel(view, self._history))
        else:
            self._say_line(view)

    def _say_address(self, view: dict[str, Any]) -> None:
        """Print once where the page of the job is, as soon as its master answers."""
        url = str(view["master"]["url"])
        if self._page_told or not url or not view["master"]["answering"] or not is_built():
            return
        self._page_told = True
        self.say(f"page {url}")
        if self.opens_page:
            webbrowser.open(url)

    def _say_door(self, view: dict[str, Any]) -> None:
        """Print once where a fleet's door is, and how to make a key for it."""
        if not self._door_told and (lines := door_lines(view)):
            self._door_told = True
            for line in lines:
                self.say(line)

    def _say_steps(self, view: dict[str, Any]) -> None:
        """Print the steps that are new, and what is newly warned of."""
        width = self._console.width if self._live is not None else None
        for line in self._steps.lines_of(view, time.monotonic(), self.read_steps, width=width):
            self.say(line)
        for warning in view.get("warnings") or ():
            if warning["code"] not in self._warned:
                self._warned.add(warning["code"])
                self.say(f"! learning: {warning['message']}")

    def _say_line(self, view: dict[str, Any]) -> None:
        """Print a line if stderr is no terminal: every so often, and less often if nothing is new."""
        line, now = line_of(view, self._history), time.monotonic()
        if view["job"]["ended_at"] or now - self._steps.said_at < STEPLESS_S:
            return
        if now - self._said_at >= (LINE_EVERY_S if line != self._said else SAME_LINE_EVERY_S):
            self._said, self._said_at = line, now
            remaining_s = self._history.remaining_s(now)
            self.say(
                line
                if remaining_s is None or lacks(view)
                else f"{line}{SEPARATOR}ETA {duration(remaining_s)}"
            )

    def recall(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Give the panel the rewards of steps that were made before it came."""
        self._history.recall(steps)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        sys.stderr.flush()


class StepLines:
    """The lines of a job's steps as a watcher prints them: one a step, from the first that it sees."""

    def __init__(self) -> None:
        self.said_at = float("-inf")
        """When the last line was made, on the clock of `now`."""
        self._step = 0
        self._seen = False

    def lines_of(
        self, view: Mapping[str, Any], now: float, read: ReadSteps | None = None, *, width: int | None = None
    ) -> list[str]:
        """A line for each step up to the view's last that has none yet. `read` gives the metrics of the steps beyond
        one, where a view has skipped some; without it the last one's line says how many it skipped. `width` is that
        of `step_line`."""
        training = view.get("training") or {}
        last = training.get("last") or {}
        step = last.get("step")
        if not isinstance(step, int):
            self._seen = True  # whatever steps come are seen from the first on
            return []
        if (
            not self._seen
        ):  # the watcher came later: steps before are no news, nor those before the job went on
            self._seen, self._step = True, max(step - 1, int(training.get("continued_step") or 0))
        if step <= self._step:
            return []
        missed = range(self._step + 1, step)
        known = self._read(read, missed[-MOST_LINES:]) if missed else {}
        self._step, self.said_at = step, now
        steps = view["progress"].get("steps")
        planned = steps if isinstance(steps, int) else 0
        lines = [step_line(known[one], steps=planned, width=width) for one in missed if one in known]
        skipped = len(missed) - len(lines)
        waits = waits_of(view["progress"])
        return [*lines, step_line(last, steps=planned, waits=waits, skipped=skipped, width=width)]

    @staticmethod
    def _read(read: ReadSteps | None, missed: range) -> Mapping[int, Mapping[str, Any]]:
        """The metrics of the missed steps, as far as they can be had now. The job may be ahead of the view."""
        if read is None:
            return {}
        try:
            found = read(missed.start - 1)
        except GyreError:  # the store is busy or away: the last line says how many are not shown
            return {}
        return {row["step"]: row for row in found if row.get("step") in missed}


class LivePanel:
    """The panel, drawn anew each time for the present time and size of the terminal."""

    def __init__(self, view: Mapping[str, Any], history: RunHistory) -> None:
        self._view, self._history = view, history

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield draw_panel(
            self._view,
            self._history,
            at=time.time(),
            now=time.monotonic(),
            width=options.max_width,
            height=options.max_height - 1,  # the cursor's own line below the panel
        )


def line_of(view: Mapping[str, Any], history: RunHistory) -> str:
    """The view as one line, which stays the same while only time passes."""
    progress = history.progress
    parts = [state_of(view)]
    if progress.get("steps"):
        parts.append(f"step {progress.get('step')}/{progress['steps']}")
    if history.rewards:
        parts.append(f"reward {history.rewards[-1]:.2f}")
    parts += facts(view, progress)
    if view.get("bottleneck") and view["progress"].get("step"):
        parts.append(f"bottleneck: {view['bottleneck']}")
    count = len(incidents_of_this_run(view))
    parts.append(f"{count} incident{'' if count == 1 else 's'}")
    return SEPARATOR.join(parts)


def _incident_line(incident: Mapping[str, Any]) -> str:
    """An incident on one line: `! reward-0: user_code in the job's own code: ValueError → call it again`."""
    whose = " in the job's own code" if incident["user_code"] else ""
    message = incident_message(incident)
    if len(message) > SAID_MESSAGE:
        message = message[: SAID_MESSAGE - 1] + "…"
    why = f": {message}" if message else ""
    return f"! {incident['vertex']}: {incident['cause']}{whose}{why} → {incident['decision']}"
