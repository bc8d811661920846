"""`config schema` and `config show`: the keys of a job file for an editor, and the values that a job has."""

from __future__ import annotations

import click

from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import write_json


@click.group()
def config() -> None:
    """Print a job file's whole configuration, or the JSON schema of job files: gyre config show job.yaml"""


@verb()
def schema(session: CliContext) -> None:
    """Print the JSON schema of a job file, with a description of every key, for editors.

    \b
    gyre config schema > job.schema.json
    and as the first line of job.yaml, for VS Code's YAML extension and others:
    # yaml-language-server: $schema=job.schema.json
    """
    from gyre.config.schema import job_schema

    write_json(job_schema())


@verb()
@click.argument("file", type=click.Path())
@click.option(
    "--set", "overrides", multiple=True, metavar="A.B=C", help="Override a key of the file. May be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of YAML.")
def show(session: CliContext, file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the whole configuration of a job file, with every default and what its recipe adds, as YAML.

    The output is a job file of the same job. `gyre plan` checks the files and classes that it names.
    """
    import yaml

    from gyre.api.definition.jobfile import load_job_file
    from gyre.api.definition.whole_spec import whole
    from gyre.graph import compile_job

    job = load_job_file(file, overrides)
    assert job.source is not None
    with job.source.named(always=True):
        resolved = whole(compile_job(job.spec).spec)
    if as_json:
        write_json(resolved)
    else:
        text = yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True, width=120)
        click.echo(text, nl=False)


for command in (schema, show):
    config.add_command(command)
