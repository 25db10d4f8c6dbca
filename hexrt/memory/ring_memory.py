"""The memory of a ring: its memfd, where its words are, and what both of its ends do with them.

    header            3 lines of 64 bytes: what never changes | the writer's words | the reader's words
    a line a slot     serial and state | offset | bytes | which slot had the commit, and which the release, of this line's number
    data              from a page boundary to the end; slots start at multiples of 64

    Commits and releases are counted, modulo the number of slots, to find their lines.

        FREE --writer: commit--> FILLED --reader: take, accept--> PROCESSING --reader: release--> FREE

A slot that is being filled is FREE in the table, since only the writer allocates. So each state has one owner, and a change is one
aligned store of 8 bytes behind a fence: no locks between processes, nothing to repair. For `hexrt.memory.ring` only.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from array import array

from hexrt.errors import BadRequest, InvariantViolation

ALIGNMENT = 64
MAX_SLOTS = 1 << 16
MAGIC = int.from_bytes(b"hexring1", "little")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

REORDERS = os.uname().machine != "x86_64"
"""Whether a store may be seen before an earlier one, or a load be done before; x86-64 only lets a load pass an earlier store."""

FREE, FILLED, PROCESSING = range(3)
STATE, SERIAL_SHIFT = (
    0xFF,
    8,
)  # of a slot's first word; the serial of its last commit, counted from 1, is above its state

# Words of the header.
KIND, SLOTS, MOST = 0, 1, 2
COMMITTED, WRITER_WAITS = 8, 9  # the newest serial; the writer wants to be woken by a release
RELEASED, READER_WAITS = 16, 17  # how many slots were given back; the reader wants to be woken by a commit
FIRST = 24  # the first slot's line
LINE = 8
OFFSET, BYTES, ORDER, FREED = 1, 2, 3, 4  # in a slot's line


def data_start(slots: int) -> int:
    """Where the data of a ring of `slots` slots begin, in bytes from the start of the memfd."""
    return -(-(FIRST + slots * LINE) * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


class Ring:
    """The memfd of a ring, sealed in its size. Owns `fd`; ends that were made from it live on when it is closed."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.bytes = size  # of the whole memfd, as a Map names it

    @classmethod
    def create(cls, size: int, slots: int, most: int = 0) -> Ring:
        """A ring of at least `size` bytes of data and `slots` slots, of which at most `most` (0: all) are taken at a time.

        Its mode is 0400: who is handed `reopen_read_only()` cannot open it again for writing, unless he is root or means to (the mode is
        its owner's to change).
        """
        if size < 1 or not 1 <= slots <= MAX_SLOTS or not 0 <= most <= slots:
            raise InvariantViolation(f"a ring of {size} bytes, {slots} slots, at most {most}")
        whole = data_start(slots) + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("hexrt-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, whole)
            os.fchmod(fd, 0o400)
            header = array("Q", [MAGIC, slots, most or slots, *[0] * (FIRST - 3)])
            header[READER_WAITS] = 1
            os.pwrite(fd, header.tobytes(), 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, whole)

    def reopen_read_only(self) -> int:
        """A new descriptor, the caller's to close, through which nothing can be mapped writable."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wake_fd() -> int:
    """An eventfd for an end's `filled_fd` or `freed_fd`, the caller's to close."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def drain(fd: int) -> None:
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        pass  # nobody has written to it


class RingEnd:
    """One end's mapping of the memory. For one thread."""

    def __init__(self, memory: int | mmap.mmap | memoryview) -> None:
        """`memory` is the memfd, which stays the caller's, or a writable mapping of all of it. Raises BadRequest where it is no ring."""
        self._map = _mapped(memory) if isinstance(memory, int) else None
        try:
            self._view = memoryview(self._map or memory).cast("B")  # type: ignore[arg-type]
            self._words = self._view.cast("Q")
            self._slots, self.most = self._words[SLOTS], self._words[MOST]
            self.data_start = data_start(min(self._slots, MAX_SLOTS))
            fits = 1 <= self.most <= self._slots <= MAX_SLOTS and self.data_start < len(self._view)
            if self._words[KIND] != MAGIC or not fits or self._view.readonly:
                raise BadRequest("this memory is no ring, or read-only")
        except (IndexError, TypeError) as error:
            raise BadRequest("this memory is no ring") from error
        self.bytes = len(self._view)
        self._lock = threading.Lock()
        self._lock.acquire()

    def _fence(self) -> None:
        """Every load and store before it is done, for other processes too, before any that comes after it.

        A release followed by an acquire of one word: a full barrier on x86-64 and on AArch64, where it takes a hundredth of a system call.
        """
        self._lock.release()
        self._lock.acquire()

    def _wake(self, fd: int) -> None:
        try:
            os.eventfd_write(fd, 1)
        except BlockingIOError:
            pass  # the counter is at its end, so the other side wakes anyway

    def close(self) -> None:
        """Gives the mapping up; where views of slots are left, it goes with the last of them."""
        self._words.release()
        self._view.release()
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:
                self._map = None


def _mapped(fd: int) -> mmap.mmap:
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK == 0:
            raise BadRequest("a ring's memory must be sealed against shrinking")
        return mmap.mmap(fd, os.fstat(fd).st_size)
    except (OSError, ValueError) as error:
        raise BadRequest("a ring's memory must be a memfd, open for reading and writing") from error
