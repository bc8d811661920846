"""Opening a database: pragmas, transactions, migration, and the one translation of its errors.

Invariants:
    Lock-before-read    a writing transaction holds SQLite's write lock before its first read (BEGIN
                        IMMEDIATE). With the driver's own BEGIN, SQLAlchemy loses updates silently: 8 threads
                        of 50 read-modify-writes left 126 of 400.
    Durable-on-return   when a `durable` transaction has returned, its rows survive a power cut
                        (synchronous=FULL; PostgreSQL's synchronous_commit=on). A `relaxed` one survives the
                        death of any process, and a power cut only once a later durable one has returned.
    Migrate-once        the check and the migration are one transaction under the database's own write lock
                        (PostgreSQL: an advisory lock), so of many processes that open at once one migrates.
    Never-overwritten   a file that is not a Gyre store is neither written to, moved nor deleted.
    Never-into-nothing  no transaction of an SQLite store is acknowledged unless its file is still at its path and still
                        the same (`gyre.store.presence`).
    Always-ours         whatever a driver raises leaves this package as a GyreError (`translate`).

This file must not know the tables' meaning, only their version.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Table, create_engine, event, func, inspect, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from gyre.errors import GyreError, SchemaTooNew, StoreCorrupt, StoreError, StoreFull, StoreLost
from gyre.store.presence import Finding, Lost, Presence
from gyre.store.tables import HEAD, KNOWN_REVISIONS, VERSION_TABLE
from gyre.store.write_lock import described, holder_of

BUSY_TIMEOUT_S = 10.0
"""How long a writer waits for SQLite's one write lock. Our own transactions hold it for milliseconds (81 ms
was the worst seen under contention), a checkpoint of the WAL for a slow disk's second, a migration for a few:
ten is beyond all of these, and still short of the deadlines after which a job is taken for dead."""

CONNECT_TIMEOUT_S = 10
MIGRATION_LOCK = 0x67797265  # "gyre": the key of PostgreSQL's advisory lock
_NEARLY_NOTHING_BYTES = 256 * 1024

_HELD_POLL_S = 0.25
_CAN_COME_BACK = frozenset({Lost.MISSING, Lost.REPLACED, Lost.READ_ONLY, Lost.LOG_REMOVED, Lost.HANGING})
"""What may be made good by putting the file back, or by its disk. No wait helps the others."""

LOG_PAGES = 1000
"""SQLite's own: the commit after which its log has so many pages (4 KiB each) brings it into the file, and waits for
the disk."""

LARGE_LOG_PAGES = 16_000
"""The same for those who leave that to another thread, which may fall behind: 64 MiB."""

_IDENTITY = text("SELECT store_id, commits FROM gyre_store")
_COUNT_COMMIT = "UPDATE gyre_store SET commits = commits + 1 RETURNING store_id, commits"


class Database:
    """One database as connections: `write` and `read` are the only ways to a transaction."""

    def __init__(self, url: URL, *, read_only: bool, hold_s: float = 0.0) -> None:
        """`hold_s`: how long a transaction waits for a lost SQLite file to be put back until it raises StoreLost."""
        self.url = url
        self.read_only = read_only
        self.where = url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)
        self.path = Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None
        self.presence = Presence(self.path) if self.path else None
        self._hold_s = hold_s
        self._mending = threading.Lock()
        self._engine = (
            _sqlite_engine(url, read_only, self.presence) if self.presence else _postgres_engine(url)
        )

    @property
    def is_sqlite(self) -> bool:
        return self.path is not None

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def write(self, *, relaxed: bool = False, checkpoints_apart: bool = False) -> Iterator[Connection]:
        """A transaction that commits on leaving and rolls back on any exception. `checkpoints_apart`: its commit leaves
        SQLite's log to whoever calls `checkpoint`, until that is `LARGE_LOG_PAGES` long."""
        if self.read_only:
            raise StoreError(f"{self.where} was opened for reading.", hint="Open it without read_only=True.")
        self.check_present()
        seen = self.presence.commits if self.presence else 0
        with translated(self), self._engine.connect() as connection:
            connection = connection.execution_options(gyre_relaxed=relaxed, gyre_apart=checkpoints_apart)
            with connection.begin():
                counted = self._count_commit(connection, seen)
                yield connection
                self.check_present(log_too=False)
        self.check_present()
        if self.presence is not None and counted is not None:
            self.presence.note(*counted, seen=seen)
            if not relaxed:
                self.presence.committed(counted[1])

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database throughout and takes no write lock."""
        options: dict[str, Any] = {"gyre_read": True}
        if not self.is_sqlite:
            options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        self.check_present()
        seen = self.presence.commits if self.presence else 0
        with translated(self), self._engine.connect() as connection:
            connection = connection.execution_options(**options)
            with connection.begin():
                self._note_identity(connection, seen)
                yield connection
        self.check_present()

    def checkpoint(self) -> None:
        """Bring SQLite's log into the file, as far as nobody is in the way. No commit waits for it. Nothing on
        PostgreSQL, which does so by itself. Raises StoreError."""
        if not self.is_sqlite or self.read_only or self.lost(log_too=False) is not None:
            return
        with translated(self), contextlib.closing(self._engine.raw_connection()) as connection:
            cursor = connection.cursor()
            cursor.execute("PRAGMA wal_checkpoint(PASSIVE)")
            cursor.close()

    # -- presence ------------------------------------------------------------------------------------------

    def check_present(self, *, log_too: bool = True) -> None:
        """Raises StoreLost if the SQLite file is not where it was opened, or not the same, and is not put back within
        `hold_s`; also if the disk does not answer a look in time. `log_too`: a removed log is made good here, which
        wants that this thread has no transaction. There, and in the transaction itself, SQLite asks the disk, and
        waits as long as that takes."""
        if self.presence is None:
            return
        until = time.monotonic() + self._hold_s
        while (finding := self.lost(log_too=log_too)) is not None:
            left_s = until - time.monotonic()
            if left_s <= 0 or finding.kind not in _CAN_COME_BACK:
                raise finding.error()
            time.sleep(min(_HELD_POLL_S, left_s))

    def lost(self, *, log_too: bool = True) -> Finding | None:
        """What is wrong with the SQLite file now, after what can be made good here."""
        if self.presence is None:
            return None
        finding = self.presence.look_often(writes=not self.read_only)
        if finding is None or not log_too:
            return None if finding is not None and finding.kind is Lost.LOG_REMOVED else finding
        if finding.kind is Lost.LOG_REMOVED and self._empty_the_log():
            return self.presence.look(writes=not self.read_only)
        if finding.kind is Lost.TRUNCATED and self._is_whole():
            self.presence.accept_size()
            return None
        return finding

    def _empty_the_log(self) -> bool:
        """Bring what is in a removed log, which our connections still have open, into the file, and have a new one.
        Returns whether that is done."""
        assert self.presence is not None
        with self._mending:
            if self.presence.look(writes=False) is None:
                return True  # another thread has
            if not self.read_only:
                try:
                    with contextlib.closing(self._engine.raw_connection()) as connection:
                        cursor = connection.cursor()
                        cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                        busy = int((cursor.fetchone() or [1])[0])
                        cursor.close()
                except (SQLAlchemyError, sqlite3.Error):
                    return False
                if busy:
                    return False
            self._engine.dispose()
            self.presence.forget_log()
        return True

    def _is_whole(self) -> bool:
        """Whether a file that became smaller has all the pages that it says it has: it was compacted by VACUUM."""
        assert self.path is not None
        try:
            with contextlib.closing(self._engine.raw_connection()) as connection:
                cursor = connection.cursor()
                pages = int(cursor.execute("PRAGMA page_count").fetchone()[0])
                page_bytes = int(cursor.execute("PRAGMA page_size").fetchone()[0])
                cursor.close()
            return pages * page_bytes <= self.path.stat().st_size
        except (SQLAlchemyError, sqlite3.Error, OSError):
            return False

    def _count_commit(self, connection: Connection, seen: int) -> tuple[str, int] | None:
        """The store's id, and the count of commits that it will have with this one."""
        if self.presence is None or not self._has_identity:
            return None
        driver: Any = connection.connection.driver_connection  # SQLite's: see `gyre.store.prepared`
        counted = driver.execute(_COUNT_COMMIT).fetchone()
        if counted is None:
            return None
        store_id, commits = str(counted[0]), int(counted[1])
        self.presence.note(store_id, commits - 1, seen=seen)
        return store_id, commits

    def _note_identity(self, connection: Connection, seen: int) -> None:
        if self.presence is None or not self._has_identity:
            return
        found = connection.execute(_IDENTITY).one_or_none()
        if found is not None:
            self.presence.note(str(found[0]), int(found[1]), seen=seen)

    _has_identity = False
    """Whether the schema is new enough to have one: set once it is at HEAD."""

    def upsert(self, table: Table, *, keep_if_null: tuple[str, ...] = ()) -> Any:
        """INSERT ... ON CONFLICT(primary key) DO UPDATE of all other columns; a null in one of
        `keep_if_null` leaves what is stored."""
        insert = sqlite.insert if self.is_sqlite else postgresql.insert
        statement: Any = insert(table)
        keys = [column.name for column in table.primary_key.columns]
        changes: dict[str, Any] = {}
        for column in table.columns:
            if column.name in keys:
                continue
            new = statement.excluded[column.name]
            changes[column.name] = func.coalesce(new, column) if column.name in keep_if_null else new
        return statement.on_conflict_do_update(index_elements=keys, set_=changes)


