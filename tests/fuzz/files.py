"""Files that are damaged: manifests, checkpoints, `rollouts.json`, job files, and the rows of a journal."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from abc import ABC
from pathlib import Path
from random import Random
from typing import Any

from gyre.api.definition.jobfile import load_job_file
from gyre.api.job_replay import replay_job
from gyre.config.parse import load_yaml
from gyre.errors import ConfigError, GyreError
from gyre.failover.state import state_from
from gyre.rollouts.protocol import endpoint
from gyre.rollouts.protocol.credentials import weights_key
from gyre.store import Entry, open_store
from gyre.weights.version.arena import MANIFEST, Arena
from gyre.weights.version.manifest import WeightMismatch
from gyre.weights.version.model_folder import ModelFolder, fingerprint, list_model_folder, same_config
from gyre.workloads.gang import state_files
from gyre.workloads.trainer.learning import checkpoints
from tests.fuzz.inputs import damaged, hostile_json
from tests.fuzz.target import Broken, Target
from tests.machine import memory_folder

ROOT = Path(__file__).parents[2]


CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBHzCBxqADAgECAhBr66E31OOgFkhW1PxmZ9UMMAoGCCqGSM49BAMCMBIxEDAO
BgNVBAMMB21hbmFnZXIwHhcNMjYxMTIyMTYxNDA5WhcNMzYxMTIwMTYxNDA5WjAS
MRAwDgYDVQQDDAdtYW5hZ2VyMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEed15
lUMULTYTWM8VyocnlTr7Nk760e/Wyu6/HDcw3Uoo5DrJSB1HAYUKz4IolYAH4UQq
xnqpSAi/ChdsEM909jAKBggqhkjOPQQDAgNIADBFAiAMdtU/o4z30GqLHWaRlrQz
xQM6Sl6X07EJDcSGh+IyMgIhAOOHnfYr1gG2yVEtjoEJmxGPW7lxwGaKJW7OIUD6
2wST
-----END CERTIFICATE-----
"""
"""Of nobody, and always the same, so that a case is."""


class Files(Target, ABC):
    """A folder of the target's own."""

    share = 0.02

    def start(self) -> None:
        self._folder = contextlib.ExitStack()
        self.path = self._folder.enter_context(memory_folder("fuzz"))

    def stop(self) -> None:
        self._folder.close()


class WeightFolders(Files):
    """A folder of weights, and an arena that finds it."""

    name = "weight folders"

    def start(self) -> None:
        super().start()
        self._good = self.path / "good" / "v00000001"
        self._good.mkdir(parents=True)
        (self._good / "config.json").write_text('{"model_type": "tiny", "hidden_size": 8}')
        (self._good / "model.safetensors").write_bytes(bytes(range(250)) * 4)
        self._manifest = list_model_folder(self._good, version=1).manifest.to_dict()

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        root = self.path / "arena"
        shutil.rmtree(root, ignore_errors=True)
        folder = root / draw.choice(("v00000001", "v00000001", ".staging"))
        shutil.copytree(self._good, folder)
        sent.append(hostile_json(self._manifest, draw))
        sent.append(hostile_json({"model_type": "tiny", "hidden_size": 8}, draw))
        (folder / MANIFEST).write_bytes(sent[0])
        if folder.name == ".staging":
            (folder / MANIFEST).rename(folder / ".intended.json")
            (folder / ".journal").write_bytes(sent[1][:9])
        if draw.randrange(2):
            (folder / "config.json").write_bytes(sent[1])
        fingerprint(folder)
        same_config(folder, self._good)
        good = True
        try:
            ModelFolder.read(folder).verify()
        except WeightMismatch:
            good = False
        arena = Arena(root)
        manifest = ModelFolder.read(self._good).manifest
        if arena.check(1) is None:
            with contextlib.suppress(WeightMismatch):
                arena.stage_manifest(manifest, keep=None)
        arena.newest()
        arena.close(remove=True)
        return good


