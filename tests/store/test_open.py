"""Opening: migrations, refusals in words, and that nothing of anybody else's is ever overwritten."""

from __future__ import annotations

import contextlib
import os
import pickle
import sqlite3
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import make_url

import gyre.store
from gyre.errors import SchemaTooNew, StoreCorrupt, StoreError
from gyre.store import Store, open_store, tables
from gyre.store.database import open_database
from tests.store.store_processes import in_processes

MIGRATIONS = Path(gyre.store.__file__).parent / "migrations"


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    return config


def test_the_migrations_create_the_tables_of_this_code(store: Store) -> None:
    with store._database.read() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": tables.VERSION_TABLE})
        assert compare_metadata(context, tables.metadata) == []
        indexes = {
            index["name"]
            for table in tables.metadata.tables
            for index in sa.inspect(connection).get_indexes(table)
        }
    assert {index.name for table in tables.metadata.tables.values() for index in table.indexes} <= indexes


def test_the_known_revisions_are_those_of_the_migrations_folder() -> None:
    scripts = ScriptDirectory.from_config(_alembic())
    assert scripts.get_heads() == [tables.HEAD]
    assert {script.revision for script in scripts.walk_revisions()} == set(tables.KNOWN_REVISIONS)


@pytest.mark.parametrize("url", ["sqlite://", "postgresql+psycopg://"])
def test_migrations_can_be_written_out_without_a_database(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _alembic()
    config.set_main_option("sqlalchemy.url", url)
    command.upgrade(config, "head", sql=True)
    assert "CREATE UNIQUE INDEX gyre_jobs_one_live_name" in capsys.readouterr().out


def test_six_processes_that_open_at_once_migrate_once(store_url: str) -> None:
    outcomes = in_processes(store_url, *[("open_it", {})] * 6)
    assert [outcome.result for outcome in outcomes] == [True] * 6, outcomes
    with open_store(store_url) as store, store._database.read() as connection:
        rows = connection.execute(sa.text(f"SELECT version_num FROM {tables.VERSION_TABLE}")).scalars().all()
    assert rows == [tables.HEAD]


def test_a_newer_schema_is_refused_and_both_revisions_are_named(store_url: str) -> None:
    with open_store(store_url) as store, store._database.write() as connection:
        connection.execute(sa.text(f"UPDATE {tables.VERSION_TABLE} SET version_num = '0099'"))
    for read_only in (False, True):
        with pytest.raises(SchemaTooNew, match=rf"0099.*{tables.HEAD}.*upgrade gyre") as caught:
            open_store(store_url, read_only=read_only)
    assert pickle.loads(pickle.dumps(caught.value)).details == {"stored": "0099", "known": tables.HEAD}


@pytest.mark.parametrize("revision", ["0001", "0007"])
def test_a_schema_from_before_the_first_release_is_refused(store_url: str, revision: str) -> None:
    with open_store(store_url) as store, store._database.write() as connection:
        connection.execute(sa.text(f"UPDATE {tables.VERSION_TABLE} SET version_num = '{revision}'"))
    with pytest.raises(StoreError, match=f"schema {revision}, of a Gyre from before 0.1.0") as caught:
        open_store(store_url)
    assert "Move it aside" in str(caught.value)


def test_a_reader_sees_and_cannot_write(store: Store, make_job) -> None:
    make_job()
    with open_store(store.url, read_only=True) as reader:
        assert reader.job("grpo").job_id == "j1"
        with pytest.raises(StoreError, match="opened for reading"):
            reader.update_job("j1", phase="running")


def test_a_reader_neither_creates_nor_migrates(store_url: str) -> None:
    with pytest.raises(StoreError, match=r"no store|holds no Gyre store"):
        open_store(store_url, read_only=True)
    if store_url.startswith("sqlite"):
        assert not Path(str(make_url(store_url).database)).exists()


def test_a_file_store_runs_in_wal_and_syncs_each_commit(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path / 'a.db'}") as store:
        for relaxed, level in ((False, 2), (True, 1), (False, 2)):
            with store._database.write(relaxed=relaxed) as connection:
                assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
                assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == level


def _refused(path: Path | str, kind: type[StoreError]) -> str:
    before = Path(path).read_bytes() if Path(path).is_file() else None
    with pytest.raises(kind) as caught:
        open_store(f"sqlite:///{path}")
    assert str(path) in str(caught.value)
    assert caught.value.hint
    if before is not None:
        assert Path(path).read_bytes() == before, "an unreadable file was changed"
    return str(caught.value)


def _filled(path: Path) -> Path:
    with open_store(f"sqlite:///{path}") as store:
        for number in range(200):
            store.create_job(job_id=f"j{number}", name=f"n{number}", spec={"x": "y" * 500}, now=1.0)
    assert not Path(f"{path}-wal").exists()
    return path


def test_a_text_file_is_not_a_store(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary, " * 500)
    assert "move it" in _refused(path, StoreCorrupt)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = _filled(tmp_path / "a.db")
    os.truncate(path, path.stat().st_size // 3)
    _refused(path, StoreCorrupt)


def test_an_emptied_file_with_a_full_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.touch()
    Path(f"{path}-wal").write_bytes(b"frames")
    _refused(path, StoreCorrupt)
    assert Path(f"{path}-wal").read_bytes() == b"frames"


def test_a_damaged_schema_page_is_refused(tmp_path: Path) -> None:
    path = _filled(tmp_path / "a.db")
    with path.open("r+b") as file:
        file.seek(100)
        file.write(os.urandom(3000))
    _refused(path, StoreCorrupt)


def test_damage_further_in_is_named_when_it_is_touched_and_by_verify(tmp_path: Path) -> None:
    path = _filled(tmp_path / "a.db")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size - size // 2))
    with open_store(f"sqlite:///{path}") as store:
        with pytest.raises(StoreCorrupt, match=r"a\.db"):
            store.jobs(limit=1000)
        with pytest.raises(StoreCorrupt, match=r"a\.db"):
            store.verify()


def test_a_whole_store_verifies(store: Store, make_job) -> None:
    make_job()
    store.verify()


def test_a_directory_is_not_a_store(tmp_path: Path) -> None:
    assert "is a directory" in _refused(tmp_path, StoreError)


def test_a_path_below_a_file_or_in_proc_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _refused(tmp_path / "file" / "gyre.db", StoreError)
    _refused("/proc/gyre/gyre.db", StoreError)


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "photos.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE photos (id)")
    with pytest.raises(StoreError, match=r"another program's database.*photos"):
        open_store(f"sqlite:///{path}")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("photos",)]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("gyre.db", "not a store's address"),
        ("mysql://localhost/x", "SQLite or PostgreSQL"),
        ("sqlite://", "in memory"),
        ("postgresql://u:secret@127.0.0.1:1/x", "cannot be reached"),
    ],
)
def test_an_address_that_leads_nowhere_is_said_so_without_the_password(url: str, said: str) -> None:
    with pytest.raises(StoreError, match=said) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_without_create_a_missing_file_stays_missing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        open_store(f"sqlite:///{tmp_path / 'a.db'}", create=False)
    assert list(tmp_path.iterdir()) == []