# -- opening ---------------------------------------------------------------------------------------------


def open_database(url: str, *, create: bool, read_only: bool, hold_s: float = 0.0) -> Database:
    """Check the address, connect, and bring the schema to HEAD. Errors: see `gyre.store.open_store`."""
    parsed = _parse(url)
    path = Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None
    if path is not None:
        finding = Presence(path).look_within()
        if finding is not None and finding.kind is Lost.HANGING:
            raise finding.error()
        try:
            _check_path(path, create=create and not read_only)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be reached: {error.strerror}.",
                hint="See whether its disk is mounted and answers.",
                details={"path": str(path), "unreachable": True},
            ) from error
    database = Database(parsed, read_only=read_only, hold_s=hold_s)
    try:
        _bring_to_head(database, create=create)
        database._has_identity = True
    except BaseException:
        database.close()
        raise
    return database


def _parse(url: str) -> URL:
    examples = "Examples: sqlite:////var/lib/gyre/jobs.db, postgresql+psycopg://user:password@host/database."
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise StoreError(f"{url!r} is not a store's address.", hint=examples) from error
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise StoreError(
                "A store in memory would not survive the process that it has to outlive.", hint=examples
            )
        return parsed.set(drivername="sqlite+pysqlite", database=os.path.abspath(str(parsed.database)))
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    raise StoreError(f"Gyre keeps its journal in SQLite or PostgreSQL, not in {backend!r}.", hint=examples)


