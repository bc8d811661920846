"""`demo`, `run`, `submit`, `resume`: the verbs that start a job, or have it go on."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from gyre.api.cli.completion import jobs as job_names
from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import remark, write_json
from gyre.api.terminal.signals import ended_at_once
from gyre.errors import GyreError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from gyre.api.definition.rl_job import RLJob
    from gyre.api.handle import JobHandle
    from gyre.api.reader import JobReader


@verb()
@click.option("--chaos", is_flag=True, help="Kill processes of the job, including the master, while it runs.")
@click.option("--agent", is_flag=True, help="Have the model learn to use a calculator, over several turns.")
@click.option("--ui", "opens_page", is_flag=True, help="Open the job's web page in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print a summary at the end, as one JSON object.")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of optimizer steps.  [default: 80, or 16 with --agent]",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the model, the task and the chaos."
)
def demo(
    session: CliContext,
    chaos: bool,
    agent: bool,
    opens_page: bool,
    as_json: bool,
    steps: int | None,
    seed: int,
) -> int:
    """Train a small language model on two-digit addition, on this machine.

    The demo has every part of a job: a trainer, a gang of two actor ranks, rollouts, a reward and the master.
    """
    _load("gyre.api.demo")
    from gyre.api.demo import run_demo

    session.home.check_writable()
    return int(
        run_demo(chaos=chaos, as_json=as_json, steps=steps, seed=seed, opens_page=opens_page, agent=agent)
        or 0
    )


_WHERE = (
    click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=0,
        show_default=True,
        metavar="PORT",
        help="Port of the master's REST interface; 0 takes any free one.",
    ),
    click.option(
        "--host",
        default="127.0.0.1",
        show_default=True,
        metavar="ADDRESS",
        help="Address that the REST interface listens on; any but loopback needs --token.",
    ),
    click.option(
        "--tls-cert",
        default="",
        metavar="FILE",
        help="PEM file with the certificate of the REST interface.",
    ),
    click.option(
        "--tls-key",
        default="",
        metavar="FILE",
        help="PEM file with the key of that certificate, without a password.",
    ),
    click.option(
        "--plain-http",
        is_flag=True,
        help="Allow HTTP without TLS off loopback: the token crosses the network unencrypted.",
    ),
    click.option(
        "--no-wait",
        is_flag=True,
        help="Refuse the job if the cluster has no room for it now. By default it waits.",
    ),
    click.option(
        "--ray-address",
        envvar="RAY_ADDRESS",
        metavar="ADDRESS",
        help="Ray cluster to run on, as HOST:PORT or auto [RAY_ADDRESS].",
    ),
)
"""The options of `run`, `submit` and `resume` that say where the job runs and how its master is reached."""


def _where_options(command: Any) -> Any:
    for option in reversed(_WHERE):
        command = option(command)
    return command


def _job_options(command: Any) -> Any:
    """Add the options that `run` and `submit` share."""
    command = _where_options(command)
    for option in reversed(
        (
            click.option(
                "--set",
                "overrides",
                multiple=True,
                metavar="A.B=C",
                help="Override a key of the file, such as run.steps=20. May be repeated.",
            ),
            click.option("--name", metavar="NAME", help="Name of the job, instead of the file's."),
            click.option(
                "--from",
                "from_",
                metavar="JOB|FOLDER",
                shell_complete=job_names,
                help="Start from the weights of another job's last checkpoint, or of a checkpoint or model folder.",
            ),
            click.option(
                "--trust",
                is_flag=True,
                help="Let --from read a checkpoint in Megatron's own format, which can run code when it is read.",
            ),
            click.argument("file", type=click.Path()),
        )
    ):
        command = option(command)
    return command


@verb()
@_job_options
@click.option("--json", "as_json", is_flag=True, help="Print the job's state at the end, as one JSON object.")
def run(
    session: CliContext,
    file: str,
    name: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
    **where: Any,
) -> None:
    """Run a job file in the foreground, and stop the job gracefully on Ctrl-C.

    Without --ray-address, it starts Ray on this machine and stops it when the job ends.
    """
    _load()
    job = _job(session, file, overrides, name)
    _in_foreground(
        name or job.spec.name, lambda: _start(session, job, name, start_local=True, **where), as_json=as_json
    )


def _in_foreground(name: str, start: Callable[[], JobHandle], *, as_json: bool) -> None:
    """Start a job and follow it to its end."""
    from gyre.api.checks import line_of
    from gyre.api.terminal.foreground import cluster_watched, in_foreground, starting, terminable
    from gyre.api.terminal.live import LiveProgress

    with terminable():
        live = LiveProgress(f"{name}: starting …")
        try:
            with starting():
                handle = start()
            try:
                with in_foreground(handle):
                    try:
                        for note in handle.notes:
                            live.say(line_of(note))
                        live.say(f"job {handle.job_id}")
                        live.read_steps = lambda step: handle.steps(after=step)
                        handle.wait(on_view=cluster_watched(live.show))
                    finally:
                        live.close()
            finally:
                if as_json:  # also of a job that failed or was interrupted
                    _write_view(handle)
        finally:
            live.close()


def _write_view(handle: JobHandle) -> None:
    """Print the view of a job that has ended, or nothing where it cannot be read, which the last line says."""
    try:
        view = handle.status()
    except GyreError:
        return
    finally:
        handle.close()
    write_json(view)


@verb()
@click.argument("words", nargs=-1, metavar="[JOB] [FILE]", shell_complete=job_names)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="A.B=C",
    help="Change a key of the job, such as run.steps=200.",
)
@click.option(
    "--detach",
    is_flag=True,
    help="Return as soon as the master answers. Needs a cluster that keeps running: give --ray-address.",
)
@_where_options
@click.option("--json", "as_json", is_flag=True, help="Print the job's state at the end, as one JSON object.")
def resume(
    session: CliContext,
    words: tuple[str, ...],
    overrides: tuple[str, ...],
    detach: bool,
    as_json: bool,
    **where: Any,
) -> None:
    """Resume a paused job, or continue one that has ended: gyre resume grpo --set run.steps=200

    A job that has ended continues in the foreground, as with `gyre run`, from its journal and its last checkpoint.
    FILE replaces the job's file: it may change how long and where the job runs, not what it trains.
    """
    if len(words) > 2:
        raise click.UsageError(f"{' '.join(words)!r}: expected [JOB] [FILE].")
    job, file = (*words, None, None)[:2]
    with session.reader() as reader:
        found = reader.find(job, live_first=True)
        if found.live and file is None and not overrides and not _is_lost(session, reader, found.job_id):
            seq = reader.command(found.job_id, "resume", {})
            if as_json:
                write_json({"job_id": found.job_id, "seq": seq})
            else:
                remark(f"{found.name}: resuming (event {seq})")
            return
        before, store_url = reader.store.job(found.job_id).spec, reader.store.url
        view = reader.view(found.job_id)
    from gyre.api.terminal.run_end import last_lines, nothing_left
    from gyre.config.parse import apply_overrides

    job_of_file = _job(session, file, overrides) if file is not None else None
    after = (
        apply_overrides(before, overrides)
        if job_of_file is None
        else job_of_file.spec.model_dump(mode="json")
    )
    if sentences := nothing_left(view, after, changed=file is not None or bool(overrides)):
        for line in (*last_lines(view), *sentences):
            remark(line)
        if as_json:
            write_json(view)
        return
    _load("gyre.api.resume")
    from gyre.api.resume import resume_job

    def start() -> JobHandle:
        with _named(job_of_file):
            return resume_job(
                found.job_id,
                after,
                store_url=store_url,
                home_path=session.home.path,
                token=session.token,
                start_local=not detach,
                **where,
            )

    if not detach:
        _in_foreground(found.name, start, as_json=as_json)
        return
    from gyre.api.checks import line_of

    handle = start()
    for note in handle.notes:
        remark(line_of(note))
    if as_json:
        write_json({"job_id": handle.job_id})
    else:
        click.echo(handle.job_id)


@verb()
@_job_options
@click.option("--json", "as_json", is_flag=True, help="Print the job's id as a JSON object.")
def submit(
    session: CliContext,
    file: str,
    name: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
    **where: Any,
) -> None:
    """Submit a job file to a Ray cluster, print the job's id, and return as soon as its master answers."""
    from gyre.api.checks import line_of

    handle = _start(session, _job(session, file, overrides, name), name, start_local=False, **where)
    for note in handle.notes:
        remark(line_of(note))
    certificate = session.home.rest_certificate(handle.job_id)
    if certificate.is_file():
        from gyre.api.tls import fingerprint_of

        remark(f"elsewhere give --fingerprint {fingerprint_of(certificate.read_text())}")
    if as_json:
        write_json({"job_id": handle.job_id})
    else:
        click.echo(handle.job_id)


