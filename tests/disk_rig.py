"""An engine over a real page file and real shared memory, with calls that can be made to fail or to wait."""

from __future__ import annotations

import errno
import os
import queue
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from hexrt.devices.places import Places
from hexrt.memory.arena import SYSTEM, Calls, create_host_arena, open_page_file, read_only
from hexrt.memory.disk import PageDisk
from hexrt.protocol.host import FIRST_SEGMENT, HOST, NVME, Copied, Copy, Map, Piece

KIB, MIB = 1 << 10, 1 << 20
SIZE = 12 * MIB
PAGE = 64 * KIB
SEGMENT, FIXED = FIRST_SEGMENT, FIRST_SEGMENT + 1  # FIXED is mapped for reading alone


@cache
def noise(seed: int) -> bytes:
    return random.Random(seed).randbytes(SIZE)


class Rig:
    """An engine over a real file and real shared memory. Calls go through `calls` of the moment, so that a test can break them."""

    def __init__(self, folder: Path, direct: bool, depth: int = 4) -> None:
        self.calls = SYSTEM
        opened = SYSTEM if direct else replace(SYSTEM, pwritev=_refuse)
        self.fd, facts = open_page_file(str(folder), SIZE, opened)
        assert facts.direct is direct, facts
        self.places = Places()
        arena, _ = create_host_arena(SIZE)
        self.places.map(Map(HOST, SIZE, writable=True), arena)
        segment, _ = create_host_arena(SIZE)
        self.places.map(Map(FIXED, SIZE), read_only(segment))
        self.places.map(Map(SEGMENT, SIZE, writable=True), segment)
        self.host, self.segment = self.places.view(HOST), self.places.view(SEGMENT)
        self.shown: list[int] = []
        through = Calls(
            preadv=lambda *given: self.calls.preadv(*given), pwritev=lambda *given: self.calls.pwritev(*given)
        )
        self.disk = PageDisk(self.fd, SIZE, self.places, through, depth, self.shown.append)
        self.reports: queue.SimpleQueue[Copied] = queue.SimpleQueue()
        self.commands = 0

    def begin(self, *pieces: Piece) -> int:
        self.commands += 1
        self.disk.submit(Copy(self.commands, pieces), self.reports.put)
        return self.commands

    def copy(self, *pieces: Piece) -> Copied:
        command = self.begin(*pieces)
        report = self.reports.get(timeout=30)
        assert report.command == command and 0 < report.start_ns <= report.end_ns
        return report

    def fill(self, seed: int = 0) -> bytes:
        data = noise(seed)
        self.host[:] = data
        return data

    def close(self) -> None:
        self.disk.stop(wait=True)
        os.close(self.fd)


def _refuse(*_: object) -> int:
    raise OSError(errno.EINVAL, "not direct")


def store(page_bytes: int, pages: int, host: int = 0, file: int = 0) -> Piece:
    return Piece(HOST, host, NVME, file, page_bytes, pages)


def load(page_bytes: int, sums: tuple[int, ...], host: int = 0, file: int = 0) -> Piece:
    return Piece(NVME, file, HOST, host, page_bytes, len(sums), sums)


class Broken:
    """Calls of which some fail. `bad(number of the call, offset, bytes)` says what: an errno, a count of bytes that is moved, None."""

    def __init__(self, bad: Callable[[int, int, int], int | str | None]) -> None:
        self.count = 0
        self._bad = bad
        self._lock = threading.Lock()

    def calls(self) -> Calls:
        return Calls(preadv=self._around(os.preadv), pwritev=self._around(os.pwritev))

    def _around(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(fd: int, views: Sequence[memoryview], offset: int) -> int:
            with self._lock:
                self.count += 1
                number = self.count
            found = self._bad(number, offset, sum(map(len, views)))
            if isinstance(found, str):
                raise OSError(getattr(errno, found), "injected")
            if found is None:
                return real(fd, views, offset)
            whole = b"".join(views)[:found]
            plain = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # the same file without O_DIRECT
            try:
                if real is os.pwritev:
                    return os.pwrite(plain, whole, offset)
                got = os.pread(plain, found, offset)
            finally:
                os.close(plain)
            for view in views:
                part, got = got[: len(view)], got[len(view) :]
                view[: len(part)] = part
            return found

        return call


class Gate:
    """Writes that wait for `open`, as on a disk that hangs. `entered` has one entry for each that waits."""

    def __init__(self) -> None:
        self.entered: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.open = threading.Event()

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self.entered.put(offset)
        self.open.wait()
        return os.pwritev(fd, views, offset)
