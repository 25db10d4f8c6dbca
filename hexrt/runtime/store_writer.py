"""The store's one writer: a thread that turns what was handed in into commits, many facts to a commit.

Owns the `Committer` from `start` to `close`. `put` is called by one other thread, the owner of the run state, and never waits. After the
first failure nothing more is written and nothing is tried again: a failed fsync may have lost what it was to save, and a
second one would say that it had not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from hexrt.runtime.store_commit import Committer, Item

QUIET_S = 0.5
"""Chores wait until nothing was handed in for so long."""


class Bell:
    """Wakes one thread from one other; ringing for a thread that is about to listen anyway costs a look at a flag."""

    __slots__ = ("_lock", "_rung", "is_awaited")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._rung = False  # set by the ringing thread before it releases, cleared by the woken one after it acquires
        self.is_awaited = False

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
        self._bell = Bell()
        self._is_urgent = False
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

    def put(self, item: Item, size_bytes: int, urgent: bool) -> int:
        """The ticket under which the item will be committed. After a failure the item is dropped, and so never is."""
        self.ticket += 1
        if self.failure is None:
            self._taken_bytes += size_bytes
            self._inbox.append((self.ticket, size_bytes, item))
            if urgent:
                self._is_urgent = True
            if urgent or self._bell.is_awaited:
                self._bell.ring()
        return self.ticket

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
            self._drain()
            for _ in sweep:
                pass
            self._committer.close()
        except (
            BaseException
        ) as error:  # the border of this thread: whatever it is, nobody may wait for the writer any more
            self.failure = error
            self._inbox.clear()
            self._committer.abandon()
            self._on_failure(error)

    def _chores(self, sweep: Iterator[None]) -> Iterator[None]:
        self._committer.grow_log()
        yield
        yield from sweep

    def _turn(self, chores: Iterator[None]) -> None:
        if self._listen(0 if self._is_quiet else QUIET_S):
            self._is_quiet = False
        elif self._is_quiet and next(chores, self) is self:
            self._listen(-1)
        else:
            self._is_quiet = True
        if self._inbox:
            self._wait_lag()
            self._drain()

    def _listen(self, timeout_s: float) -> bool:
        """Waits until something is in the inbox or `close` was called; False if neither was so in that time."""
        self._bell.is_awaited = True
        is_heard = bool(self._inbox) or self._bell.wait(timeout_s)
        self._bell.is_awaited = False
        return is_heard

    def _wait_lag(self) -> None:
        """Lets what is not urgent gather company."""
        end = time.monotonic() + self._lag_s
        while not self._is_urgent and not self._is_closing and (left_s := end - time.monotonic()) > 0:
            self._bell.wait(left_s)

    def _drain(self) -> None:
        while self._inbox:
            self._is_urgent = False
            entries = [self._inbox.popleft() for _ in range(len(self._inbox))]
            self._committer.commit(item for _, _, item in entries)
            self.commits += 1
            self.committed = entries[-1][0]
            self._settled_bytes += sum(size_bytes for _, size_bytes, _ in entries)
            self._on_commit(self.committed)
            self._committer.tidy()
            while self._committer.compact() and not self._inbox:
                self._committer.tidy()