def _is_lost(session: CliContext, reader: JobReader, job_id: str) -> bool:
    """Whether the job's cluster is gone, as far as can be seen from here."""
    from gyre.api.orphaned_jobs import is_lost

    return session.url is None and is_lost(reader.store, reader.store.job(job_id))


def _load(*more: str) -> None:
    """Import what takes long to import, before there is anything that an interrupt would leave behind."""
    with ended_at_once("interrupted before anything was started"):
        for name in (*_LOADED, *more):
            importlib.import_module(name)


_LOADED = (
    "gyre.api.definition.jobfile",
    "gyre.api.submit",
    "gyre.api.terminal.foreground",
    "gyre.api.terminal.live",
    "gyre.master.master_actor",
    "ray",
    "rich.live",
)


def _job(session: CliContext, file: str, overrides: tuple[str, ...], name: str | None = None) -> RLJob:
    """Returns the job of a file, and reports its mistakes before anything that takes time."""
    from gyre.api.definition.jobfile import load_job_file
    from gyre.config import parse_job
    from gyre.errors import ConfigError

    job = load_job_file(file, overrides)
    if name is not None:
        try:
            parse_job({"name": name})
        except ConfigError as error:
            raise ConfigError(f"--{error.message}", hint=error.hint) from None
    if session.store is not None:
        job.spec.store.url = session.store
    return job


def _named(job: RLJob | None) -> AbstractContextManager[None]:
    """Mistakes that come out of this block name file and line of the job that was read from a file."""
    return job.source.named() if job is not None and job.source is not None else nullcontext()


def _start(session: CliContext, job: RLJob, name: str | None, **where: Any) -> JobHandle:
    from gyre.api.submit import submit_job

    with _named(job):
        return submit_job(job.spec, name, home_path=session.home.path, token=session.token, **where)
