"""How fast pages go between HOST memory and the page file, checksums included, beside a plain sequential read and write.

The plain one moves blocks as large as the engine's requests, as many at once, in the order of the file, with nothing else done: no page,
no hash. Both use the same file and the same memory, in turns, in this very run. Owns what it opens; nothing is left.
"""

from __future__ import annotations

import os
import statistics
import threading
from time import perf_counter
from typing import Any

from hexrt.devices.places import Places
from hexrt.errors import Unavailable
from hexrt.memory.arena import SYSTEM, create_host_arena, open_page_file
from hexrt.memory.disk import DEPTH, PageDisk
from hexrt.memory.requests import REQUEST_BYTES
from hexrt.protocol.host import HOST, NVME, Copied, Copy, Map, Piece

ROUNDS = 8


def measure(path: str, size: int, page_bytes: int) -> list[dict[str, Any]]:
    """Rows of `hexrt bench`: bytes a second of pages of `page_bytes`, `size` bytes of them, in a file beside `path`.

    Each row's value and limit are medians of rounds that alternate. Raises what `open_page_file` and `create_host_arena`
    raise, and Unavailable for a disk that fails.
    """
    pages = size // page_bytes
    size = pages * page_bytes
    arena, _ = create_host_arena(size)
    places = Places()
    places.map(Map(HOST, size, writable=True), arena)
    memory = places.view(HOST)
    for at in range(0, size, page_bytes):  # taken, and no two pages alike
        memory[at : at + page_bytes] = (at // page_bytes).to_bytes(8, "little") * (page_bytes // 8)
    fd, facts = open_page_file(path, size)
    disk = PageDisk(fd, size, places)
    block = REQUEST_BYTES // page_bytes * page_bytes or REQUEST_BYTES  # a page larger than a request is cut
    ours: dict[bool, list[float]] = {True: [], False: []}
    plain: dict[bool, list[float]] = {True: [], False: []}
    sums = _timed_copy(disk, Copy(1, (Piece(HOST, 0, NVME, 0, page_bytes, pages),)))[1].sums  # the file's first writing
    store = Copy(2, (Piece(HOST, 0, NVME, 0, page_bytes, pages),))
    load = Copy(3, (Piece(NVME, 0, HOST, 0, page_bytes, pages, sums),))
    for turn in range(ROUNDS):
        for write in (True, False):
            if turn % 2:  # who comes first changes: a disk that lends speed takes it back from the second
                plain[write].append(_plain(fd, memory, block, write))
            seconds, copied = _timed_copy(disk, store if write else load)
            for fault in copied.faults:
                raise Unavailable(f"the page file does not keep what is written to it: {fault.message}")
            ours[write].append(seconds)
            if not turn % 2:
                plain[write].append(_plain(fd, memory, block, write))
    disk.stop(wait=True)
    os.close(fd)
    how = f"{facts.why or 'O_DIRECT'}, {DEPTH} at once, blocks of {block >> 10} KiB"
    return [_row(name, size, ours[write], plain[write], f"pages of {page_bytes >> 10} KiB, {how}") for name, write in (("host to NVMe", True), ("NVMe to host", False))]  # fmt: skip


def _row(name: str, size: int, ours: list[float], plain: list[float], note: str) -> dict[str, Any]:
    value, limit = (size / statistics.median(seconds) / 1e6 for seconds in (ours, plain))
    return {"name": name, "value": value, "unit": "MB/s", "limit": limit, "ratio": value / limit, "note": note}


def _timed_copy(disk: PageDisk, copy: Copy) -> tuple[float, Copied]:
    done = threading.Event()
    reports: list[Copied] = []

    def end(report: Copied) -> None:
        reports.append(report)
        done.set()

    start = perf_counter()
    disk.submit(copy, end)
    done.wait()
    return perf_counter() - start, reports[0]


def _plain(fd: int, memory: memoryview, block: int, write: bool) -> float:
    """Seconds for all of `memory`, by as many threads as the engine has."""
    starts = iter(range(0, len(memory), block))
    lock = threading.Lock()
    call = SYSTEM.pwritev if write else SYSTEM.preadv

    def work() -> None:
        while True:
            with lock:
                at = next(starts, None)
            if at is None:
                return
            part = memory[at : at + block]
            assert call(fd, [part], at) == len(part)

    threads = [threading.Thread(target=work) for _ in range(DEPTH)]
    start = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return perf_counter() - start
