"""`nodes`, `drain`, `undrain`: the cluster's machines, and who is to leave them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from gyre.api.cli.completion import job_then_vertices
from gyre.api.cli.completion import jobs as job_names
from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import remark, write_json, write_table
from gyre.api.terminal.formats import duration
from gyre.api.terminal.text_tables import Column

SHOWN_ID = 12
"""Characters shown of a machine's id; `drain` takes them too."""

NODE_COLUMNS = (
    Column("NODE"),
    Column("IP"),
    Column("CPU", dispensable=2),
    Column("GPU", dispensable=2),
    Column("VERTICES", least=16, wraps=True),
    Column("DEATHS", dispensable=1),
    Column("STATE", least=16, wraps=True),
)


@verb()
@click.argument("job", required=False, shell_complete=job_names)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def nodes(session: CliContext, job: str | None, as_json: bool) -> None:
    """List the cluster's machines: resources, vertices, recent deaths, and whether new vertices are accepted."""
    with session.reader() as reader:
        found = reader.nodes(reader.find(job, live_first=True).job_id)
    if as_json:
        write_json(found)
        return
    write_table(
        NODE_COLUMNS,
        [
            (
                node["id"][:SHOWN_ID],
                node["ip"],
                f"{node['cpu']:g}",
                f"{node['gpu']:g}",
                ", ".join(node["vertices"]),
                node["deaths"] or "",
                _state(node),
            )
            for node in found
        ],
    )


def _state(node: dict[str, Any]) -> str:
    if not node["there"]:
        return "gone"
    if node["draining"]:
        return f"drained: {node['draining']}"
    found = str(node.get("found") or "")  # an older master reports none
    if node["left_until"] is not None:
        left = f"left alone for {duration(max(0.0, node['left_until'] - time.time()))}"
        return f"{left}: {found}" if found else left
    return found


@verb()
@click.argument(
    "words", nargs=-1, required=True, metavar="[JOB] NODE|VERTEX|INSTANCE", shell_complete=job_then_vertices
)
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Time that an instance which joined has to hand its samples over.",
)
@click.option("--reason", default="", metavar="TEXT", help="Reason to record.")
@click.option(
    "--ca",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="PEM file with the certificates to trust for an https --url.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def drain(
    session: CliContext,
    words: tuple[str, ...],
    deadline_s: float,
    reason: str,
    ca: Path | None,
    as_json: bool,
) -> None:
    """Move the work off a machine, a vertex or an instance that joined, and end its processes there.

    Vertices start again on other machines with room: gyre drain 10.0.0.7, gyre drain rollout-1. With the rollout
    manager's --url only instances can be named.
    """
    from gyre.api.cli.instances import drain_instance
    from gyre.errors import NotFound

    job, target = _job_and_target(words, "NODE|VERTEX|INSTANCE")
    if session.url is None:
        with session.reader() as reader:
            found = reader.find(job, live_first=True)
            try:
                seq = reader.command(found.job_id, "drain", {"target": target, "reason": reason})
            except NotFound:
                job = found.job_id  # it is perhaps an instance that nobody placed
            else:
                if as_json:
                    write_json({"job_id": found.job_id, "seq": seq})
                else:
                    remark(f"{found.name}: draining {target} (event {seq})")
                return
    answer = drain_instance(session, job, target, deadline_s=deadline_s, reason=reason or "asked to", ca=ca)
    if as_json:
        write_json(answer)
    else:
        remark(f"{target} is draining and leaves within {deadline_s:g} s")


@verb()
@click.argument(
    "words", nargs=-1, required=True, metavar="[JOB] NODE|VERTEX", shell_complete=job_then_vertices
)
@click.option("--json", "as_json", is_flag=True, help="Print the job's id and the event's number as JSON.")
def undrain(session: CliContext, words: tuple[str, ...], as_json: bool) -> None:
    """Use a machine again that was drained, or is avoided after failures. VERTEX means the machine it last ran on."""
    job, target = _job_and_target(words, "NODE|VERTEX")
    with session.reader() as reader:
        found = reader.find(job, live_first=True)
        seq = reader.command(found.job_id, "undrain", {"target": target})
    if as_json:
        write_json({"job_id": found.job_id, "seq": seq})
    else:
        remark(f"{found.name}: {target} is used again (event {seq})")


def _job_and_target(words: tuple[str, ...], expected: str) -> tuple[str | None, str]:
    if len(words) > 2:
        raise click.UsageError(f"{' '.join(words)!r}: expected [JOB] {expected}.")
    return (words[0] if len(words) == 2 else None), words[-1]