def _check_path(path: Path, *, create: bool) -> None:
    """Raise a sentence where SQLite would only say `unable to open database file`."""
    hint = "Give a path whose folder exists or can be made, on a local disk, writable by this user."
    if path.is_dir():
        raise StoreError(f"{path} is a directory, not a database file.", hint=f"Try {path / 'gyre.db'}.")
    if not path.exists():
        if not create:
            raise StoreLost(
                f"There is no store at {path}.",
                hint="Check the path, or bring the file back. `gyre run` and `gyre submit` make a new one.",
                details={"path": str(path), "lost": str(Lost.MISSING)},
            )
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # It holds environment variables and database URLs. SQLite gives its -wal and -shm files the same mode.
            path.touch(mode=0o600)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _full(str(path), error) from error
            raise StoreError(f"Cannot create {path}: {error.strerror}.", hint=hint) from error
        return
    # Looked at, never opened: closing any descriptor of the file drops every lock that this process has on it,
    # and without its lock another process's leaving deletes the log that this one still writes to.
    if not os.access(path, os.R_OK):
        raise StoreError(
            f"Cannot read {path}: {os.strerror(errno.EACCES)}.",
            hint=hint,
            details={"path": str(path), "unreachable": True},
        )
    empty = path.stat().st_size == 0
    wal = Path(f"{path}-wal")
    if empty and wal.exists() and wal.stat().st_size > 0 and path.stat().st_size == 0:
        # SQLite would take an empty file for a new database and delete the log that still holds its rows.
        raise _corrupt(str(path), "the file is empty although its write-ahead log is not")
    if empty and not create:
        raise _corrupt(str(path), "the file is empty")


