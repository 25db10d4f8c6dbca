"""The store's one writer: a thread that turns what was handed in into commits, many facts to a commit.

Owns the `Committer` from `start` to `close`. `put` and `put_row` are called by one other thread, the owner of the run state, and never
wait. What `put` takes is committed in its order, and whole by the time its ticket is; a row has no ticket, comes after everything that
was handed in before it, and never along with what somebody waits for. After the first failure nothing more is written and nothing is
tried again: a failed fsync may have lost what it was to save, and a second one would say that it had not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from math import inf

from hexrt.runtime.store_commit import Committer, Item
from hexrt.runtime.store_records import EndedRun

QUIET_S = 0.5
"""Chores wait until nothing was handed in for so long."""
ROWS_A_COMMIT = 32
"""What somebody waits for waits no longer than that many rows take."""


class Wait(Enum):
    """What facts may wait for, so as to share a commit with others."""

    NOT = "not"
    HELD = "held"  # somebody waits, but will soon wait for a later fact: until that or `hasten`
    LAG = "lag"  # nobody waits: the store's lag


class Bell:
    """Wakes one thread from one other; ringing for a thread that is about to listen anyway costs a look at a flag."""

    __slots__ = ("_lock", "_rung")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._rung = False  # set by the ringing thread before it releases, cleared by the woken one after it acquires

    def ring(self) -> None:
        if not self._rung:
            self._rung = True
            self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        """False if nobody rang; a ring from before counts. -1: without end."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        self._rung = False
        return True


class Writer:
    def __init__(
        self,
        committer: Committer,
        lag_s: float,
        on_commit: Callable[[int], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """The callbacks run on the writer's thread."""
        self._committer = committer
        self._lag_s = lag_s
        self._on_commit = on_commit
        self._on_failure = on_failure
        self._inbox: deque[tuple[int, int, Item]] = deque()  # (ticket, bytes, item)
        self._due = inf  # when the commit of the inbox is to begin: lowered by the putting thread, raised by the writer
        self._is_awaited = False  # somebody waits for something in the inbox
        self._rows: deque[tuple[float, int, EndedRun]] = deque()  # (due, bytes, row)
        self.rows: dict[bytes, EndedRun] = {}  # the same by run, until they are on disk; the writer takes out
        self._bell = Bell()
        self._is_closing = False
        self._is_quiet = False  # nothing came for QUIET_S: chores may go on
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._taken_bytes = 0  # the putting thread's
        self._settled_bytes = 0  # the writer's
        self.ticket = 0  # the newest given out; the putting thread's
        self.committed = 0  # the writer's
        self.commits = 0  # the writer's
        self.failure: BaseException | None = None

    @property
    def pending_bytes(self) -> int:
        return self._taken_bytes - self._settled_bytes

    def start(self) -> None:
        self._thread.start()

    def put(self, item: Item, size_bytes: int, wait: Wait) -> int:
        """The ticket under which the item will be committed. After a failure the item is dropped, and so never is."""
        self.ticket += 1
        if self.failure is None:
            self._taken_bytes += size_bytes
            self._inbox.append((self.ticket, size_bytes, item))
            if wait is not Wait.LAG:
                self._is_awaited = True
            if wait is not Wait.HELD:
                self._lower(time.monotonic() + self._lag_s if wait is Wait.LAG else 0.0)
        return self.ticket

    def _lower(self, due: float) -> None:
        if due < self._due:
            self._due = due
            self._bell.ring()

    def put_row(self, row: EndedRun, size_bytes: int) -> None:
        """The row is written some time after the lag."""
        if self.failure is None:
            self._taken_bytes += size_bytes
            self.rows[row.summary.run] = row
            self._rows.append((time.monotonic() + self._lag_s, size_bytes, row))
            if len(self._rows) == 1:
                self._bell.ring()

    def hasten(self, ticket: int) -> None:
        """What was `put` up to this ticket waits no longer."""
        if ticket > self.committed:
            self._lower(0.0)

    def close(self) -> None:
        """Writes what was handed in, and ends the thread. After a failure it only waits for that end."""
        self._is_closing = True
        self._bell.ring()
        self._thread.join()

    def _run(self) -> None:
        try:
            sweep = self._committer.sweep()
            chores = self._chores(sweep)
            while not self._is_closing:
                self._turn(chores)
            while self._inbox or self._rows:
                self._commit()
            for _ in sweep:
                pass
            self._committer.close()
        except (
            BaseException
        ) as error:  # the border of this thread: whatever it is, nobody may wait for the writer any more
            self.failure = error
            self._inbox.clear()
            self._rows.clear()
            self._committer.abandon()
            self._on_failure(error)

    def _chores(self, sweep: Iterator[None]) -> Iterator[None]:
        self._committer.grow_log()
        yield
        yield from sweep

    def _turn(self, chores: Iterator[None]) -> None:
        if self._inbox or self._rows:
            self._is_quiet = False
            self._wait_due()
            self._commit()
            return
        self._due = inf  # a `put` that fell into the last commit may have lowered it, and the next one must ring
        if self._inbox:  # came just before that, so that its own lowering may be lost
            self._due = 0.0
        elif self._bell.wait(0 if self._is_quiet else QUIET_S):
            self._is_quiet = False
        elif self._is_quiet and next(chores, self) is self:
            self._bell.wait(-1)
        else:
            self._is_quiet = True

    def _wait_due(self) -> None:
        """Lets what may wait gather company."""
        while not self._is_closing:
            due = min(self._due, self._rows[0][0]) if self._rows else self._due
            left_s = due - time.monotonic()
            if left_s <= 0:
                return
            self._bell.wait(left_s if due < inf else -1)

    def _commit(self) -> None:
        """Commits the whole inbox, or rows that are due, or both where nobody waits."""
        is_awaited, self._is_awaited = self._is_awaited, False
        self._due = inf  # before the inbox is emptied: what comes after that lowers it again
        # rows are taken first: none may overtake the facts of its run
        rows = [] if is_awaited and self._inbox else self._due_rows()
        entries = [self._inbox.popleft() for _ in range(len(self._inbox))]
        if not entries and not rows:
            return
        self._committer.commit([item for _, _, item in entries] + [row for _, _, row in rows])
        self.commits += 1
        self._settled_bytes += sum(entry[1] for entry in entries) + sum(row[1] for row in rows)
        for _, _, row in rows:
            self.rows.pop(row.summary.run, None)
        if entries:
            self.committed = entries[-1][0]
            self._on_commit(self.committed)
        self._committer.tidy()
        while self._committer.compact() and not self._inbox:
            self._committer.tidy()

    def _due_rows(self) -> list[tuple[float, int, EndedRun]]:
        """Once the oldest has waited for the lag, it and those that have come since."""
        if not self._rows or (self._rows[0][0] > time.monotonic() and not self._is_closing):
            return []
        return [self._rows.popleft() for _ in range(min(len(self._rows), ROWS_A_COMMIT))]
