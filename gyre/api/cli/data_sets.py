"""`data`: prepare a data set for jobs, and look at a prepared one. Needs neither Ray nor torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gyre.api.cli.output import remark, write_json

_ONE_PLACE = click.Path(path_type=Path)
_A_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def data() -> None:
    """Prepare a data set for jobs, and look at a prepared one."""


@data.command()
@click.argument("source", type=_ONE_PLACE)
@click.argument("out", type=_ONE_PLACE)
@click.option("--tokenizer", type=_A_FOLDER, required=True, help="Model folder with tokenizer.json.")
@click.option("--split", default="train", show_default=True)
@click.option(
    "--subset",
    default="",
    metavar="NAME",
    help="Configuration, for a data set with several, such as gsm8k's main.",
)
@click.option(
    "--layout",
    default="auto",
    show_default=True,
    help="gsm8k, openr1-math, verl or plain; auto chooses by the columns.",
)
@click.option("--prompt", default="", metavar="COLUMN", help="Column of the question, for another layout.")
@click.option("--answer", default="", metavar="COLUMN", help="Of the answer.")
@click.option("--system", default="", metavar="TEXT", help="System message to put before every question.")
@click.option(
    "--suffix", default="", metavar="TEXT", help="Text to put after every question: how to answer it."
)
@click.option(
    "--chat/--no-chat", default=True, show_default=True, help="Apply the tokenizer's chat template."
)
@click.option(
    "--template",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of the chat template, such as enable_thinking=false.",
)
@click.option(
    "--max-prompt-tokens", type=click.IntRange(0), default=0, help="Leave out prompts with more tokens."
)
@click.option("--limit", type=click.IntRange(0), default=0, help="Rows to read.")
@click.option("--json", "as_json", is_flag=True, help="The manifest as one object.")
def prepare(
    source: Path, out: Path, tokenizer: Path, template: tuple[str, ...], as_json: bool, **how: Any
) -> None:
    """Read SOURCE (JSONL, Parquet or a Hugging Face folder) and write the folder OUT.

    OUT holds tokens, answers, hashes and the tokenizer; `config.data.path` of a job names it.
    """
    from gyre.data.prepare import Recipe
    from gyre.data.prepare import prepare as write

    manifest = write(source, out, tokenizer, Recipe(**how, template=_options(template)))
    if as_json:
        write_json(manifest)
        return
    _tell(manifest)
    remark(f"wrote {out}")


@data.command()
@click.argument("folder", type=_A_FOLDER)
@click.option("--rows", type=click.IntRange(0), default=2, show_default=True, help="Prompts to show.")
@click.option("--verify", is_flag=True, help="Check the checksum of every file.")
@click.option("--json", "as_json", is_flag=True, help="The manifest as one object.")
def show(folder: Path, rows: int, verify: bool, as_json: bool) -> None:
    """Show what a prepared FOLDER was made from, and its first prompts."""
    from gyre.data.folder import TOKENIZER, PreparedFolder
    from gyre.data.tokenizer import TextTokenizer
    from gyre.errors import ConfigError

    found = PreparedFolder(folder)
    manifest = found.manifest
    damaged = found.verify() if verify else []
    if damaged:
        raise ConfigError(
            f"{folder}: {', '.join(damaged)} have changed since they were written.", hint="Prepare it again."
        )
    if as_json:
        write_json(manifest)
        return
    _tell(manifest)
    tokenizer = TextTokenizer(folder / TOKENIZER)
    for row in range(min(rows, found.rows)):
        click.echo(f"--- row {row}: {found.meta(row)}")
        click.echo(tokenizer.decode(found.prompt_ids(row).tolist()))


def _options(given: tuple[str, ...]) -> dict[str, Any]:
    """Returns the options given as `KEY=VALUE`; a value that is not JSON is a text."""
    found = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{one!r} is not KEY=VALUE.", param_hint="--template")
        try:
            found[key] = json.loads(value)
        except ValueError:  # a text, as a date is
            found[key] = value
    return found


def _tell(manifest: dict[str, Any]) -> None:
    tokens = manifest["prompt_tokens"]
    click.echo(
        f"{manifest['rows']} prompts of {manifest['read']} rows, {manifest['distinct_prompts']} distinct"
    )
    for why, count in manifest["left_out"].items():
        click.echo(f"{count} left out: {why}")
    click.echo(f"{tokens['total']} tokens, {tokens['mean']} a prompt, {tokens['longest']} at most")
    click.echo(f"digest {manifest['digest']}")
