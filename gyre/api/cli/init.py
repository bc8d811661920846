"""`init`: writes a small job that runs at once, a job file, a reward function and twenty rows; or one with an
agent, for GPUs, an adapter, a fleet, or what one has of verl."""

from __future__ import annotations

import json
import re
import shlex
from importlib.resources import files
from pathlib import Path

import click

from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import remark
from gyre.errors import ConfigError, Conflict

_CPU = {"job.yaml": "job.yaml", "reward.py": "reward.py", "rows.jsonl": "rows.jsonl"}

TEMPLATES = {
    "cpu": _CPU,
    "agent": {"job.yaml": "agent.yaml", "agent.py": "agent.py"},
    "gpu": {**_CPU, "job.yaml": "gpu.yaml"},
    "lora": {**_CPU, "job.yaml": "lora.yaml"},
    "fleet": {"job.yaml": "fleet.yaml"},
    "verl": {"job.yaml": "verl.yaml", "reward.py": "verl_reward.py"},
}
"""By name, the files that are written, and those of `gyre.api.templates` that they are."""

HERE = ("cpu", "agent")
"""Templates that run as they are, on a laptop."""

SCHEMA = "job.schema.json"
"""What `gyre config schema` prints; the first line of the job file names it for editors."""

_NAME = "my-job"
"""The job's name in the template, which gives way to the folder's."""


@verb()
@click.argument("folder", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
@click.option(
    "--template",
    type=click.Choice(list(TEMPLATES)),
    default="cpu",
    show_default=True,
    help="What kind of job: on this machine's CPUs; there with an agent; on two GPUs, of a whole model or an adapter "
    "(lora); a fleet without a trainer; with verl's data and reward function.",
)
@click.option("--force", is_flag=True, help="Overwrite files of these names.")
def init(session: CliContext, folder: Path, template: str, force: bool) -> None:
    """Write a small job into DIR (default: this folder): job.yaml, reward.py, rows.jsonl, job.schema.json.

    The job runs as it is, on a laptop without a GPU: it trains a tiny model on the twenty rows with the reward
    function; that with an agent has an environment, agent.py, in their place. Replace them and the model with your
    own. Those of other templates say in their first lines what they need.
    """
    folder = folder.expanduser()
    names = [*TEMPLATES[template], SCHEMA]
    there = [name for name in names if (folder / name).exists()]
    if there and not force:
        raise Conflict(
            f"{folder}: {', '.join(there)} already there.",
            hint="Give another folder, or --force to overwrite them.",
        )
    write_job(folder, template)
    for name in names:
        remark(f"wrote {folder / name}")
    into = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    if template not in HERE:
        remark("The first lines of job.yaml say what it needs before it runs.")
    click.echo(f"{into}gyre plan job.yaml")
    click.echo("gyre run job.yaml")


def write_job(folder: Path, template: str = "cpu") -> None:
    """Write the files into the folder, which is made if need be. Raises ConfigError where that cannot be done."""
    from gyre.config.schema import job_schema

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in TEMPLATES[template].items():
            text = files("gyre.api.templates").joinpath(source).read_text(encoding="utf-8")
            if name == "job.yaml":
                text = text.replace(f"name: {_NAME}\n", f"name: {_quoted(job_name(folder))}\n", 1)
                text = text.replace(f" {_NAME} ", f" {shlex.quote(job_name(folder))} ")
            (folder / name).write_text(text, encoding="utf-8")
        schema = json.dumps(job_schema(), indent=2, ensure_ascii=False)
        (folder / SCHEMA).write_text(f"{schema}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: cannot be written: {error.strerror}.", hint="Give another folder."
        ) from None


def job_name(folder: Path) -> str:
    """A job's name made of the folder's."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._")[:63]
    return name or _NAME


def _quoted(name: str) -> str:
    """The name as YAML text: `2024` and `no` would be read as a number and a truth value."""
    from gyre.config.yaml_text import read_yaml

    return name if read_yaml(name) == name else json.dumps(name)
