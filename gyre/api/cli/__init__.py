"""The command line: `gyre VERB`. This file is all that `gyre --help` imports, besides click.

Invariants:
- *light*: verbs are modules that are imported when they are called; torch, Ray, FastAPI, SQLAlchemy, pydantic and
  rich are not imported for help;
- *stdout is data*: results go to stdout, messages to stderr;
- *exit codes*: 0 ok, 1 the job failed, 2 usage or configuration, 3 unreachable or unauthorised, 4 not found,
  5 conflict, 130 interrupted, 143 terminated. An error is one sentence with what to do, never a traceback of ours;
  `--debug` shows that too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from gyre.api.cli.context import CliContext, global_options
from gyre.api.terminal.plain_text import plain
from gyre.api.terminal.signals import INTERRUPTED, TERMINATED, interrupts_noted
from gyre.errors import ConfigError, GyreError

_SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "First steps": {
        "demo": ("jobs", "Train a small model on this machine."),
        "init": ("init", "Write a small job that runs as it is."),
        "doctor": ("doctor", "Check this machine and say what to fix."),
        "completion": ("completion", "Print the completion script of a shell."),
    },
    "Jobs": {
        "plan": ("plan", "Check whether a job file can run; show its graph."),
        "run": ("jobs", "Run a job file in the foreground."),
        "submit": ("jobs", "Submit a job file to a cluster and return."),
        "config": ("config", "Print a job file's configuration, or its JSON schema."),
        "pause": ("command", "Pause a job at the end of its step."),
        "resume": ("jobs", "Resume a paused job, or continue one that has ended."),
        "scale": ("command", "Set how many vertices a role has."),
        "stop": ("command", "Stop a job at the end of its step, or at once."),
    },
    "Watch": {
        "ls": ("runs", "List jobs: the table of runs."),
        "show": ("look", "Show a job's progress, vertices and incidents."),
        "top": ("top", "Watch a job live."),
        "ui": ("ui", "Show the web page over all jobs."),
        "compare": ("compare", "Compare two to twenty jobs."),
        "tag": ("runs", "Tag a job, or remove its tags."),
        "note": ("runs", "Write a note about a job, or show it."),
        "metrics": ("steps", "Print the metrics of a job's steps."),
        "samples": ("samples", "Print the prompts and answers that a job trained on."),
        "events": ("look", "Print a job's events."),
        "logs": ("look", "Print the logs of a job's vertices."),
        "trace": ("trace", "Print a job's course as a trace for Perfetto."),
        "replay": ("replay", "Rebuild a job's state from its journal and compare."),
        "debug": ("debug", "Write an archive about a job for a report, without secrets."),
    },
    "Machines": {
        "nodes": ("machines", "List the cluster's machines and their vertices."),
        "drain": ("machines", "Move the work off a machine and stop using it."),
        "undrain": ("machines", "Use a drained machine again."),
        "join": ("instances", "Join a job as a rollout instance on this machine."),
        "token": ("tokens", "Create, list and revoke tokens for joining."),
    },
    "Data and models": {
        "data": ("data_sets", "Prepare a data set for jobs, or show one."),
        "reward": ("reward", "Try a reward function on rows of a data set."),
        "models": ("models", "List the models that can be trained and served."),
        "export": ("export", "Export a job's weights as a model folder."),
    },
}

VERBS: dict[str, tuple[str, str]] = {
    verb: at for section in _SECTIONS.values() for verb, at in section.items()
}
"""The verbs: for each, the module that defines it and its line in the help."""

ALIASES = {"status": ("show",), "ps": ("ls",), "cancel": ("stop",), "kill": ("stop", "--now")}
"""Words of docker, kubectl, Slurm and Ray for a verb, and the options with which it does what they do there."""

OTHER_WORDS = {
    **dict.fromkeys(("train", "start", "launch", "execute", "exec", "apply", "up"), "run"),
    **dict.fromkeys(("validate", "check", "verify", "lint", "dry-run", "dryrun", "compile"), "plan"),
    **dict.fromkeys(("list", "jobs", "runs", "queue", "squeue"), "ls"),
    **dict.fromkeys(("describe", "state", "info", "get", "inspect"), "show"),
    **dict.fromkeys(("watch", "attach", "htop", "follow"), "top"),
    **dict.fromkeys(("diff",), "compare"),
    **dict.fromkeys(("tags", "label", "labels"), "tag"),
    **dict.fromkeys(("notes", "annotate", "comment"), "note"),
    **dict.fromkeys(("bundle", "report", "bug", "sosreport"), "debug"),
    **dict.fromkeys(("abort", "delete", "rm", "terminate", "end", "down"), "stop"),
    **dict.fromkeys(("continue", "unpause", "restart", "retry"), "resume"),
    **dict.fromkeys(("log", "tail"), "logs"),
    **dict.fromkeys(("sample", "answers", "completions", "generations", "trajectories"), "samples"),
    **dict.fromkeys(("profile", "timeline", "perfetto"), "trace"),
    **dict.fromkeys(("history", "journal"), "events"),
    **dict.fromkeys(("machines", "hosts", "cluster"), "nodes"),
    **dict.fromkeys(("rescale", "resize"), "scale"),
    **dict.fromkeys(("prepare", "dataset", "datasets"), "data"),
    **dict.fromkeys(("dashboard", "web", "page", "board"), "ui"),
    **dict.fromkeys(("save", "convert", "merge"), "export"),
    **dict.fromkeys(("example", "quickstart", "tutorial"), "demo"),
    **dict.fromkeys(("new", "create", "scaffold", "template"), "init"),
    **dict.fromkeys(("schema", "settings", "defaults"), "config"),
    **dict.fromkeys(("tokens",), "token"),
    **dict.fromkeys(("version", "help"), "--{}"),
}
"""By a word that other tools have, the verb that does it here."""


class LazyGroup(click.Group):
    """Imports a verb when it is called, and turns errors into sentences and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"gyre.api.cli.{VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in ALIASES:
            args = [*ALIASES[args[0]], *args[1:]]
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            ctx.fail(f"There is no verb {args[0]!r}; {_meant(args[0])}")
        return super().resolve_command(ctx, args)

    debug = False
    """Whether errors of the verb that was called last are shown with all of their frames."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # caught here, because click would turn this into exit code 1
            _forget_stdout()
            return 0
        finally:
            self.debug = ctx.ensure_object(CliContext).debug

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, verbs in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(verb, line) for verb, (_, line) in verbs.items()])
        with formatter.section("Other names"):
            formatter.write_dl([(word, " ".join(meant)) for word, meant in ALIASES.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Verbs by their lines in the help, so that none is imported; and the global options."""
        found = click.Command.shell_complete(self, ctx, incomplete)
        aliases = {word: f"The same as {' '.join(meant)}." for word, meant in ALIASES.items()}
        lines = {name: line for name, (_, line) in VERBS.items()} | aliases
        return [
            *found,
            *(CompletionItem(name, help=line) for name, line in lines.items() if name.startswith(incomplete)),
        ]

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> NoReturn:
        """Run the command line, and exit with the code of its outcome."""
        options["standalone_mode"] = False
        self.debug = False
        with interrupts_noted() as interrupts:
            try:
                code = super().main(args, *rest, **options)
                sys.stdout.flush()
            except BaseException as error:
                if self.debug and not isinstance(error, click.ClickException | click.exceptions.Exit):
                    traceback.print_exception(error)
                code = _code_of(interrupts.raised or error, debug=self.debug)
                if code is None:
                    raise
        sys.exit(code if isinstance(code, int) else 0)


