"""The durable store: facts of runs that go on, and one row for each run that has ended, in `hexrt.db` of the state directory.

Owns the state directory while open (it is locked). Called on one thread, the loop's; commits happen on the writer's. A fact is durable
once its ticket is; a failed commit is told once and nothing is committed after it. Facts of a run are kept from its Submitted to its
`close_run`; those that come before or after are not. Nothing here knows what a fact means.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import apsw
import msgspec

from hexrt.core import RunState
from hexrt.errors import ErrorRecord, Unavailable
from hexrt.events import DURABLE, Event, Finished, Submitted
from hexrt.protocol.messages import RunSummary
from hexrt.runtime.store_blobs import BlobFolder, LostBlob, Sync
from hexrt.runtime.store_commit import Committer, Retention, Saved
from hexrt.runtime.store_database import NAME, WHERE, explain, lock_directory, make_database, open_reader, open_writer
from hexrt.runtime.store_records import (
    Away,
    Damage,
    EndedRow,
    EndedRun,
    decode_frame,
    decode_row,
    decode_summary,
    run_of,
    unpin,
    whole,
)
from hexrt.runtime.store_writer import Wait, Writer

FACT_BYTES = 200
"""What a fact is taken to need in memory, beside its output."""
KINDS = frozenset(DURABLE)


log = logging.getLogger("hexrt.store")


def _size_of(ended: EndedRun) -> int:
    """What the row is taken to need in memory."""
    size_bytes = FACT_BYTES * (1 + len(ended.steps) + len(ended.timeline.attempts))
    return size_bytes + sum(len(raw) for raw in ended.outputs.values())


class Store:
    def __init__(
        self,
        directory: Path,
        on_commit: Callable[[int], None],
        on_failure: Callable[[BaseException], None],
        call: Callable[..., object],
        lag_s: float = 0.05,
        max_pending_bytes: int = 64 << 20,
        *,
        kept_runs: int = 100_000,
        kept_bytes: int = 4 << 30,
        vfs: str = "",
        sync: Sync = os.fsync,
    ) -> None:
        """`call` hands a callback to the loop's thread (loop.call_soon_threadsafe); `vfs` and `sync` are for injected faults.

        At most `kept_runs` ended runs of `kept_bytes` are kept, the newest. Raises BadRequest where the directory is another daemon's or
        the database is not ours, Unavailable where it is damaged or the disk does not serve; nothing is changed then.
        """
        self._max_pending_bytes = max_pending_bytes
        self._call = call
        self._commit_callback = on_commit
        self._failure_callback = on_failure
        self._blobs = BlobFolder(directory / "blobs", sync)
        self.damaged: list[Damage] = []
        self._lock = lock_directory(directory)
        connection: apsw.Connection | None = None
        try:
            make_database(directory, vfs, sync)
            connection = open_writer(directory, vfs)
            wal = directory / f"{NAME}-wal"
            committer = Committer(connection, wal, self._blobs, Retention(kept_runs, kept_bytes), sync)
            self._reader = open_reader(directory, vfs)
        except BaseException as error:
            if connection is not None:
                connection.close(True)
            os.close(self._lock)
            if isinstance(error, apsw.Error):
                raise explain(error) from error
            if isinstance(error, OSError):
                raise Unavailable(f"{NAME} cannot be opened: {error.strerror}", WHERE) from error
            raise
        self._open_runs = committer.open_runs()
        self._writer = Writer(committer, lag_s, self._tell_commit, self._tell_failure)
        self._writer.start()

    # --- writing --------------------------------------------------------------------------------------------------

    def append(self, events: Sequence[Event], wait: Wait = Wait.NOT, extra_bytes: int = 0) -> int:
        """The ticket of these facts; never waits. `wait` says what for they may wait, to share a commit with others.

        `extra_bytes` is what a submitted workflow has in literals, for `pending_bytes`. Raises TypeError for a kind of fact that is not
        in `events.DURABLE`.
        """
        size_bytes = FACT_BYTES * len(events) + extra_bytes
        for event in events:
            kind = type(event)
            if kind is Finished:
                size_bytes += len(event.output)  # type: ignore[union-attr]  # `kind` says so
            elif kind not in KINDS:
                raise TypeError(f"a {kind.__name__} is not kept by the store")
        return self._writer.put(tuple(events), size_bytes, wait)

    def hasten(self, ticket: int) -> None:
        """What was handed in up to this ticket waits for nothing more."""
        self._writer.hasten(ticket)

    def close_run(self, ended: EndedRun) -> int:
        """Puts the run's row in the place of its facts. A second row for the same run is not taken."""
        return self._writer.put(ended, _size_of(ended), Wait.NOT)

    def close_run_later(self, ended: EndedRun) -> None:
        """As `close_run`, some time after the lag, in the way of nobody: what waits for other facts does not wait for this row."""
        self._writer.put_row(ended, _size_of(ended))

    def save(self, name: str, value: bytes, wait: Wait = Wait.LAG) -> int:
        """Keeps a small value by name, in the place of the one before."""
        return self._writer.put(Saved(name, value), FACT_BYTES + len(value), wait)

    @property
    def committed(self) -> int:
        """The newest durable ticket; those before it are durable too."""
        return self._writer.committed

    @property
    def commits(self) -> int:
        return self._writer.commits

    @property
    def pending_bytes(self) -> int:
        """What was handed in and is not durable, roughly."""
        return self._writer.pending_bytes

    def is_behind(self) -> bool:
        """True where no more should be handed in until something is committed."""
        return self._writer.pending_bytes > self._max_pending_bytes

    @property
    def failure(self) -> BaseException | None:
        return self._writer.failure

    def _tell_commit(self, ticket: int) -> None:
        self._tell(self._commit_callback, ticket)

    def _tell_failure(self, error: BaseException) -> None:
        log.error("the store has failed and commits nothing more: %s", error)
        self._tell(self._failure_callback, error)

    def _tell(self, callback: Callable[..., None], what: object) -> None:
        try:
            self._call(callback, what)
        except RuntimeError:
            log.debug("the loop is closed: nobody is left to be told of %r", what)

    # --- reading --------------------------------------------------------------------------------------------------

    def replay(self) -> Iterator[Event]:
        """The facts of the runs that were open at the start, in order; to be read to the end before anything is handed in.

        A fact whose file is lost is left out and named in `damaged`; with a Submitted its whole run is left out, until it is closed.
        Raises Unavailable where a frame is damaged.
        """
        left_out: set[bytes] = set()
        for number, crc, facts in self._reader.execute("SELECT number, crc, facts FROM frames ORDER BY number"):
            try:
                stored = decode_frame(facts, crc)
            except ValueError as error:
                raise Unavailable(f"frame {number} of {NAME} is damaged ({error}): restore a copy", WHERE) from error
            for fact in stored:
                run = run_of(fact)
                if (run and run not in self._open_runs) or run in left_out:
                    continue
                event = self._whole(fact) if isinstance(fact, Away) else unpin(fact)
                if event is not None:
                    yield event
                elif isinstance(fact, Away) and isinstance(fact.fact, Submitted):
                    left_out.add(run)

    def _whole(self, away: Away) -> Event | None:
        try:
            return whole(away, self._blobs.read(away.blob))
        except LostBlob as error:
            fact = away.fact
            step, part = (fact.step, fact.part) if isinstance(fact, Finished) else (-1, 0)
            uid = fact.uid if isinstance(fact, Submitted) else -1
            self.damaged.append(Damage(fact.run, step, part, str(error), uid))
            what = f"the output of step {step}, part {part}" if step >= 0 else "the submitted workflow"
            log.error("run %s: %s is lost: %s", fact.run.hex(), what, error)
            return None

    def find_run(self, run: bytes, with_outputs: bool = True) -> EndedRun | None:
        """A run that was closed, once that is durable or if it was closed later; the caller looks at whose it is. None where there is none.

        `with_outputs` reads the files of large outputs; a lost one is in `errors` under the output's name.
        """
        closing = self._writer.rows.get(run)
        if closing is not None:
            return closing
        found = self._reader.execute("SELECT summary, rest FROM runs WHERE run = ?", (run,)).get
        if found is None:
            return None
        row = decode_row(found[1])
        outputs, errors = dict(row.outputs), dict(row.errors)
        if with_outputs:
            self._fetch(run, row, outputs, errors)
        return EndedRun(decode_summary(found[0]), outputs, errors, row.steps, row.timeline)

    def _fetch(
        self, run: bytes, row: EndedRow, outputs: dict[str, msgspec.Raw], errors: dict[str, ErrorRecord]
    ) -> None:
        for name, blob in row.away.items():
            try:
                outputs[name] = msgspec.Raw(self._blobs.read(blob))
            except LostBlob as error:
                log.error("run %s: output %s is lost: %s", run.hex(), name, error)
                errors[name] = Unavailable("the stored output is lost: submit the workflow again", name).record()

    def list_runs(self, uid: int | None, state: RunState | None, limit: int) -> list[RunSummary]:
        """Closed runs, the newest submitted first; None stands for any."""
        where: list[str] = ["1"]
        values: list[int | str] = []
        if uid is not None:
            where.append("uid = ?")
            values.append(uid)
        if state is not None:
            where.append("state = ?")
            values.append(state.value)
        query = f"SELECT summary FROM runs WHERE {' AND '.join(where)} ORDER BY submitted_wall_ns DESC LIMIT ?"
        closing = {
            run: row.summary
            for run, row in self._writer.rows.copy().items()
            if uid in (None, row.summary.uid) and state in (None, row.summary.state)
        }
        stored = [decode_summary(raw) for (raw,) in self._reader.execute(query, (*values, limit))]
        listed = [*closing.values(), *(summary for summary in stored if summary.run not in closing)]
        return sorted(listed, key=lambda summary: summary.submitted_wall_ns, reverse=True)[:limit]

    def load(self, name: str) -> bytes | None:
        """The value saved last, once that is durable."""
        value: bytes | None = self._reader.execute("SELECT value FROM kept WHERE name = ?", (name,)).get
        return value

    def close(self) -> None:
        """Writes what was handed in, and leaves nothing but the database and the files in use. After a failure, leaves all as it is."""
        self._reader.close(True)
        self._writer.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
