"""The database file of the store: its making, its checks before use, and the lock on the state directory.

Owns the schema and its version. A database that cannot be used is refused with what to do about it, and nothing is deleted or
overwritten. Called on the thread that makes the store.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import apsw

from hexrt.errors import BadRequest, HexrtError, Unavailable
from hexrt.runtime.store_blobs import Sync, sync_directory

NAME = "hexrt.db"
WHERE = "daemon.state_dir"
VERSION = 2
APPLICATION = 0x48585254  # "HXRT"
BUSY_MS = 5_000

SETTINGS: tuple[tuple[str, str | int], ...] = (
    ("journal_mode", "WAL"),
    ("synchronous", "FULL"),
    ("wal_autocheckpoint", 0),  # the writer does it, after it has told of the commit
    ("journal_size_limit", 64 << 20),
    ("trusted_schema", "OFF"),
)

SCHEMA = f"""
BEGIN;
CREATE TABLE frames (number INTEGER PRIMARY KEY, crc INTEGER NOT NULL, uses BLOB NOT NULL, facts BLOB NOT NULL);
CREATE TABLE lingering_runs (run BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE runs (
    ordinal INTEGER PRIMARY KEY, run BLOB NOT NULL UNIQUE, uid INTEGER NOT NULL, state TEXT NOT NULL,
    submitted_wall_ns INTEGER NOT NULL, size_bytes INTEGER NOT NULL, summary BLOB NOT NULL, rest BLOB NOT NULL
);
CREATE INDEX runs_by_time ON runs (submitted_wall_ns, state, size_bytes);
CREATE INDEX runs_by_owner ON runs (uid, submitted_wall_ns, state);
CREATE TABLE blob_uses (run BLOB NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (run, digest)) WITHOUT ROWID;
CREATE INDEX blob_uses_by_digest ON blob_uses (digest);
CREATE TABLE kept (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
COMMIT;
"""

MOVE_AWAY = (
    f"restore a copy, or move {NAME} and {NAME}-wal out of the state directory to start empty; nothing was changed"
)


def explain(error: apsw.Error) -> HexrtError:
    """What a failure of SQLite while opening means to the person who starts the daemon."""
    if isinstance(error, apsw.NotADBError | apsw.CorruptError):
        return Unavailable(f"{NAME} is damaged ({error}): {MOVE_AWAY}", WHERE)
    return Unavailable(f"{NAME} cannot be opened ({error}): check the disk, its free space and the file's owner", WHERE)


def lock_directory(directory: Path) -> int:
    """Makes the directory if need be and locks it; the lock lasts until the returned descriptor is closed. Raises BadRequest."""
    try:
        directory.mkdir(0o700, parents=True, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise BadRequest(f"the state directory cannot be used: {error.strerror}", WHERE) from None
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise BadRequest("the state directory belongs to another user: chown it, or choose another", WHERE)
        if stat.S_IMODE(found.st_mode) & 0o022:
            raise BadRequest("the state directory may be written by other users: chmod it to 0700", WHERE)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder_of(fd)
        os.close(fd)
        raise BadRequest(f"{holder} uses this state directory: stop it, or give another directory", WHERE) from None
    except OSError as error:
        os.close(fd)
        raise BadRequest(f"the state directory cannot be locked: {error.strerror}", WHERE) from None
    except BadRequest:
        os.close(fd)
        raise
    return fd


def _holder_of(fd: int) -> str:
    """Who holds the lock, as far as /proc lets it be seen."""
    inode = f":{os.fstat(fd).st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        lines = []
    for words in (line.split() for line in lines):
        if "FLOCK" in words and "->" not in words and any(word.endswith(inode) for word in words):
            return f"another hexrtd (process {words[4]})"
    return "another hexrtd"


def make_database(directory: Path, vfs: str, sync: Sync) -> None:
    """Makes the database where there is none. It gets its name when it is complete."""
    path, new = directory / NAME, directory / f"{NAME}.new"
    if path.exists():
        return
    if (directory / f"{NAME}-wal").exists():
        raise Unavailable(f"{NAME} is gone but {NAME}-wal is there: restore both, or move the latter away", WHERE)
    for suffix in ("", "-wal", "-shm", "-journal"):
        new.with_name(new.name + suffix).unlink(missing_ok=True)
    os.close(os.open(new, os.O_CREAT | os.O_WRONLY, 0o600))
    connection = apsw.Connection(str(new), apsw.SQLITE_OPEN_READWRITE, vfs or None)
    try:
        connection.execute(SCHEMA).fetchall()
    finally:
        connection.close(True)
    fd = os.open(new, os.O_RDONLY)
    try:
        sync(fd)
    finally:
        os.close(fd)
    new.rename(path)
    sync_directory(directory, sync)


def open_writer(directory: Path, vfs: str) -> apsw.Connection:
    """The connection that writes, checked: whole if the last close was not clean, ours, and of this version."""
    path = directory / NAME
    if path.stat().st_size == 0:
        raise Unavailable(f"{NAME} is empty: {MOVE_AWAY}", WHERE)
    is_clean = not (directory / f"{NAME}-wal").exists()
    connection = apsw.Connection(str(path), apsw.SQLITE_OPEN_READWRITE, vfs or None)
    try:
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.set_busy_timeout(BUSY_MS)
        _check(connection, is_clean)
        for name, value in SETTINGS:
            connection.pragma(name, value)
    except BaseException:
        connection.close(True)
        raise
    return connection


def open_reader(directory: Path, vfs: str) -> apsw.Connection:
    connection = apsw.Connection(str(directory / NAME), apsw.SQLITE_OPEN_READONLY, vfs or None)
    connection.set_busy_timeout(BUSY_MS)
    connection.pragma("trusted_schema", "OFF")
    return connection


def _check(connection: apsw.Connection, is_clean: bool) -> None:
    application = connection.pragma("application_id")
    if application != APPLICATION:
        raise BadRequest(f"{NAME} is not a database of hexrt: give another state directory; nothing was changed", WHERE)
    version = connection.pragma("user_version")
    if version != VERSION:
        raise BadRequest(
            f"{NAME} has schema version {version} and this hexrt knows {VERSION}: run the hexrt that wrote it, or give another "
            "state directory; nothing was changed",
            WHERE,
        )
    if not is_clean:
        found = connection.execute("PRAGMA quick_check(1)").fetchall()
        if found != [("ok",)]:
            raise Unavailable(f"{NAME} is damaged ({found[0][0]}): {MOVE_AWAY}", WHERE)