def _sqlite_engine(url: URL, read_only: bool, presence: Presence) -> Engine:
    path = Path(str(url.database))

    def connect() -> sqlite3.Connection:
        # isolation_level=None: the driver issues no BEGIN of its own; `_on_begin` does (Lock-before-read).
        mode = "ro" if read_only else "rw"
        connection = sqlite3.connect(
            f"{path.as_uri()}?mode={mode}",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            presence.connected(first=standing == 0)
            if not read_only:
                connection.execute("PRAGMA synchronous=FULL")
        except BaseException:
            connection.close()  # the file is damaged: no other process holds the lock yet
            raise
        return connection

    engine = create_engine(url, creator=connect, pool_size=4, max_overflow=12)
    standing, counting = 0, threading.Lock()

    @event.listens_for(engine, "connect")
    def _on_connect(*_args: object) -> None:
        nonlocal standing
        with counting:
            standing += 1

    @event.listens_for(engine, "close")
    def _on_close(*_args: object) -> None:
        nonlocal standing
        with counting:
            standing -= 1

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        _begin_on_sqlite(connection, read_only)

    return engine


def _begin_on_sqlite(connection: Connection, read_only: bool) -> None:
    """Begin a transaction of the kind that the connection's options ask for."""
    options = connection.get_execution_options()
    if options.get("gyre_read") or read_only:
        connection.exec_driver_sql("BEGIN")
        return
    wanted = "NORMAL" if options.get("gyre_relaxed") else "FULL"
    if connection.info.get("synchronous", "FULL") != wanted:
        connection.exec_driver_sql(f"PRAGMA synchronous={wanted}")
        connection.info["synchronous"] = wanted
    pages = LARGE_LOG_PAGES if options.get("gyre_apart") else LOG_PAGES
    if connection.info.get("autocheckpoint", LOG_PAGES) != pages:
        connection.exec_driver_sql(f"PRAGMA wal_autocheckpoint={pages}")
        connection.info["autocheckpoint"] = pages
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _postgres_engine(url: URL) -> Engine:
    if "connect_timeout" not in url.query:
        url = url.update_query_dict({"connect_timeout": str(CONNECT_TIMEOUT_S)})
    try:
        # pre-ping: a server that was restarted while we were idle costs one round trip, not a failed commit.
        engine = create_engine(url, pool_pre_ping=True, pool_size=4, max_overflow=12)
    except (ImportError, NoSuchModuleError) as error:
        raise StoreError(
            f"PostgreSQL needs a driver that is not installed: {error}.",
            hint="pip install 'gyre-rl[postgres]'.",
        ) from error

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        if connection.get_execution_options().get("gyre_relaxed"):
            connection.exec_driver_sql("SET LOCAL synchronous_commit TO off")

    return engine


# -- schema ----------------------------------------------------------------------------------------------


def _bring_to_head(database: Database, *, create: bool) -> None:
    with database.read() as connection:
        revision = _revision(connection)
    _check_revision(database, revision)
    if revision == HEAD:
        return
    if database.read_only:
        if revision is None:
            raise StoreError(f"{database.where} holds no Gyre store.", hint="Open it once for writing.")
        raise StoreError(
            f"{database.where} has schema {revision}, older than {HEAD} which this Gyre reads.",
            hint="Open it once for writing: that migrates it.",
        )
    if revision is None and not create:
        raise StoreLost(
            f"{database.where} holds no Gyre store, and none is made in its place.",
            hint="Bring the store back. `gyre run` and `gyre submit` make a new one.",
            details={"path": str(database.path or ""), "lost": str(Lost.REPLACED)},
        )
    if database.is_sqlite:
        _switch_to_wal(database)
    with database.write() as connection:
        if not database.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        revision = _revision(connection)  # again, now that nobody else can be migrating
        _check_revision(database, revision)
        if revision == HEAD:
            return
        strangers = [name for name in inspect(connection).get_table_names() if not name.startswith("gyre_")]
        if database.is_sqlite and revision is None and strangers:
            raise StoreError(
                f"{database.where} is another program's database (it has {', '.join(strangers[:3])}).",
                hint="Give Gyre a file of its own.",
            )
        _upgrade(connection)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    rows = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().all()
    return str(max(rows)) if rows else None


def _check_revision(database: Database, revision: str | None) -> None:
    if revision is not None and revision < KNOWN_REVISIONS[0]:
        raise StoreError(
            f"{database.where} has schema {revision}, of a Gyre from before 0.1.0, which is not read any more.",
            hint="Move it aside, with its -wal and -shm files: `gyre run`, `submit` and `demo` make a new one.",
            details={"stored": revision, "known": HEAD},
        )
    if revision is not None and revision not in KNOWN_REVISIONS:
        raise SchemaTooNew(
            f"{database.where} has schema {revision}; this Gyre knows schemas up to {HEAD}.",
            hint="A newer Gyre wrote it: upgrade gyre here, or give this one another store.",
            details={"stored": revision, "known": HEAD},
        )


def _switch_to_wal(database: Database) -> None:
    """WAL is a property of the file. The switch wants the file alone and, unlike BEGIN, does not wait for
    that: of several processes that create the store at once all but one are told `locked`, and ask again."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            with translated(database), contextlib.closing(database._engine.raw_connection()) as connection:
                cursor = connection.cursor()
                cursor.execute("PRAGMA journal_mode=WAL")
                mode = str((cursor.fetchone() or [""])[0]).lower()
                cursor.close()
        except StoreError as error:
            if not error.details.get("busy") or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
            continue
        if mode != "wal":
            raise StoreError(
                f"{database.where}: SQLite stays in journal mode {mode!r} instead of WAL.",
                hint="WAL needs shared memory, which network disks lack: use a local one, or PostgreSQL.",
            )
        return


def _upgrade(connection: Connection) -> None:
    # Imported here: Alembic costs a quarter of a second that only the first open of a store should pay.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


# -- errors ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def translated(database: Database) -> Iterator[None]:
    """Everything that touches the database runs in here; a GyreError passes unchanged."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise translate(error, database) from error


def translate(error: Exception, database: Database) -> GyreError:
    """The GyreError that a driver's, SQLAlchemy's or the operating system's error amounts to."""
    cause: Any = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    if isinstance(cause, sqlite3.Error):
        return _translate_sqlite(cause, database)
    sqlstate = getattr(cause, "sqlstate", None)
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(database.where, cause)
    if isinstance(error, PoolTimeout):
        return StoreError(
            f"{database.where}: no free connection: {error}.", hint="Too many threads use one Store at once."
        )
    if isinstance(error, DBAPIError):
        return _translate_postgres(sqlstate, cause, error, database)
    return StoreError(
        f"{database.where}: {error}", hint="This is not an error that Gyre knows; see its cause."
    )


def _translate_sqlite(cause: sqlite3.Error, database: Database) -> GyreError:
    extended = getattr(cause, "sqlite_errorcode", None) or 0
    code, path = extended & 0xFF, str(database.path)
    details = {"sqlite": getattr(cause, "sqlite_errorname", ""), "path": path}
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _disk_is_full(path)):
        return _full(path, cause)
    if code == sqlite3.SQLITE_NOTADB:
        return _corrupt(path, "it is not an SQLite database")
    if code == sqlite3.SQLITE_CORRUPT:
        return _corrupt(path, str(cause))
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        holder = holder_of(database.path) if database.path else None
        return StoreError(
            f"{path}: {described(holder) if holder else 'another process'} held the write lock for more than "
            f"{BUSY_TIMEOUT_S:.0f} s ({cause}).",
            hint="See who has the file open (fuser, lsof); a backup tool or a stopped process can hold it.",
            details=details | {"busy": True},
        )
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return StoreError(
            f"{path} cannot be opened for writing: {cause}.",
            hint="The file and its folder must be writable by this user, on a disk that is not read-only.",
            details=details | {"unreachable": True},
        )
    if code == sqlite3.SQLITE_IOERR:
        return StoreError(
            f"{path}: the disk failed: {cause} ({details['sqlite']}).",
            hint="See the kernel's log; what was acknowledged before is in the file.",
            details=details | {"unreachable": True},
        )
    return StoreError(f"{path}: {cause} ({details['sqlite']}).", hint="See the cause.", details=details)


