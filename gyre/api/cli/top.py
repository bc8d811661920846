"""`top`: the live panel of any job. It attaches and leaves; the job does not notice."""

from __future__ import annotations

import time

import click

from gyre.api.cli.completion import jobs as job_names
from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import remark

LOOK_S = 0.5
EARLIER_STEPS = 500
"""Steps before it attached whose rewards the panel's line has."""


@verb()
@click.argument("job", required=False, shell_complete=job_names)
def top(session: CliContext, job: str | None) -> int:
    """Watch a job live, as `gyre run` shows it. Ctrl-C leaves; the job goes on."""
    from gyre.api.terminal.live import LiveProgress
    from gyre.api.terminal.run_end import last_lines
    from gyre.failover import JobPhase

    with session.reader() as reader:
        found = reader.find(job, live_first=True)
        view = reader.view(found.job_id)
        if not JobPhase(view["job"]["phase"]).ended:
            live = LiveProgress(f"{found.name}  {found.job_id}; Ctrl-C leaves, the job goes on")
            live.read_steps = lambda step: reader.steps(found.job_id, after=step)
            live.recall(reader.steps(found.job_id, last=EARLIER_STEPS))
            try:
                while not JobPhase(view["job"]["phase"]).ended:
                    live.show(view)
                    time.sleep(LOOK_S)
                    view = reader.view(found.job_id)
            except KeyboardInterrupt:
                live.close()
                remark(f"left {found.name}; it goes on")
                return 0
            finally:
                live.close()
    for line in last_lines(view):
        remark(line)
    return 0
