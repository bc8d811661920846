"""What a shell completes: verbs, aliases, and the names of jobs, roles and vertices; quickly and quietly."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from gyre.api.cli import ALIASES, VERBS, main
from gyre.api.cli.completion import SHELLS, VARIABLE
from gyre.api.home import Home
from gyre.store import open_store
from tests.api.test_cli import HEAVY
from tests.waits import GENEROUS_S

Seed = Callable[..., str]


def completed(*words: str) -> list[str]:
    """What is offered for the last of the words."""
    shell = ShellComplete(main, {}, "gyre", VARIABLE)
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


def test_verbs_and_aliases_are_completed() -> None:
    assert set(completed("")) == {*VERBS, *ALIASES}
    assert completed("sh") == ["show"]
    assert completed("st") == ["stop", "status"]
    assert completed("ps", "--a") == ["--all"]
    assert completed("config", "s") == ["schema", "show"]


def test_jobs_are_completed_the_live_ones_first(seed: Seed, home: Home) -> None:
    seed("undisturbed", job_id="golden-2", at=3.0)
    with open_store(home.database_url()) as store:
        store.create_job(job_id="older-1", name="older", spec=store.job("golden-2").spec, now=1.0)
        names = {name for job in store.jobs() for name in (job.name, job.job_id)}
    assert completed("show", "") == ["older", "older-1", "golden", "golden-2"]
    assert set(completed("show", "")) == names
    for words in (["events"], ["logs"], ["stop"], ["kill"], ["resume"], ["metrics"], ["run", "--from"]):
        assert completed(*words, "gol") == ["golden", "golden-2"], words
    assert completed("token", "ls", "gol") == ["golden", "golden-2"]


def test_roles_and_vertices_of_the_job_are_completed(seed: Seed, home: Home) -> None:
    seed("undisturbed")
    with open_store(home.database_url()) as store:
        specs = store.job("golden").spec["roles"]
    roles, elastic = sorted(specs), specs["rollout"]["elastic"]
    assert completed("logs", "golden", "--role", "") == completed("logs", "--role", "") == roles
    numbers = [f"rollout={n}" for n in range(elastic["min"], elastic["max"] + 1)]
    assert completed("scale", "golden", "") == completed("scale", "rollo") == numbers
    assert completed("drain", "golden", "rollout-") == ["rollout-0", "rollout-1"]
    assert "golden" in completed("drain", "")


def test_where_there_is_no_store_nothing_is_offered_and_nothing_is_made(home: Home) -> None:
    assert completed("show", "") == []
    assert list(home.path.iterdir()) == []
    (home.path / "gyre.db").write_text("no database")
    assert completed("show", "") == []
    assert completed("--store", "postgresql://nowhere/x", "show", "") == []


def test_names_are_completed_without_importing_anything_heavy(seed: Seed, home: Home) -> None:
    seed("undisturbed")
    code = (
        "import sys\n"
        "sys.argv = ['gyre']\n"
        "from gyre.api.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "GYRE_HOME": str(home.path),
            VARIABLE: "bash_complete",
            "COMP_WORDS": "gyre show go",
            "COMP_CWORD": "2",
        },
        capture_output=True,
        text=True,
        timeout=GENEROUS_S,
    )
    assert done.stdout.splitlines() == ["plain,golden", "plain,golden-1", "[]"], done


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_calls_gyre(shell: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0, done.output
    assert f"{VARIABLE}={shell}_complete" in done.stdout
    if shutil.which(shell):
        file = tmp_path / "script"
        file.write_text(done.stdout)
        subprocess.run([shell, "-n", str(file)], check=True, timeout=GENEROUS_S)