def _translate_postgres(sqlstate: str | None, cause: Any, error: DBAPIError, database: Database) -> GyreError:
    said = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    details = {"sqlstate": sqlstate or ""}
    state = sqlstate or ""
    if state == "53100":
        return _full(database.where, cause)
    if state in ("XX001", "XX002"):
        return StoreCorrupt(
            f"{database.where}: PostgreSQL found damaged data: {said}.",
            hint="Restore the database from a backup.",
            details=details,
        )
    if state.startswith("28"):
        return StoreError(
            f"{database.where} refused the login: {said}.", hint="Check user and password.", details=details
        )
    if state == "3D000":
        return StoreLost(
            f"{database.where}: {said}.",
            hint="Bring the database back, or create it (createdb) for a new store.",
            details=details,
        )
    if state in ("42P01", "3F000"):
        return StoreLost(
            f"{database.where}: the store's tables are gone: {said}.",
            hint="Restore the database from a backup; Gyre makes no new tables for a job that runs.",
            details=details,
        )
    if state in ("42501", "25006"):
        return StoreError(
            f"{database.where} does not let this user write: {said}.",
            hint="Grant CREATE on the schema and connect to the primary, not to a standby.",
            details=details,
        )
    lost = error.connection_invalidated or state[:2] in ("08", "57") or state == "53300"
    if lost or (not state and type(cause).__name__ in ("OperationalError", "ConnectionTimeout")):
        return StoreError(
            f"{database.where} cannot be reached: {said}.",
            hint="Check that the server runs and that host and port are right; it is safe to try again.",
            details=details | {"unreachable": True},
        )
    return StoreError(f"{database.where}: {said} ({state}).", hint="See the cause.", details=details)


def is_unique_violation(error: GyreError) -> bool:
    """Whether a translated error came from a unique index or a primary key."""
    return error.details.get("sqlstate") == "23505" or error.details.get("sqlite") in (
        "SQLITE_CONSTRAINT_UNIQUE",
        "SQLITE_CONSTRAINT_PRIMARYKEY",
    )


def _full(where: str, cause: Exception) -> StoreFull:
    return StoreFull(
        f"No space left for {where}: {cause}.",
        hint="Free some space; what was acknowledged before is safe, and the same entries can be sent again.",
        details={"path": where},
    )


def _corrupt(path: str, said: str) -> StoreCorrupt:
    return StoreCorrupt(
        f"{path} is not a readable Gyre store: {said}.",
        hint="Restore it from a copy, or move it (with its -wal and -shm files) aside and start anew; "
        "Gyre has left it as it is.",
        details={"path": path},
    )


def _disk_is_full(path: str) -> bool:
    """SQLite reports some forms of `no space` (its shared memory, say) as an I/O error."""
    try:
        free = os.statvfs(os.path.dirname(path))
    except OSError:
        return False
    return free.f_bavail * free.f_frsize < _NEARLY_NOTHING_BYTES
