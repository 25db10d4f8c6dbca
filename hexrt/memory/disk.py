"""Carries out Copies between the page file of the NVME tier, HOST memory and segments, beside whatever else the process does.

Owns the threads: `depth` that read and write, one that moves within memory, so that a disk that hangs holds up no move. A Copy becomes
requests of a few MiB, neighbours in the file in one; copies in flight take turns, request by request. Every page written is hashed
(xxh3_64) and every page read is compared with its hash before it is called good. Wrong pieces are refused before anything begins; what
fails afterwards fails page by page. Does not own the file nor the memory; promises no order between two Copies.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Protocol

from xxhash import xxh3_64_intdigest

from hexrt.errors import BadRequest
from hexrt.memory.arena import ALIGN_BYTES, SYSTEM, Calls, remainder
from hexrt.memory.requests import REQUEST_BYTES, Move, Part, Request, Run, Work, cut
from hexrt.protocol.host import NVME, Copied, Copy, CopyFault, Piece

DEPTH = 4  # measured: from here on the disk is busy while one thread hashes
"""Threads that call preadv and pwritev. io_uring would save calls of which a GiB takes 256; the binding there is (liburing 2026.3.30) holds
the GIL while it waits, and stops the process on a processor without AVX-512, which no probe at start survives."""


class Memory(Protocol):
    """How places are found; hexrt.devices.places.Places."""

    def view(self, place: int, offset: int = 0, length: int | None = None) -> memoryview: ...
    def address(self, place: int, offset: int, length: int, write: bool = False) -> int: ...


@dataclass(slots=True, eq=False)
class Transfer:
    """One Copy on its way. Everything below `page_bytes` is changed under the engine's lock, `sums` by whoever has the page."""

    command: int
    ended: Callable[[Copied], None]
    sums: list[int]  # of every page: expected where it is read, found where it is written
    stored: list[range]  # the pages that are written to the file
    page_bytes: list[int]  # by page
    left: int = 0
    start_ns: int = 0
    faults: dict[int, CopyFault] = field(default_factory=dict)


