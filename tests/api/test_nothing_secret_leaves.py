"""Secrets planted wherever a user may write one: nothing that leaves tells any of them. What leaves: the archive for a
report, the REST interface over a store and over a master, what the command line shows, errors, what the journal says of
a changed configuration."""

from __future__ import annotations

import copy
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gyre.api.cli import main
from gyre.api.debug_bundle import write_bundle
from gyre.api.home import Home
from gyre.api.reader import JobReader
from gyre.api.rest.app import create_app, create_store_app
from gyre.api.rest.problems import problem_of
from gyre.api.stored_jobs import StoredJobs
from gyre.config import parse_job
from gyre.config.changes import changes_between, undone
from gyre.errors import ConfigError
from gyre.store import Entry, open_store
from tests.api.conftest import Connect, Seed
from tests.doubles.standing_job import StandingJob

KINDS = (
    *(
        "shell_wandb",
        "shell_hf",
        "shell_hook",
        "job_env",
        "role_env",
        "sink_option",
        "sink_header",
        "mlflow",
        "otlp",
    ),
    *(
        "otlp_query",
        "webhook",
        "webhook_header",
        "command",
        "engine_space",
        "engine_equals",
        "config_key",
        "config_list",
    ),
    *(
        "config_json",
        "config_url",
        "config_pem",
        "store",
        "join",
        "git",
        "basic",
        "traceback",
        "wrapped",
        "base64",
    ),
)
SECRETS = {kind: f"Sekr3t{kind.replace('_', '')}x0123456789abcdef" for kind in KINDS}
S = SECRETS
READABLE = (
    "Qwen/Qwen3-0.6B",
    "sha256:9f3c51d07be284a6",
    "config_project",
    "step 12: loss=0.5",
    "rollout-0.1",
)
"""What the same places have and must go on telling."""


def planted(spec: dict[str, Any]) -> dict[str, Any]:
    spec = copy.deepcopy(spec)
    spec["env"] = {"PLAIN_NAME": S["job_env"], "PIN": "7531"}
    spec["roles"]["actor"]["env"] = {"K": S["role_env"]}
    spec["rollouts"] = {
        **(spec.get("rollouts") or {}),
        "engine_args": ["--api-key", S["engine_space"], f"--hf-token={S['engine_equals']}", "--port", "1"],
    }
    spec["observe"] = {
        "sinks": [
            {
                "kind": "wandb",
                "options": {"settings": {"api_key": S["sink_option"], "project": "config_project"}},
            },
            {"kind": "mlflow", "to": f"https://me:{S['mlflow']}@mlflow.example"},
            {
                "kind": "otlp",
                "to": f"https://u:{S['otlp']}@col.example/v1/traces?token={S['otlp_query']}",
                "options": {"headers": {"X-Any": S["sink_header"]}},
            },
        ],
        "notify": [
            {"webhook": f"https://hooks.example/{S['webhook']}", "headers": {"X": S["webhook_header"]}},
            {"webhook": "$TEAM_CHAT"},
            {"command": ["/bin/true", S["command"]]},
        ],
    }
    spec["config"] = {
        **spec["config"],
        "my_service": {
            "api_key": S["config_key"],
            "secrets": [S["config_list"]],
            "args": json.dumps({"password": S["config_json"]}),
            "url": f"postgresql://me:{S['config_url']}@db/x",
            "pem": f"-----BEGIN PRIVATE KEY-----\n{S['config_pem']}\n-----END PRIVATE KEY-----",
            "model": READABLE[0],
        },
    }
    return spec


def lines() -> list[str]:
    import base64

    return [
        f"2026-01-01T00:00:00.000Z I WANDB_API_KEY={S['shell_wandb']} printed by a library",
        f"401 for HF token {S['shell_hf']}",
        f"posting to https://chat.example/{S['shell_hook']}",
        *(
            f"value {S[kind]} of {kind}"
            for kind in KINDS
            if kind not in ("wrapped", "base64", "join", "git", "basic", "traceback")
        ),
        f"gyre join --token {S['join']} http://h:1",
        f"pip install git+https://x-access-token:{S['git']}@github.example/a/b",
        f"Authorization: Basic {S['basic']}",
        f"KeyError: {{'api_key': '{S['traceback']}'}}",
        "wrapped \x1b[31m" + S["job_env"][:12],
        S["job_env"][12:],
        "b64 " + base64.b64encode(S["job_env"].encode()).decode(),
        "PIN is 7531",
        *READABLE,
    ]


