"""The archive for a report: all of its parts, and no secret in any of them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from gyre.api.debug_bundle import write_bundle
from gyre.api.home import Home
from gyre.api.reader import JobReader
from gyre.store import open_store
from tests.api.conftest import Seed

SECRET = "hf_abcDEF123456"


def test_every_part_is_there_without_the_secret(home: Home, seed: Seed, tmp_path: Path) -> None:
    url = seed("actor_lost")
    with open_store(url) as store:
        spec = store.job("golden-1").spec
        spec["env"] = {"HF_TOKEN": SECRET}
        spec["observe"] = {"notify": [{"webhook": f"https://hooks.example/{SECRET}"}]}
        store.create_job(job_id="secret-1", name="secret", spec=spec, now=3.0)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "actor-0.1.log").write_text(f"began\n401 for token {SECRET}\n")
    file = tmp_path / "out" / "report.tar.gz"
    with JobReader(url, at=home) as reader:
        written = write_bundle(reader, "secret-1", file, logs=logs)
    assert not written["missing"]
    assert file.stat().st_mode & 0o077 == 0
    with tarfile.open(file) as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert {name.removeprefix("report/") for name in found} == {
        "README.txt",
        "events.jsonl",
        "graph.json",
        "logs/actor-0.1.log",
        "machine.json",
        "spec.json",
        "steps.jsonl",
        "view.json",
    }
    assert not any(SECRET.encode() in data for data in found.values())
    assert found["report/logs/actor-0.1.log"] == b"began\n401 for token ***\n"
    assert json.loads(found["report/spec.json"])["env"] == {"HF_TOKEN": "***"}


def test_without_logs_the_rest_is_there_and_it_is_said(home: Home, seed: Seed, tmp_path: Path) -> None:
    with JobReader(seed("actor_lost"), at=home) as reader:
        written = write_bundle(reader, "golden-1", tmp_path / "report.tar.gz")
    assert list(written["missing"]) == ["logs/"]
    assert "events.jsonl" in written["parts"]
