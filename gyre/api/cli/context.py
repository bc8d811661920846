"""The global options: where the home, the store and the master are, and the reader over them.

The global options stand before the verb or after it: `gyre --url U show` and `gyre show --url U` are the same.
Imports of weight happen inside the methods, for `gyre --help` imports this file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gyre.api.home import VARIABLE, Home, home

if TYPE_CHECKING:
    from gyre.api.reader import JobReader

Command = TypeVar("Command", bound=Callable[..., Any])


class CliContext:
    """The global options of one invocation."""

    def __init__(self) -> None:
        self.home_path: str | None = None
        self.store: str | None = None
        self.url: str | None = None
        self.token: str | None = None
        self.ca: str | None = None
        self.fingerprint: str | None = None
        self.debug = False

    @property
    def home(self) -> Home:
        return home(self.home_path)

    @property
    def store_url(self) -> str:
        """--store, or else the database in the home."""
        return self.store or self.home.database_url()

    def has_store(self) -> bool:
        """Whether there is a database to read. A fresh home has none; for `ls` that is not an error. One that
        a running job has lost counts: its reader says so."""
        if self.store is not None or _holds_something(self.home.path / "gyre.db"):
            return True
        from gyre.master.store_notes import notes_below

        return bool(notes_below(self.home.jobs_folder))

    def reader(self) -> JobReader:
        """A reader of the master at --url, or else of the store. NotFound where there is neither."""
        from gyre.api.cli.output import remark
        from gyre.api.reader import JobReader
        from gyre.errors import NotFound

        if self.url is None and not self.has_store():
            raise NotFound(
                f"There is no job in {self.home.path} yet.",
                hint="Start one: gyre demo; or write one with gyre init, and run it with gyre run FILE.",
            )
        store = None if self.url is not None else self.store_url
        reader = JobReader(
            store,
            url=self.url,
            token=self.token,
            at=self.home,
            ca=Path(self.ca) if self.ca else None,
            fingerprint=self.fingerprint,
        )
        reader.on_wait = remark
        return reader


def _holds_something(database: Path) -> bool:
    """A file without a byte is what is left where the disk was full when it was made: no job is in it."""
    try:
        return any(path.stat().st_size for path in (database, Path(f"{database}-wal")) if path.exists())
    except OSError:  # its reader says what is wrong
        return True


def _keep(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Remember a global option. After the verb it wins over the one before, and over the environment."""
    session = ctx.ensure_object(CliContext)
    assert param.name is not None
    if value is None or (ctx.parent is not None and _is_from_environment(ctx, param.name)):
        return
    setattr(session, param.name, value)
    if param.name == "home_path":
        os.environ[VARIABLE] = value  # processes started from here have the same home


def _is_from_environment(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is click.core.ParameterSource.ENVIRONMENT


def global_options(command: Command) -> Command:
    """--home, --store, --url, --token, --ca, --fingerprint and --debug, kept in the CliContext and not passed on."""
    return _add_options(command, hidden=False)


_OPTIONS = (
    (
        "--fingerprint",
        "fingerprint",
        "GYRE_FINGERPRINT",
        "SHA256",
        "SHA-256 of the one certificate to trust [GYRE_FINGERPRINT].",
    ),
    ("--ca", "ca", "GYRE_CA", "FILE", "PEM file with the certificates to trust [GYRE_CA]."),
    ("--token", "token", "GYRE_TOKEN", "TOKEN", "Token of the master [GYRE_TOKEN]."),
    (
        "--url",
        "url",
        "GYRE_URL",
        "URL",
        "Address of a master to ask, instead of the database [GYRE_URL].",
    ),
    ("--store", "store", "GYRE_STORE", "URL", "URL of a database other than the home's [GYRE_STORE]."),
    (
        "--home",
        "home_path",
        VARIABLE,
        "DIR",
        f"Folder of the database and the logs [{VARIABLE}; default: ~/.gyre].",
    ),
)
"""Of each global option that takes a value: its flag, its field, the environment's variable, the metavar, the help."""


def _add_options(command: Command, *, hidden: bool) -> Command:
    own = {flag for param in getattr(command, "__click_params__", ()) for flag in param.opts}
    for flag, name, variable, metavar, text in _OPTIONS:
        if flag in own:
            continue
        command = click.option(
            flag,
            name,
            envvar=variable,
            metavar=metavar,
            help=text,
            callback=_keep,
            expose_value=False,
            is_eager=True,
            hidden=hidden,
        )(command)
    if "--debug" in own:
        return command
    return click.option(
        "--debug",
        is_flag=True,
        envvar="GYRE_DEBUG",
        help="Show the whole traceback of an error [GYRE_DEBUG].",
        callback=_debug,
        expose_value=False,
        is_eager=True,
        hidden=hidden,
    )(command)


def _debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    session = ctx.ensure_object(CliContext)
    session.debug = session.debug or value


def verb() -> Callable[[Callable[..., Any]], click.Command]:
    """A subcommand that also takes the global options, hidden from its own help."""

    def make(function: Callable[..., Any]) -> click.Command:
        return click.command()(_add_options(click.pass_obj(function), hidden=True))

    return make