@pytest.fixture
def leaky(seed: Seed, home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobReader]:
    monkeypatch.setenv("WANDB_API_KEY", S["shell_wandb"])
    monkeypatch.setenv("HF_TOKEN", S["shell_hf"])
    monkeypatch.setenv("TEAM_CHAT", "https://chat.example/" + S["shell_hook"])
    url = seed("actor_lost")
    with open_store(url) as store:
        spec = parse_job(planted(store.job("golden-1").spec)).model_dump(mode="json")
        spec["store"]["url"] = f"postgresql://gyre:{S['store']}@db/gyre"
        store.create_job(job_id="leaky-1", name="leaky", spec=spec, now=3.0)
        old, new = store.journal("golden-1"), store.journal("leaky-1")
        entries = [
            Entry(row.seq, row.event_id, row.cause, row.kind, row.at, row.actor, told(row.body, row.kind))
            for row in old.events(limit=1000)
        ]
        new.append(new.take_over(now=3.0, pid=1), entries)
    folder = home.jobs_folder / "leaky-1" / "logs"
    folder.mkdir(parents=True)
    (folder / "trainer-0.1.log").write_text("\n".join(lines()) + "\n")
    with JobReader(url, at=home) as reader:
        yield reader


def told(body: dict[str, Any], kind: str) -> dict[str, Any]:
    """An event of a failure whose words quote what was said."""
    words = "; ".join(one for one in lines() if "wrapped" not in one)
    return {
        **body,
        **{key: words for key in ("error", "message", "reason") if isinstance(body.get(key), str)},
    }


def leaks(text: str) -> list[str]:
    return [kind for kind, secret in SECRETS.items() if secret in text or secret[3:-3] in text]


def test_the_archive_for_a_report(leaky: JobReader, tmp_path: Path) -> None:
    logs = leaky._home.find_logs("leaky-1")
    write_bundle(leaky, "leaky-1", tmp_path / "out.tar.gz", logs=logs)
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        parts = {one.name: archive.extractfile(one).read().decode() for one in archive}  # type: ignore[union-attr]
    assert {name: leaks(text) for name, text in parts.items()} == {name: [] for name in parts}
    log = parts["out/logs/trainer-0.1.log"]
    assert "7531" not in log
    assert all(one in log for one in READABLE)
    assert "config_project" in parts["out/spec.json"]
    assert READABLE[0] in parts["out/spec.json"]
    assert READABLE[0] in parts["out/events.jsonl"]


def test_the_interface_over_a_store(leaky: JobReader, connect: Connect) -> None:
    with connect(create_store_app(StoredJobs(leaky), token=None)) as http:
        heard = {
            path: http.get(f"/api/v1/jobs/leaky-1{path}")
            for path in ("", "/spec", "/logs", "/events", "/incidents")
        }
        heard |= {
            path: http.get(f"/api/v1/jobs/leaky-1{path}") for path in ("/vertices", "/now", "/at", "/graph")
        }
        heard["jobs"] = http.get("/api/v1/jobs")
    assert {path: leaks(one.text) for path, one in heard.items()} == {path: [] for path in heard}
    assert heard["/spec"].status_code == heard["/logs"].status_code == heard["/events"].status_code == 200
    assert "config_project" in heard["/spec"].text
    for one in READABLE:
        assert one in heard["/logs"].text
    assert READABLE[0] in heard["/events"].text


def test_what_a_master_says(leaky: JobReader, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of its own environment, which the reader's need not be."""
    with StandingJob() as job:
        view = job.master.view()
        words = "; ".join(lines())
        monkeypatch.setattr(job.master, "view", lambda: {**view, "job": {**view["job"], "error": words}})
        with connect(create_app(job.master, token=None)) as http:
            name = view["job"]["job_id"]
            said = http.get(f"/api/v1/jobs/{name}").text
            listed = http.get("/api/v1/jobs").text
    planted_elsewhere = {"wrapped", "base64"}
    for text in (said, listed):
        by_shape = {"shell_wandb", "shell_hf", "join", "git", "basic", "traceback"}
        assert not by_shape & {*leaks(text)} - planted_elsewhere
        assert READABLE[0] in text


def test_what_the_command_line_shows(leaky: JobReader, home: Home) -> None:
    runner = CliRunner()
    for verb in (
        ["logs", "leaky"],
        ["logs", "leaky", "--json"],
        ["events", "leaky", "--json"],
        ["show", "leaky", "--json"],
    ):
        shown = runner.invoke(main, verb, env={"GYRE_HOME": str(home.path)})
        assert shown.exit_code == 0, shown.output
        assert leaks(shown.output) == []
    assert READABLE[0] in runner.invoke(main, ["logs", "leaky"], env={"GYRE_HOME": str(home.path)}).output


def test_an_error_and_a_changed_configuration(leaky: JobReader) -> None:
    list(leaky.events("leaky-1"))
    error = ConfigError(f"{S['job_env']} is no number.", hint=f"See https://me:{S['mlflow']}@x.")
    assert leaks(bytes(problem_of(error).body).decode()) == []
    before = parse_job(leaky.spec("leaky-1")).model_dump(mode="json")
    after = copy.deepcopy(before)
    after["config"]["my_service"]["api_key"] = S["join"]
    changes = changes_between(before, after)
    assert leaks(json.dumps(changes)) == []
    assert undone(after, changes)["config"]["my_service"]["api_key"] == S["join"]