def _code_of(error: BaseException, *, debug: bool = False) -> int | None:
    """The exit code of an error, which is printed where it is one of ours. None for anything else."""
    if (interrupt := _interrupt_behind(error)) is not None:
        # Also of an import that a signal cut short, and that failed with an error of its own.
        return INTERRUPTED if type(interrupt) is KeyboardInterrupt else TERMINATED
    if isinstance(error, ModuleNotFoundError) and error.name:
        from gyre.extras import how_to_install, missing

        if how_to_install(error.name):  # a verb that needs an extra, such as torch for `export`
            error = missing(error.name, "This command")
    if isinstance(error, GyreError):
        return _say(error, debug=debug)
    if isinstance(error, click.Abort):
        return INTERRUPTED if isinstance(error.__cause__, EOFError) else TERMINATED
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        _forget_stdout()
        return 0
    return None


def _interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """The Ctrl-C or SIGTERM that this error was raised over, if there was one."""
    behind: BaseException | None = error
    seen: set[int] = set()
    while behind is not None and id(behind) not in seen:
        if isinstance(behind, KeyboardInterrupt):
            return behind
        seen.add(id(behind))
        behind = behind.__cause__ or behind.__context__
    return None


def _meant(word: str) -> str:
    """What a word that is no verb may be meant for."""
    from gyre.errors import nearest

    if word in OTHER_WORDS:
        return f"did you mean {OTHER_WORDS[word].format(word)!r}?"
    return nearest(word, (*VERBS, *ALIASES))


def _say(error: GyreError, *, debug: bool) -> int:
    """Print the error as one sentence on stderr, after the frames of the user's own code that raised it, if any did."""
    from gyre.api.cli.output import LAST_LINE

    for frame in error.details.get("frames", ()):
        click.echo(plain(f"  {frame}"), err=True)
    text = str(error.details.get("traceback", "")).strip()
    if text and not isinstance(error, ConfigError):
        from gyre.users_code import users_traceback

        click.echo(plain(text if debug else users_traceback(text)), err=True)
    click.echo(plain(f"error: {error.message}"), err=True)
    if error.hint:
        click.echo(plain(f"       {error.hint}"), err=True)
    if LAST_LINE in error.details:
        click.echo(plain(error.details[LAST_LINE]))
    return error.exit_code


def _forget_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail: the reader of the output has
    gone."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="VERB [ARGS]...",
    epilog="JOB is the name or id of a job; by default the newest. Every verb that reads has --json. "
    "`gyre VERB --help` describes a verb.",
)
@global_options
@click.version_option(package_name="gyre-rl", prog_name="gyre", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """RL post-training of language models that survives the death of any of its processes."""
    ctx.ensure_object(CliContext)