class Lane:
    """Threads that take the requests of several transfers in turn."""

    def __init__(self, name: str, threads: int, lock: threading.Lock, begin: Callable[[Transfer], None], work: Callable[[Transfer, Work], None]) -> None:  # fmt: skip
        self._changed = threading.Condition(lock)  # shared with the engine
        self._queue: deque[tuple[Transfer, deque[Work]]] = deque()
        self._begin = begin
        self._work = work
        self._stopped = False
        self._threads = [threading.Thread(target=self._serve, name=f"{name}-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def put(self, transfer: Transfer, requests: deque[Work]) -> None:
        """With the lock held."""
        self._queue.append((transfer, requests))
        self._changed.notify(len(requests))

    def take_out(self, transfer: Transfer) -> None:
        """With the lock held."""
        self._queue = deque(entry for entry in self._queue if entry[0] is not transfer)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._changed.notify_all()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                transfer, requests = self._queue.popleft()
                request = requests.popleft()
                if requests:
                    self._queue.append((transfer, requests))
                self._begin(transfer)
            self._work(transfer, request)


class PageDisk:
    """`show` is told the oldest command that has begun and not ended, 0 for none, with a lock held; `ended` of `submit` on some thread."""

    def __init__(self, fd: int, size: int, memory: Memory, calls: Calls = SYSTEM, depth: int = DEPTH, show: Callable[[int], None] = lambda command: None) -> None:  # fmt: skip
        self._fd = fd
        self._size = size
        self._memory = memory
        self._calls = calls
        self._show = show
        self._lock = threading.Lock()
        self._open: dict[int, Transfer] = {}
        self._begun: dict[int, None] = {}  # in order of their beginning
        self._disk = Lane("disk", depth, self._lock, self._begin, self._carry_out)
        self._moves = Lane("moves", 1, self._lock, self._begin, self._carry_out)

    # --- any thread -------------------------------------------------------------------------------------------------

    def submit(self, copy: Copy, ended: Callable[[Copied], None]) -> None:
        """Begins as soon as can be. Raises BadRequest and what `Memory` raises, and does nothing then."""
        transfer = Transfer(copy.command, ended, [], [], [])
        runs: list[tuple[bool, int, Run]] = []
        moves: deque[Work] = deque()
        for piece in copy.pieces:
            self._lay_out(piece, transfer, runs, moves)
        requests = cut(runs)
        transfer.left = len(requests) + len(moves)
        with self._lock:
            self._open[copy.command] = transfer
            if requests:
                self._disk.put(transfer, requests)
            if moves:
                self._moves.put(transfer, moves)
            if not transfer.left:
                transfer.left = 1
                self._begin(transfer)
        if not requests and not moves:
            self._end(transfer)

    def take_out(self, command: int) -> bool:
        """Forgets a Copy that has not begun; False where it has, or never came."""
        with self._lock:
            if command in self._begun or (transfer := self._open.pop(command, None)) is None:
                return False
            self._disk.take_out(transfer)
            self._moves.take_out(transfer)
            return True

    def stop(self, wait: bool = False) -> None:
        """What is under way ends, the rest is dropped unreported. With `wait`, returns when no thread touches the memory any more."""
        for lane in (self._disk, self._moves):
            lane.stop()
        if wait:
            self._disk.join()
            self._moves.join()

    # --- from pieces to requests ------------------------------------------------------------------------------------

    def _lay_out(self, piece: Piece, transfer: Transfer, runs: list[tuple[bool, int, Run]], moves: deque[Work]) -> None:
        total = piece.page_bytes * piece.pages
        if piece.page_bytes < 1 or piece.pages < 1:
            raise BadRequest(f"{piece.pages} pages of {piece.page_bytes} bytes")
        first = len(transfer.page_bytes)
        write = piece.target == NVME
        if piece.source == NVME:
            if write or len(piece.sums) != piece.pages:
                raise BadRequest("pages of the page file go to memory, with one sum each")
            transfer.sums.extend(piece.sums)
        else:
            if piece.sums:
                raise BadRequest("sums are of pages that come from the page file")
            transfer.sums.extend([0] * piece.pages)
        transfer.page_bytes.extend([piece.page_bytes] * piece.pages)
        if not write and piece.source != NVME:
            moves.extend(self._moves_of(piece, total))
            return
        offset, place, start = (piece.target_offset, piece.source, piece.source_offset) if write else (piece.source_offset, piece.target, piece.target_offset)  # fmt: skip
        if offset < 0 or offset + total > self._size:
            raise BadRequest(f"bytes {offset} to {offset + total} are outside the page file, which has {self._size}")
        if (offset | self._memory.address(place, start, total, not write) | piece.page_bytes) % ALIGN_BYTES:
            raise BadRequest(f"offset {offset}, {start} of place {place} and {piece.page_bytes} bytes a page must be multiples of {ALIGN_BYTES}")  # fmt: skip
        if write:
            transfer.stored.append(range(first, first + piece.pages))
        runs.append((write, offset, Run(first, piece.pages, piece.page_bytes, self._memory.view(place, start, total))))

    def _moves_of(self, piece: Piece, total: int) -> list[Work]:
        target = self._memory.address(piece.target, piece.target_offset, total, write=True)
        source = self._memory.address(piece.source, piece.source_offset, total)
        views = (self._memory.view(piece.target, piece.target_offset, total), self._memory.view(piece.source, piece.source_offset, total))  # fmt: skip
        step = total if abs(target - source) < total else REQUEST_BYTES  # ends that overlap are moved in one go
        return [Move(target + at, source + at, min(step, total - at), views) for at in range(0, total, step)]

    # --- on the threads ---------------------------------------------------------------------------------------------

    def _begin(self, transfer: Transfer) -> None:
        if transfer.start_ns:
            return
        transfer.start_ns = monotonic_ns()
        self._begun[transfer.command] = None
        if len(self._begun) == 1:
            self._show(transfer.command)

    def _carry_out(self, transfer: Transfer, work: Work) -> None:
        try:
            if type(work) is Request:
                self._request(transfer, work)
            elif type(work) is Part:
                self._part(transfer, work)
            else:
                assert type(work) is Move
                ctypes.memmove(work.target, work.source, work.bytes)  # lets go of the GIL
        except (
            Exception
        ) as error:  # border of a command: whatever it was, the Copy ends, and none of these pages is good
            pages = [page for run in work.runs for page in range(run.page, run.page + run.pages)] if type(work) is Request else [work.whole.page] if type(work) is Part else range(len(transfer.sums))  # fmt: skip
            for page in pages:
                self._fault(transfer, page, ("io", f"{type(error).__name__}: {error}"))
        self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        with self._lock:
            transfer.left -= 1
            if transfer.left:
                return
            del self._open[transfer.command]
            del self._begun[transfer.command]
            self._show(next(iter(self._begun), 0))
        sums = tuple(transfer.sums[page] for pages in transfer.stored for page in pages)
        good = sum(transfer.page_bytes) - sum(transfer.page_bytes[page] for page in transfer.faults)
        faults = tuple(transfer.faults[page] for page in sorted(transfer.faults))
        transfer.ended(Copied(transfer.command, transfer.start_ns, monotonic_ns(), good, sums, faults))

    def _fault(self, transfer: Transfer, page: int, fault: tuple[str, str]) -> None:
        with self._lock:
            transfer.faults.setdefault(page, CopyFault(page, *fault))

    def _request(self, transfer: Transfer, request: Request) -> None:
        if request.write:
            for run in request.runs:
                for n in range(run.pages):
                    transfer.sums[run.page + n] = xxh3_64_intdigest(run.memory[n * run.page_bytes : (n + 1) * run.page_bytes])  # fmt: skip
        fault = self._through(request.write, [run.memory for run in request.runs], request.offset)
        if fault is None and request.write:
            return
        offset = request.offset
        for run in request.runs:
            for n in range(run.pages):
                page, memory = run.page + n, run.memory[n * run.page_bytes : (n + 1) * run.page_bytes]
                # A request that failed is done again page by page: only those that fail by themselves are lost.
                found = None if fault is None else self._through(request.write, [memory], offset)
                if found is None and not request.write:
                    found = _compare(transfer.sums[page], xxh3_64_intdigest(memory))
                if found is not None:
                    self._fault(transfer, page, found)
                offset += run.page_bytes

    def _part(self, transfer: Transfer, part: Part) -> None:
        whole = part.whole
        fault = self._through(part.write, [part.memory], part.offset)
        if fault is not None:
            self._fault(transfer, whole.page, fault)  # the later parts wait for this one in vain
            return
        with self._lock:
            whole.done[part.number] = part.memory
        while True:
            with self._lock:
                if whole.busy or whole.hashed not in whole.done:
                    break
                memory = whole.done.pop(whole.hashed)
                whole.busy = True
            whole.hash.update(memory)
            with self._lock:
                whole.busy = False
                whole.hashed += 1
                complete = whole.hashed == whole.parts
            if complete:
                self._complete(transfer, part, whole.hash.intdigest())

    def _complete(self, transfer: Transfer, part: Part, found: int) -> None:
        page = part.whole.page
        if part.write:
            transfer.sums[page] = found
        elif (fault := _compare(transfer.sums[page], found)) is not None:
            self._fault(transfer, page, fault)

    def _through(self, write: bool, views: Sequence[memoryview], offset: int) -> tuple[str, str] | None:
        """Moves all of it, and the rest again after a short count; a fault's kind and words where that does not help."""
        call = self._calls.pwritev if write else self._calls.preadv
        left = sum(map(len, views))
        while True:
            try:
                done = call(self._fd, views, offset)
            except OSError as error:
                kind = "full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "io"
                return kind, f"{'write' if write else 'read'}: {errno.errorcode.get(error.errno or 0, 'error')}"
            if done == left:
                return None
            done -= done % ALIGN_BYTES  # the rest must begin where O_DIRECT can
            if done <= 0:
                return "short", f"{'write' if write else 'read'}: ended {left} bytes too early"
            left -= done
            offset += done
            views = remainder(views, done)


def _compare(expected: int, found: int) -> tuple[str, str] | None:
    return None if expected == found else ("checksum", f"xxh3_64 is {found:016x}, was {expected:016x}")