class Endpoints(Files):
    """`rollouts.json`: an address and a token that can be dialled with, or none."""

    name = "rollouts.json"

    def start(self) -> None:
        super().start()
        self._good = {
            "url": "http://127.0.0.1:7000",
            "secret": "s" * 43,
            "token": "t" * 43,
            "pid": 7,
            "certificate": CERTIFICATE,
        }

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        sent.append(hostile_json(self._good, draw))
        (self.path / endpoint.ENDPOINT_FILE).write_bytes(sent[0])
        found = endpoint.read_endpoint(self.path)
        for where in (
            found,
            endpoint.read_join_endpoint(self.path),
            endpoint.read_weights_endpoint(self.path),
        ):
            for text in where or ():
                text.encode()
                if not isinstance(text, str) or set(text) & {"\r", "\n", "\0"}:
                    raise Broken("a header cannot have that")
        endpoint.read_trust(self.path)
        if found is not None:
            weights_key(found[1])
        return found is not None


class Checkpoints(Files):
    """`COMPLETE`, and the record of a rank's state: what is wrong is told, and nothing is loaded of it."""

    name = "checkpoints"

    def start(self) -> None:
        super().start()
        self._state = self.path / "rank_00000.state"
        content = {"place": 0, "parts": [["w", "value", "float32", [4], 0, 4, 0]]}
        import threading

        state_files.write_state(
            self._state, [memoryview(b"abcd" * 2000)], content, stop=threading.Event(), threads=1
        )
        checkpoints._mark_complete(self.path, 3)
        self._marker = json.loads((self.path / checkpoints.MARKER).read_text())
        self._record = json.loads(state_files.record_path(self._state).read_text())

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        sent.append(hostile_json(self._marker, draw))
        (self.path / checkpoints.MARKER).write_bytes(sent[0])
        if not isinstance(checkpoints.problem_with(self.path), str):
            raise Broken("no answer")
        sent.append(hostile_json(self._record, draw))
        state_files.record_path(self._state).write_bytes(sent[1])
        try:
            record = state_files.read_record(self._state)
        except state_files.StateDamaged:
            return False
        return not state_files.problem_with(self._state, record, threads=1)


class JobFiles(Files):
    """Job files: a job, or a ConfigError that says where it is wrong."""

    name = "job files"
    share = 0.002

    def start(self) -> None:
        super().start()
        found = sorted((ROOT / "examples").rglob("*.yaml"))
        self._good = [path.read_bytes() for path in found] or [JOB]
        self._good.append(JOB)

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        data = draw.choice(self._good)
        if draw.randrange(8) == 0:
            data = draw.choice(
                (b"[" * 5000, b"a: " * 3000, b"- " * 3000, b"\xff\xfe", b"&a [*a]", b"&a {b: *a}")
            )
        lines = data.split(b"\n")
        for _ in range(draw.randrange(4)):
            at = draw.randrange(len(lines))
            key, colon, _ = lines[at].partition(b":")
            match draw.randrange(5):
                case 0:
                    lines[at] = damaged(lines[at], draw)
                case 1:
                    lines.insert(at, draw.choice(lines))
                case 2:
                    del lines[at : at + draw.randrange(1, 3)]
                    lines = lines or [b""]
                case _ if colon:
                    lines[at] = key + b": " + draw.choice(STRANGE_VALUES)
                case _:
                    lines[at] += b" "
        sent.append(b"\n".join(lines))
        file = self.path / "job.yaml"
        file.write_bytes(sent[0])
        with contextlib.suppress(ConfigError):
            load_yaml(file)
        try:
            load_job_file(file)
        except ConfigError as error:
            str(error).encode("utf-8", "backslashreplace")
            return False
        return True


JOB = b"""name: small
recipe: grpo
config:
  seed: 3
  model: {path: nowhere}
roles:
  trainer:
    entrypoint: gyre.workloads:BaseTrainer
    resources: {accelerator: 0}
  actor: {entrypoint: gyre.workloads:BaseWorkload, total: 2}
  rollout: {entrypoint: gyre.workloads:BaseWorkload, total: 2, elastic: {min: 1, max: 4}}
failover:
  wait_for_room_s: 60
"""

