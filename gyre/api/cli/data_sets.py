"""`data`: prepare a data set for jobs, and look at a prepared one. Needs neither Ray nor torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gyre.api.cli.output import remark, say, write_json

_ONE_PLACE = click.Path(path_type=Path)
_CONSTANTS = {"True": True, "False": False, "None": None}
_A_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def data() -> None:
    """Prepare a data set for jobs, or show a prepared one."""


@data.command()
@click.argument("source", type=_ONE_PLACE)
@click.argument("out", type=_ONE_PLACE)
@click.option(
    "--tokenizer", type=_ONE_PLACE, required=True, metavar="FOLDER", help="Model folder with the tokenizer."
)
@click.option("--split", default="train", show_default=True, metavar="NAME", help="Split to read.")
@click.option(
    "--subset",
    default="",
    metavar="NAME",
    help="Configuration of a data set that has several, such as gsm8k's main.",
)
@click.option(
    "--layout",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="Layout of the columns: verl, openr1-math, math, gsm8k, qa, search-r1, instruction, messages or plain; auto "
    "chooses by their names.",
)
@click.option(
    "--prompt", default="", metavar="COLUMN", help="Column of the prompt; A.B is key B of a mapping in A."
)
@click.option("--answer", default="", metavar="COLUMN", help="Column of the answer.")
@click.option("--keep", multiple=True, metavar="COLUMN", help="Give the reward this column and no others.")
@click.option("--drop", multiple=True, metavar="COLUMN", help="Do not give the reward this column.")
@click.option(
    "--rename", multiple=True, metavar="COLUMN=NAME", help="Give the reward a column by another name."
)
@click.option("--keep-prompt", is_flag=True, help="Keep the prompt's own columns, which agents read, too.")
@click.option("--keep-unanswered", is_flag=True, help="Keep rows without an answer.")
@click.option(
    "--skip-unsupported",
    is_flag=True,
    help="Leave out and count rows that cannot become a text prompt, instead of refusing the data set.",
)
@click.option(
    "--max-meta-bytes",
    type=click.IntRange(1),
    default=65536,
    show_default=True,
    metavar="BYTES",
    help="Maximum size of the columns that the reward gets with a prompt.",
)
@click.option("--system", default="", metavar="TEXT", help="System message, which replaces a row's own.")
@click.option(
    "--suffix", default="", metavar="TEXT", help="Text to append to every prompt, such as how to answer."
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
    "--max-prompt-tokens",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Leave out prompts with more tokens; 0 keeps all.  [default: 0]",
)
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Read only the first N rows; 0 reads all.  [default: 0]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as one JSON object.")
def prepare(
    source: Path,
    out: Path,
    tokenizer: Path,
    template: tuple[str, ...],
    rename: tuple[str, ...],
    as_json: bool,
    **how: Any,
) -> None:
    """Tokenize SOURCE (JSONL, JSON, CSV, TSV, Parquet, Arrow or a Hugging Face folder) into the folder OUT.

    A job names OUT as `config.data.path`. It holds the tokens, the columns that the reward gets, and the tokenizer.
    """
    from gyre.data.prepare import PromptRecipe
    from gyre.data.prepare import prepare as write

    source, out, tokenizer = (path.expanduser() for path in (source, out, tokenizer))
    named = {column: str(name) for column, name in _pairs(rename, "--rename").items()}
    recipe = PromptRecipe(**how, rename=named, template=_options(template))
    manifest = write(source, out, tokenizer, recipe)
    if as_json:
        write_json(manifest)
        return
    _tell(manifest)
    remark(f"wrote {out}")


@data.command()
@click.argument("folder", type=_A_FOLDER)
@click.option(
    "--rows",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    metavar="N",
    help="Number of prompts to show.",
)
@click.option("--verify", is_flag=True, help="Check the checksum of every file.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as one JSON object.")
def show(folder: Path, rows: int, verify: bool, as_json: bool) -> None:
    """Show how the prepared FOLDER was made, and its first prompts, with their special tokens."""
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
        say(f"--- row {row}: {found.meta(row)}")
        say(tokenizer.decode(found.prompt_ids(row).tolist(), special=True))


def _options(given: tuple[str, ...]) -> dict[str, Any]:
    """Returns the options given as `KEY=VALUE`; a value that is neither JSON nor one of Python's constants is a text. A
    template takes the text `False` for true."""
    found: dict[str, Any] = {}
    for key, value in _pairs(given, "--template").items():
        try:
            found[key] = _CONSTANTS[value] if value in _CONSTANTS else json.loads(value)
        except ValueError:  # a text, as a date is
            found[key] = value
    return found


def _pairs(given: tuple[str, ...], option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not key or not equals or not value:
            raise click.BadParameter(f"{one!r} is not KEY=VALUE.", param_hint=option)
        if key in found:
            raise click.BadParameter(f"{key!r} is given twice.", param_hint=option)
        found[key] = value
    return found


def _tell(manifest: dict[str, Any]) -> None:
    layout, tokens = manifest["layout"], manifest["prompt_tokens"]
    click.echo(
        f"layout {layout['name']}: prompt from {layout['prompt']}, "
        f"{'answer from ' + layout['answer'] if layout['answer'] else 'no answers'}"
    )
    click.echo(
        f"{manifest['rows']} prompts of {manifest['read']} rows, {manifest['distinct_prompts']} distinct"
    )
    for why, count in manifest["left_out"].items():
        click.echo(f"{count} left out: {why}")
    for key, what in (
        ("without_answer", "without an answer, so no reward can compare with one"),
        (
            "ended_with_an_answer",
            "ended with the assistant's turn, which is not in the prompt: see reference",
        ),
        ("system_replaced", "with another system message than in the file, by --system"),
    ):
        if manifest[key]:
            click.echo(f"{manifest[key]} {what}")
    click.echo(f"the reward is given {', '.join(manifest['columns']) or 'no columns'}")
    click.echo(f"{tokens['total']} tokens, {tokens['mean']} a prompt, {tokens['longest']} at most")
    click.echo(f"digest {manifest['digest']}")
