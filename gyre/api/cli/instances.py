"""`join`: rollout instances that come and go while a job runs, and what `drain` says to the rollout manager."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import remark

if TYPE_CHECKING:
    from gyre.rollouts.protocol.endpoint import Endpoint


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise click.UsageError(
            f"{url!r} is not the address of a rollout manager, such as http://10.0.0.5:41234."
        )
    return url


@verb()
@click.argument("address", metavar="URL")
@click.option(
    "--name", metavar="NAME", help="Name of the instance; by default this machine's name and process id."
)
@click.option(
    "--engine",
    metavar="ENGINE",
    help="sglang (the default), vllm, embedded, or your own as module:function.",
)
@click.option(
    "--model",
    type=click.Path(exists=True, path_type=Path),
    help="Local model folder, which replaces {model} in FLAGS; of a job that trains an adapter, the model beside it.",
)
@click.option("--python", metavar="PATH", help="Python interpreter that has the engine installed.")
@click.option(
    "--max-running",
    type=click.IntRange(1),
    metavar="N",
    help="Maximum number of samples to generate at once; by default what the engine reports.",
)
@click.option(
    "--kv-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Size of the KV cache in tokens; by default what the engine reports.",
)
@click.option(
    "--cache",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for weights.  [default: /dev/shm]",
)
@click.option(
    "--notice-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Leave the job once this file exists.",
)
@click.option(
    "--drain-deadline",
    "drain_s",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Time to hand samples over when the instance leaves.",
)
@click.option(
    "--reach-within",
    "reach_s",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Exit after this time without an answer from the manager.",
)
@click.option(
    "--ca",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="PEM file with the certificates to trust for an https URL; by default this machine's.",
)
@click.option(
    "--weights-bind",
    metavar="ADDRESS",
    help="Address at which to serve weights to other instances, instead of the job's weights.bind.",
)
@click.option(
    "--weights-ports",
    metavar="PORTS",
    help="Port or range of ports, such as 7100-7107, at which to serve weights.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def join(
    session: CliContext,
    address: str,
    name: str | None,
    engine: str | None,
    model: Path | None,
    python: str | None,
    max_running: int | None,
    kv_tokens: int | None,
    cache: Path | None,
    notice_file: Path | None,
    drain_s: float,
    reach_s: float,
    ca: Path | None,
    weights_bind: str | None,
    weights_ports: str | None,
    flags: tuple[str, ...],
) -> None:
    """Join a job as a rollout instance on this machine: gyre join URL --token T -- ENGINE FLAGS

    URL is the rollout manager's, or the job's folder with rollouts.json. On SIGTERM the instance hands its samples over
    and exits with 0.
    """
    import asyncio

    ca = ca or (Path(session.ca) if session.ca else None)
    from gyre.config.plugins import ENGINE, JOINS
    from gyre.extras import installed, missing
    from gyre.rollouts.agent.agent import AgentSettings, JobWishes
    from gyre.rollouts.agent.join import EngineCommands, run_agent
    from gyre.rollouts.engines import known_engine
    from gyre.weights.owned_dirs import default_root

    engine = engine or JOINS
    try:
        ENGINE.check(engine)
    except ValueError as error:
        raise click.UsageError(f"--engine {engine!r} {error}") from None
    instance = name or f"{socket.gethostname()}-{os.getpid()}"
    if not instance.isascii() or not instance.isprintable() or " " in instance or len(instance) > 200:
        raise click.UsageError(f"--name {instance!r}: at most 200 visible ASCII characters without spaces.")
    settings = AgentSettings(
        name=instance,
        max_running=max_running,
        kv_tokens=kv_tokens,
        cache=cache or default_root(),
        engine=engine,
        bind=weights_bind,
        ports=weights_ports,
        base=model if model is not None and any(model.glob("*.safetensors")) else None,
    )
    _check_weights(weights_bind, weights_ports)
    kind = known_engine(engine)
    if kind is not None and not kind.apart and python is None and not installed(kind.package):
        raise missing(kind.package, kind.label.capitalize())
    wishes = JobWishes()
    commands = EngineCommands(
        engine,
        max_running=max_running,
        kv_tokens=kv_tokens,
        wishes=wishes,
        model=model,
        python=python,
        extra=flags,
    )
    asyncio.run(
        run_agent(
            settings,
            _endpoint(session, address, ca),
            commands,
            wishes=wishes,
            notice_file=notice_file,
            drain_deadline_s=drain_s,
            reach_within_s=reach_s,
            say=remark,
        )
    )


def _check_weights(bind: str | None, ports: str | None) -> None:
    from pydantic import ValidationError

    from gyre.config import WeightsSpec, config_error

    given = {"bind": bind, "ports": ports}
    try:
        WeightsSpec.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        raise click.UsageError(config_error(error, WeightsSpec, "--weights-").message) from None


def _endpoint(session: CliContext, address: str, ca: Path | None) -> Endpoint:
    from gyre.rollouts.protocol.credentials import joining_context
    from gyre.rollouts.protocol.endpoint import FixedEndpoint, JobEndpoint

    directory = Path(address)
    if directory.is_dir():
        return JobEndpoint(directory, joins=True, context=joining_context(ca) if ca is not None else None)
    if not session.token:
        raise click.UsageError(
            "Give a join token, such as `gyre token create` makes: --token, or GYRE_TOKEN."
        )
    url = _checked(address)
    is_tls = ca is not None or address.startswith("https://")
    return FixedEndpoint(url, session.token, joining_context(ca) if is_tls else None)


def drain_instance(
    session: CliContext, job: str | None, instance: str, *, deadline_s: float, reason: str, ca: Path | None
) -> dict[str, Any]:
    """Have the rollout manager drain an instance. Returns its answer."""
    url, token, trust = _manager(session, job, ca or (Path(session.ca) if session.ca else None))
    body = {"instance": instance, "deadline_s": deadline_s, "reason": reason}
    return _post(f"{url.rstrip('/')}/v1/drain", token, body, trust)


def _manager(session: CliContext, job: str | None, ca: Path | None) -> tuple[str, str, ssl.SSLContext | None]:
    """Returns the rollout manager's URL, its token and the certificates to trust: from --url, --token and --ca, or from
    the job's directory."""
    from gyre.errors import NotFound
    from gyre.rollouts.protocol.credentials import joining_context
    from gyre.rollouts.protocol.endpoint import read_endpoint, read_trust

    if session.url is not None:
        if not session.token:
            raise click.UsageError(
                "With --url give the token that the instance joined with: --token, or GYRE_TOKEN."
            )
        return _checked(session.url), session.token, joining_context(ca) if ca is not None else None
    with session.reader() as reader:
        found = reader.find(job, live_first=True)
    directory = session.home.job_directory(found.job_id)
    where = read_endpoint(directory)
    if where is None:
        raise NotFound(
            f"Job {found.name} has no rollout manager known on this machine.",
            hint="On another machine give --url and --token; they stand in rollouts.json in the job's directory.",
        )
    return *where, read_trust(directory)


def _post(url: str, token: str, body: dict[str, Any], trust: ssl.SSLContext | None) -> dict[str, Any]:
    import httpx

    from gyre.errors import ConfigError, NotFound, Unauthorized, Unreachable
    from gyre.observe.http_deadline import bounded, within

    try:
        headers = {"Authorization": f"Bearer {token}"}
        # The manager is Gyre's own: no proxy of the environment stands before it.
        with (
            within(10.0),
            bounded(httpx.Client(timeout=10.0, verify=trust or True, trust_env=False)) as client,
        ):
            reply = client.post(url, json=body, headers=headers)
        answer = reply.json()
        said = str(answer.get("message", answer))
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        raise Unreachable(
            f"The rollout manager at {url} did not answer: {error!r}.",
            hint="Check with `gyre show` that the job runs.",
        ) from None
    kinds = {401: Unauthorized, 404: NotFound, 422: ConfigError}
    if reply.status_code != 200:
        raise kinds.get(reply.status_code, Unreachable)(f"The rollout manager refused: {said}")
    return dict(answer)