STRANGE_VALUES = (
    *(
        b"2001-99-99",
        b"!!timestamp abc",
        b"!!int ''",
        b"!!float x",
        b"!!bool x",
        b"!!binary '%'",
        b"!!python/object:a",
    ),
    *(
        b"1e999",
        b".nan",
        b"-.inf",
        b"9" * 5000,
        b"0x",
        b"0b",
        b"1:99:99",
        b"190:20:30.15",
        b"=",
        b"<<: 1",
        b"~",
        b"''",
    ),
    *(
        b"*a",
        b"&a [*a]",
        b"{? [1]: 2}",
        b"{[1]: 2}",
        b"!!set {a}",
        b"!!omap [a]",
        b"!!pairs [a]",
        b"-1",
        b"[]",
        b"{}",
    ),
    *(
        b"'" + b"x" * 70_000 + b"'",
        b'"\\ud800"',
        b'"\\0"',
        b"|\n a",
        b"%YAML 9.9",
        b"[" * 2000,
        b"0o9",
        b"1_e5",
        b"+1",
    ),
)


class JournalRows(Files):
    """The rows of a job's journal: a history that folds, or a StoreError."""

    name = "journal rows"
    share = 0.003
    traced = False

    def start(self) -> None:
        super().start()
        data = json.loads((ROOT / "tests/failover/golden/rollout_lost.json").read_text())
        self._good = self.path / "good.db"
        with open_store(f"sqlite:///{self._good}") as store:
            store.create_job(job_id="job", name=data["spec"]["name"], spec=data["spec"], now=1.0)
            journal = store.journal("job")
            epoch = journal.take_over(now=1.0, pid=1)
            rows = {(row["kind"], row["key"]): row["body"] for row in data["snapshot"]}
            last = len(data["events"]) - 1
            journal.append(
                epoch,
                [
                    Entry(
                        **{key: event[key] for key in ("seq", "cause", "kind", "at", "actor", "body")},
                        event_id=event["id"],
                        upserts=rows if at == last else {},
                    )
                    for at, event in enumerate(data["events"])
                ],
            )
        with contextlib.closing(sqlite3.connect(self._good)) as database:
            database.execute("PRAGMA journal_mode=DELETE")

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        for left in self.path.glob("job.db*"):
            left.unlink()
        file = self.path / "job.db"
        shutil.copy(self._good, file)
        with contextlib.closing(sqlite3.connect(file)) as database:
            for _ in range(draw.choice((1, 1, 2))):
                self._damage(database, draw, sent)
            database.commit()
        good = True
        with open_store(f"sqlite:///{file}") as store:
            for read in (self._replay, self._state):
                try:
                    read(store)
                except GyreError as error:
                    if not error.code.startswith(("store", "not_found", "config", "graph")):
                        raise
                    good = False
        return good

    def _replay(self, store: Any) -> None:
        replay_job(store, "job").as_dict()

    def _state(self, store: Any) -> None:
        state_from(store.journal("job").snapshot())

    def _damage(self, database: sqlite3.Connection, draw: Random, sent: list[bytes]) -> None:
        table = draw.choice(("gyre_events", "gyre_events", "gyre_snapshot", "gyre_snapshot", "gyre_jobs"))
        column = {"gyre_jobs": "spec"}.get(table, draw.choice(("body", "body", "body", "kind")))
        key = {"gyre_events": "seq", "gyre_snapshot": "kind || key", "gyre_jobs": "job_id"}[table]
        rows = database.execute(f"SELECT {key}, {column} FROM {table} ORDER BY 1").fetchall()
        row, old = draw.choice(rows)
        if column == "kind":
            new: Any = draw.choice(rows)[1]
        else:
            try:
                new = hostile_json(json.loads(old), draw)
            except ValueError:  # damaged already
                new = damaged(old.encode("utf-8", "replace"), draw)
        sent.append(f"{table}.{column}[{row}]: ".encode() + (new if isinstance(new, bytes) else new.encode()))
        text = new.decode("utf-8", "replace") if isinstance(new, bytes) else new
        database.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (text, row))
