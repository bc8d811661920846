"""`token`: who may join a job's rollout plane from another machine, or use a fleet's door."""

from __future__ import annotations

import time
from typing import Any

import click

from gyre.api.cli.completion import jobs as job_names
from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import remark, write_json
from gyre.config import GENERATE_SCOPE, JOIN_SCOPE, PUBLISH_SCOPE, TOKEN_SCOPES

_MAY = {
    JOIN_SCOPE: "join as an instance",
    GENERATE_SCOPE: "ask for samples",
    PUBLISH_SCOPE: "publish policies",
}

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.group()
def token() -> None:
    """Create, list and revoke the tokens of machines that join a job, and of a fleet's users: gyre token create JOB
    --name spot"""


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A duration such as 90s, 30m, 12h or 7d."""
    if value is None:
        return None
    number, unit = value[:-1], value[-1:]
    if not number.isdecimal() or unit not in _SECONDS or not 0 < int(number) < 10**6:
        raise click.BadParameter(f"{value!r}: expected a time such as 90s, 30m, 12h or 7d.")
    return float(int(number) * _SECONDS[unit])


_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@verb()
@click.argument("job", required=False, shell_complete=job_names)
@click.option("--name", required=True, metavar="NAME", help="Name of the token, for `ls` and `revoke`.")
@click.option(
    "--expires-in",
    "expires_in_s",
    metavar="TIME",
    callback=_seconds,
    help="How long it is valid, such as 90s, 30m, 12h or 7d; by default until it is revoked.",
)
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(TOKEN_SCOPES),
    default=(JOIN_SCOPE,),
    show_default=True,
    help="What its owner may do: join as an instance; at a fleet's door, generate or publish. May be given again.",
)
@_JSON
def create(
    session: CliContext,
    job: str | None,
    name: str,
    expires_in_s: float | None,
    scopes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Create a token and print it once. Only its SHA-256 is stored."""
    expires_at = None if expires_in_s is None else time.time() + expires_in_s
    with session.reader() as reader:
        found = reader.find(job, live_first=True)
        made, seq = reader.create_token(found.job_id, name, expires_at=expires_at, scopes=scopes)
    if as_json:
        told = {"job_id": found.job_id, "seq": seq, "name": name, "expires_at": expires_at, "token": made}
        write_json({**told, "scopes": list(scopes)})
        return
    click.echo(made)
    may = " and ".join(_MAY[scope] for scope in TOKEN_SCOPES if scope in scopes)
    remark(f"{found.name}: whoever has this token may {may}; it is not shown again (event {seq})")


@verb()
@click.argument("job", required=False, shell_complete=job_names)
@_JSON
def ls(session: CliContext, job: str | None, as_json: bool) -> None:
    """List the names of a job's tokens, and how long each is valid."""
    with session.reader() as reader:
        tokens = reader.tokens(reader.find(job, live_first=True).job_id)
    if as_json:
        write_json(tokens)
        return
    now = time.time()
    for one in tokens:
        click.echo(f"{one['name']}\t{_state(one, now)}\t{', '.join(one['scopes'])}")


def _state(one: dict[str, Any], now: float) -> str:
    if one["revoked_at"] is not None:
        return "revoked"
    if one["expires_at"] is None:
        return "valid"
    left_s = one["expires_at"] - now
    return f"valid for {left_s:.0f} s" if left_s > 0 else "expired"


@verb()
@click.argument("words", nargs=-1, required=True, metavar="[JOB] NAME")
@_JSON
def revoke(session: CliContext, words: tuple[str, ...], as_json: bool) -> None:
    """Revoke a token and disconnect its instances, whose samples continue elsewhere."""
    if len(words) > 2:
        raise click.UsageError(f"{' '.join(words)!r}: expected [JOB] NAME.")
    *jobs, name = words
    with session.reader() as reader:
        found = reader.find(jobs[0] if jobs else None, live_first=True)
        seq = reader.command(found.job_id, "revoke_token", {"name": name})
    if as_json:
        write_json({"job_id": found.job_id, "seq": seq})
    else:
        remark(f"{found.name}: token {name} is revoked; its instances are cut within a second (event {seq})")


for command in (create, ls, revoke):
    token.add_command(command)
