"""What one commit of the store does, and the chores between commits.

Owns the writing connection, the journal's table and the blob folder. Used by one thread at a time: the one that opens the store, then
the writer's. Any exception out of it is the end: what is in memory may then be ahead of what is on disk.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import apsw
import msgspec

from hexrt.events import Event, Submitted
from hexrt.runtime.store_blobs import BlobFolder, Sync, blob_of
from hexrt.runtime.store_journal import Journal
from hexrt.runtime.store_records import (
    EVERY_RUN,
    Blob,
    Cutter,
    EndedRun,
    Frame,
    encode_ended,
    encode_fact,
    run_of,
    split_frame,
)
from hexrt.runtime.store_tables import Tables

CHECKPOINT_BYTES = 12 << 20
WAL_BYTES = 16 << 20
"""The write-ahead log is made this large beforehand: a commit that need not grow a file takes half the time."""
COMMIT_OVERHEAD_BYTES = 16 << 10
PAGE_BYTES = 4096
COMPACT_BYTES = 1 << 20

log = logging.getLogger("hexrt.store")


class Saved(msgspec.Struct, frozen=True):
    """A small value by name."""

    name: str
    value: bytes


class Retention(msgspec.Struct, frozen=True):
    """How much of ended runs is kept: the oldest go first, the newest always stays."""

    runs: int
    size_bytes: int


Item = Sequence[Event] | EndedRun | Saved


class Batch(msgspec.Struct):
    """What one commit writes."""

    facts: Cutter = msgspec.field(default_factory=Cutter)
    ended: list[tuple[EndedRun, tuple[bytes, bytes, int]]] = msgspec.field(default_factory=list)
    saved: dict[str, bytes] = msgspec.field(default_factory=dict)
    contents: dict[Blob, bytes] = msgspec.field(default_factory=dict)
    blob_uses: list[tuple[bytes, bytes]] = msgspec.field(default_factory=list)  # (run, digest)

    def put_blob(self, run: bytes, content: bytes) -> Blob:
        blob = blob_of(content)
        self.contents[blob] = content
        self.blob_uses.append((run, blob.digest))
        return blob


class Committer:
    def __init__(
        self, connection: apsw.Connection, wal: Path, blobs: BlobFolder, retention: Retention, sync: Sync
    ) -> None:
        self._connection = connection
        self._tables = Tables(connection)
        self._wal = wal
        self._blobs = blobs
        self._retention = retention
        self._sync = sync
        self._journal = self._load()
        self._with_blobs = {run for run in self._tables.runs_with_blobs() if self._journal.is_open(run)}  # open runs
        self._runs, self._run_bytes = self._tables.extent_of_runs()
        self._wal_bytes = wal.stat().st_size  # what a crash has left; mostly zeros, but a checkpoint after it is due
        self._loose: list[bytes] = []  # digests that may not be needed any more

    def _load(self) -> Journal:
        journal = Journal()
        closed = self._tables.lingering_runs()
        for number, size_bytes, uses in self._tables.frames():
            journal.load(number, size_bytes, uses, closed)
        return journal

    def open_runs(self) -> frozenset[bytes]:
        return self._journal.open_runs

    def commit(self, items: Sequence[Item]) -> None:
        """The items are on disk when it returns."""
        batch = self._gather(items)
        frames = batch.facts.frames()
        if batch.contents:
            self._blobs.write(batch.contents, self._tables.is_blob_used)
        if len(frames) == 1 and not (batch.ended or batch.saved or batch.blob_uses):
            self._tables.put_frame(self._journal.add(frames[0]), frames[0])
        elif frames or batch.ended or batch.saved:
            with self._tables.transaction():
                self._put(batch, frames)
        written_bytes = sum(len(frame.facts) for frame in frames) + sum(size for _, (_, _, size) in batch.ended)
        self._wal_bytes += written_bytes + COMMIT_OVERHEAD_BYTES

    def _put(self, batch: Batch, frames: list[Frame]) -> None:
        for frame in frames:
            self._tables.put_frame(self._journal.add(frame), frame)
        self._end_runs(batch)
        if batch.blob_uses:
            self._tables.put_blob_uses(batch.blob_uses)
            self._with_blobs.update(run for run, _ in batch.blob_uses if self._journal.is_open(run))
        self._drop_oldest()
        for name, value in batch.saved.items():
            self._tables.save(name, value)

    def _gather(self, items: Sequence[Item]) -> Batch:
        """Leaves out the facts of runs that are not open, and of those that end in this very batch."""
        batch, journal = Batch(), self._journal
        ending = {item.summary.run for item in items if isinstance(item, EndedRun)}
        for item in items:
            if isinstance(item, EndedRun):
                batch.ended.append((item, encode_ended(item, batch.put_blob)))
            elif isinstance(item, Saved):
                batch.saved[item.name] = item.value
            else:
                for fact in item:
                    run = run_of(fact)
                    if run in ending:
                        continue
                    if type(fact) is Submitted:
                        journal.begin(run)
                    if run == EVERY_RUN or journal.is_open(run):
                        batch.facts.put(run, encode_fact(fact, batch.put_blob))
        return batch

    def _end_runs(self, batch: Batch) -> None:
        """Writes the rows and lets go of the facts."""
        touched: set[int] = set()
        closed: set[bytes] = set()
        for ended, (summary, rest, size_bytes) in batch.ended:
            run = ended.summary.run
            if self._tables.put_run(ended, summary, rest, size_bytes):
                touched |= self._journal.close(run)
                closed.add(run)
                if run in self._with_blobs:
                    self._with_blobs.discard(run)
                    self._loose += self._tables.drop_blob_uses(run)
                self._runs += 1
                self._run_bytes += size_bytes
        if touched:
            numbers, gone = self._journal.sweep(touched)
            self._tables.delete_frames(numbers)
            self._tables.delete_lingering_runs(run for run in gone if run not in closed)
            self._tables.put_lingering_runs(run for run in closed if self._journal.lingers(run))

    def _drop_oldest(self) -> None:
        kept = self._retention
        while self._runs > 1 and (self._runs > kept.runs or self._run_bytes > kept.size_bytes):
            run, size_bytes = self._tables.drop_oldest_run()
            self._loose += self._tables.drop_blob_uses(run)
            self._runs -= 1
            self._run_bytes -= size_bytes

    def tidy(self) -> None:
        """To be called after each commit, when its success has been told: removes files, moves the log into the database."""
        for digest in self._loose:
            if not self._tables.is_blob_used(digest):
                self._blobs.remove(digest)
        self._loose = []
        if self._wal_bytes > CHECKPOINT_BYTES:
            pages, moved = self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            self._wal_bytes = max(0, pages - moved) * PAGE_BYTES

    def compact(self) -> bool:
        """Rewrites a stretch of the journal without its waste, if that is worth it; False if it is not."""
        if not self._journal.can_compact():
            return False
        numbers = self._journal.stretch(COMPACT_BYTES)
        live = Cutter()
        for number in numbers:
            for run, fact in split_frame(*self._tables.frame(number)):
                if run == EVERY_RUN or self._journal.is_open(run):
                    live.put(run, fact)
        frames = live.frames()
        assert len(frames) <= len(numbers), "a rewrite made the journal longer"
        with self._tables.transaction():
            self._tables.delete_frames(numbers)
            for number, frame in zip(numbers, frames, strict=False):
                self._tables.put_frame(number, frame)
            self._tables.delete_lingering_runs(self._journal.replace(numbers, frames))
        self._wal_bytes += sum(len(frame.facts) for frame in frames) + COMMIT_OVERHEAD_BYTES
        return True

    def sweep(self) -> Iterator[None]:
        """Once after a start, in small steps: removes what a crash has left that nothing needs."""
        dead, gone = self._journal.sweep(self._journal.numbers())
        if dead:
            with self._tables.transaction():
                self._tables.delete_frames(dead)
                self._tables.delete_lingering_runs(gone)
        yield
        yield from self._blobs.sweep(self._tables.is_blob_used)

    def grow_log(self) -> None:
        """Writes zeros beyond the end of the log, which SQLite reads as no content. A full disk is left for a commit to meet."""
        fd = os.open(self._wal, os.O_RDWR)
        try:
            size_bytes = os.fstat(fd).st_size
            try:
                while size_bytes < WAL_BYTES:
                    size_bytes += os.pwrite(fd, bytes(min(1 << 20, WAL_BYTES - size_bytes)), size_bytes)
            except OSError as error:
                log.warning("the write-ahead log cannot be made larger beforehand: %s", error.strerror)
            self._sync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Moves the log into the database, so that nothing but the database and the files in use is left."""
        self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
        self._connection.close()
        self._blobs.remove_empty()

    def abandon(self) -> None:
        """Lets go of the files as they are: a checkpoint now could trust pages whose sync has failed."""
        self._connection.close(True)
