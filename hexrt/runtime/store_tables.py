"""The statements that the store's writer puts to its tables.

Owns the SQL of writing, on a connection that it is given. Each method is one statement or a few; what belongs together is put into
`transaction` by the caller. Raises apsw.Error; after one, the connection is only good for closing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import apsw

from hexrt.runtime.store_records import EndedRun, Frame, decode_uses, encode_uses


class Tables:
    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits at its end. There is no rollback: whatever fails inside ends the store."""
        self._connection.execute("BEGIN IMMEDIATE")
        yield
        self._connection.execute("COMMIT")

    def frames(self) -> Iterator[tuple[int, int, dict[bytes, int]]]:
        """(number, bytes, bytes by run) of each frame, in order."""
        for number, size, uses in self._connection.execute(
            "SELECT number, length(facts), uses FROM frames ORDER BY number"
        ):
            yield number, size, decode_uses(uses)

    def frame(self, number: int) -> tuple[bytes, int]:
        """The facts and their checksum."""
        facts, crc = self._connection.execute("SELECT facts, crc FROM frames WHERE number = ?", (number,)).get
        return facts, crc

    def put_frame(self, number: int, frame: Frame) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO frames (number, crc, uses, facts) VALUES (?, ?, ?, ?)",
            (number, frame.crc, encode_uses(frame.uses), frame.facts),
        )

    def delete_frames(self, numbers: Iterable[int]) -> None:
        self._connection.executemany("DELETE FROM frames WHERE number = ?", ((number,) for number in numbers))

    def lingering_runs(self) -> frozenset[bytes]:
        return frozenset(run for (run,) in self._connection.execute("SELECT run FROM lingering_runs"))

    def put_lingering_runs(self, runs: Iterable[bytes]) -> None:
        self._connection.executemany("INSERT INTO lingering_runs (run) VALUES (?)", ((run,) for run in runs))

    def delete_lingering_runs(self, runs: Iterable[bytes]) -> None:
        self._connection.executemany("DELETE FROM lingering_runs WHERE run = ?", ((run,) for run in runs))

    def put_run(self, ended: EndedRun, summary: bytes, rest: bytes, size_bytes: int) -> bool:
        """False, and nothing is changed, for a run that has its row already."""
        head = ended.summary
        self._connection.execute(
            "INSERT INTO runs (run, uid, state, submitted_wall_ns, size_bytes, summary, rest) VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (run) DO NOTHING",
            (head.run, head.uid, head.state.value, head.submitted_wall_ns, size_bytes, summary, rest),
        )
        return self._connection.changes() > 0

    def extent_of_runs(self) -> tuple[int, int]:
        """How many runs have a row, and their bytes."""
        count, size_bytes = self._connection.execute("SELECT count(*), coalesce(sum(size_bytes), 0) FROM runs").get
        return count, size_bytes

    def drop_oldest_run(self) -> tuple[bytes, int]:
        """The run whose row is gone now, and its bytes."""
        run, size_bytes = self._connection.execute(
            "DELETE FROM runs WHERE ordinal = (SELECT min(ordinal) FROM runs) RETURNING run, size_bytes"
        ).get
        return run, size_bytes

    def is_blob_used(self, digest: bytes) -> bool:
        return self._connection.execute("SELECT 1 FROM blob_uses WHERE digest = ? LIMIT 1", (digest,)).get is not None

    def put_blob_uses(self, uses: Iterable[tuple[bytes, bytes]]) -> None:
        """`uses` are (run, digest)."""
        self._connection.executemany("INSERT OR IGNORE INTO blob_uses (run, digest) VALUES (?, ?)", uses)

    def runs_with_blobs(self) -> Iterator[bytes]:
        for (run,) in self._connection.execute("SELECT DISTINCT run FROM blob_uses"):
            yield run

    def drop_blob_uses(self, run: bytes) -> list[bytes]:
        """The digests that the run needed."""
        found = self._connection.execute("DELETE FROM blob_uses WHERE run = ? RETURNING digest", (run,))
        return [digest for (digest,) in found]

    def save(self, name: str, value: bytes) -> None:
        self._connection.execute("INSERT OR REPLACE INTO kept (name, value) VALUES (?, ?)", (name, value))
