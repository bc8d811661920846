"""`completion`, and what a shell completes: verbs, options, and the names of jobs, roles and vertices.

Invariants:
- *quick*: pressing Tab imports neither SQLAlchemy nor Ray nor torch; names are read from the SQLite file by the
  standard library, and waited for at most `_BUSY_S`;
- *quiet*: where names cannot be read (there is no store yet, it is on PostgreSQL, its file is damaged) there are none,
  and no error.

This module knows the names of three columns of `gyre.store.tables`; a test compares what it reads with the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import click
from click.shell_completion import CompletionItem, get_completion_class

from gyre.api.cli.context import CliContext, verb

if TYPE_CHECKING:
    import sqlite3

VARIABLE = "_GYRE_COMPLETE"
"""Set by the shell's script when it asks the command for completions."""

SHELLS = ("bash", "zsh", "fish")

_BUSY_S = 0.05
_MOST_NAMES = 200
_MOST_NUMBERS = 16


@verb()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(session: CliContext, shell: str) -> None:
    """Print the completion script of a shell, which also completes the names of jobs, roles and vertices.

    \b
    bash   add to ~/.bashrc (bash 4.4 or newer):  eval "$(gyre completion bash)"
    zsh    add to ~/.zshrc, after compinit:  eval "$(gyre completion zsh)"
    fish   gyre completion fish > ~/.config/fish/completions/gyre.fish
    """
    from gyre.api.cli import main

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "gyre", VARIABLE).source())


# -- names ------------------------------------------------------------------------------------------


def jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names and ids of jobs: the live ones first, then the newest."""
    found = []
    for job_id, name, phase in _jobs(ctx.ensure_object(CliContext)):
        found += [CompletionItem(name, help=f"{phase}, {job_id}"), CompletionItem(job_id, help=phase)]
    return _beginning(found, incomplete)


def roles(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Roles of the job that the command line names, or of the newest."""
    return _beginning(map(CompletionItem, _roles(ctx, ctx.params.get("job"))), incomplete)


def job_then_roles(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Of `[JOB] ROLE=N`: the numbers that an elastic role may have. With two of them a shell completes up to `=`."""
    before = _words(ctx, param)
    found = [CompletionItem(f"{role}={n}") for role, n in _numbers(ctx, before[0] if before else None)]
    return [*([] if before else jobs(ctx, param, incomplete)), *_beginning(found, incomplete)]


def job_then_vertices(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Of `[JOB] VERTEX`."""
    before = _words(ctx, param)
    vertices = _beginning(map(CompletionItem, _vertices(ctx, before[0] if before else None)), incomplete)
    return [*([] if before else jobs(ctx, param, incomplete)), *vertices]


def _beginning(items: Iterable[CompletionItem], incomplete: str) -> list[CompletionItem]:
    """Those that begin so, each once."""
    found: dict[str, CompletionItem] = {}
    for item in items:
        if item.value.startswith(incomplete):
            found.setdefault(item.value, item)
    return list(found.values())


def _words(ctx: click.Context, param: click.Parameter) -> tuple[str, ...]:
    """The words of the argument that are complete."""
    return tuple(ctx.params.get(param.name or "") or ())


def _jobs(session: CliContext) -> list[tuple[str, str, str]]:
    """Id, name and phase of each job."""
    query = "SELECT job_id, name, phase FROM gyre_jobs ORDER BY ended_at IS NOT NULL, created_at DESC LIMIT ?"
    return _rows(session, query, _MOST_NAMES)


def _newest(ctx: click.Context, job: str | None) -> tuple[str, str] | None:
    """Id and spec of the job of that name or id, or of the newest."""
    query = (
        "SELECT job_id, spec FROM gyre_jobs WHERE ?1 IS NULL OR name = ?1 OR job_id = ?1 "
        "ORDER BY ended_at IS NOT NULL, created_at DESC LIMIT 1"
    )
    found = _rows(ctx.ensure_object(CliContext), query, job)
    return found[0] if found else None


def _specs(ctx: click.Context, job: str | None) -> dict[str, Any]:
    """The specs of the job's roles."""
    found = _newest(ctx, job)
    specs: dict[str, Any] = json.loads(found[1]).get("roles", {}) if found else {}
    return specs


def _roles(ctx: click.Context, job: str | None) -> list[str]:
    return sorted(_specs(ctx, job))


def _numbers(ctx: click.Context, job: str | None) -> Iterator[tuple[str, int]]:
    """Each elastic role of the job with each number of vertices that `gyre scale` may give it."""
    for role, spec in sorted(_specs(ctx, job).items()):
        if elastic := spec.get("elastic"):
            for count in range(elastic["min"], min(elastic["max"], elastic["min"] + _MOST_NUMBERS) + 1):
                yield role, count


def _vertices(ctx: click.Context, job: str | None) -> list[str]:
    found = _newest(ctx, job)
    if found is None:
        return []
    query = "SELECT key FROM gyre_snapshot WHERE job_id = ? AND kind = 'vertex' ORDER BY key LIMIT 200"
    return [key for (key,) in _rows(ctx.ensure_object(CliContext), query, found[0])]


def _rows(session: CliContext, query: str, *values: Any) -> list[Any]:
    """The rows of a query; none where they cannot be read."""
    try:
        with closing(_connection(session)) as connection:
            return connection.execute(query, values).fetchall()
    except Exception:  # Tab must not print a traceback into the line that is typed
        return []


def _connection(session: CliContext) -> sqlite3.Connection:
    """The SQLite file, to be read only. Raises ValueError for a store of another kind."""
    import sqlite3

    scheme, separator, path = session.store_url.partition(":///")
    if not separator or not scheme.startswith("sqlite") or session.url is not None:
        raise ValueError(session.store_url)
    file = unquote(path.partition("?")[0])
    return sqlite3.connect(f"file:{quote(file)}?mode=ro", uri=True, timeout=_BUSY_S)