def test_the_switch_to_wal_waits_for_another_process_that_has_the_file(tmp_path: Path) -> None:
    """SQLite itself does not wait here: of 480 processes that created a store at once, 9 were refused."""
    path = tmp_path / "a.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.2, holder.execute, ["ROLLBACK"])
        release.start()
        try:
            open_store(f"sqlite:///{path}").close()
        finally:
            release.join()


def test_opening_again_does_not_need_the_write_lock(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    with open_store(url) as first, first._database.write():
        open_database(url, create=False, read_only=False).close()


def test_what_holds_secrets_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "home" / "gyre.db"
    before = os.umask(0)
    try:
        with open_store(f"sqlite:///{path}") as store:
            store.journal("j1")
            assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
            assert path.parent.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_a_store_of_the_revision_before_is_migrated_with_what_is_in_it(store_url: str) -> None:
    with open_store(store_url) as store:
        store.create_job(job_id="j1", name="grpo", spec={}, now=1.0)
        with store._database.write() as connection:
            config = _alembic()
            config.attributes["connection"] = connection
            command.downgrade(config, "0008")
            tables_then = set(sa.inspect(connection).get_table_names())
    assert not {"gyre_series", "gyre_keyframes"} & tables_then
    with pytest.raises(StoreError, match=f"schema 0008, older than {tables.HEAD}"):
        open_store(store_url, read_only=True)
    with open_store(store_url, create=False) as store:
        assert store.job("grpo").job_id == "j1"
        assert store.series("j1").extents() == {}
        assert store.journal("j1").continued() == []
        with store._database.read() as connection:
            context = MigrationContext.configure(connection, opts={"version_table": tables.VERSION_TABLE})
            assert compare_metadata(context, tables.metadata) == []
            assert "gyre_events_continued" in {
                index["name"] for index in sa.inspect(connection).get_indexes("gyre_events")
            }
