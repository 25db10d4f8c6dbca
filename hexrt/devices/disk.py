"""The program of the NVME tier's host: opens the page file and carries out Copies between it, HOST memory and segments.

Owns the file, which has no name and goes with the process, and the engine over it. The loop only lays out and reports; a disk that is slow
or hangs is waited for on the engine's threads. A Copy that has begun ends and is reported as any other, even where it is cancelled.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterable
from time import monotonic_ns
from typing import Any

from hexrt.devices.host import HostProgram
from hexrt.devices.places import Places, anonymous
from hexrt.errors import ErrorRecord, HexrtError, Unavailable
from hexrt.memory.arena import ALIGN_BYTES, SYSTEM, Calls, open_page_file
from hexrt.memory.disk import DEPTH, PageDisk
from hexrt.memory.requests import REQUEST_BYTES
from hexrt.protocol.host import HOST, NVME, Cancel, Copied, Copy, HostFailed, Piece, ToHost, Withdraw

PROBE_BYTES = 32 << 20  # each way, at most
PROBE_NS = 100_000_000  # each way; a round that has begun ends
PROBE_SMALL = 8


class DiskProgram(HostProgram):
    calls: Calls = SYSTEM

    def start(self) -> dict[str, Any]:
        settings = self.hello.settings["memory"]
        size = int(settings["nvme_bytes"])
        if not size:
            return self._without_file("")
        try:
            fd, facts = open_page_file(settings["nvme_path"] or self.hello.state_dir, size, self.calls)
            speed = probe(fd, facts.bytes, self.calls)
        except HexrtError as error:
            return self._without_file(str(error))
        self._disk = PageDisk(fd, facts.bytes, self.places, self.calls, DEPTH, self._show)
        return {"backend": "threads", "depth": DEPTH, "direct": facts.direct, "why": facts.why, "bytes": facts.bytes, "request_bytes": REQUEST_BYTES} | speed  # fmt: skip

    def _without_file(self, why: str) -> dict[str, Any]:
        """Copies between HOST and segments are all that is done then."""
        self._disk = PageDisk(-1, 0, self.places, self.calls, DEPTH, self._show)
        return {"backend": "none", "bytes": 0, "why": why}

    def stop(self) -> None:
        self._disk.stop()

    def handle(self, message: ToHost) -> None:
        if isinstance(message, Copy):
            try:
                self._disk.submit(message, self._ended)
            except HexrtError as error:
                self._failed(message.command, error.record())
        elif isinstance(message, Withdraw | Cancel):
            if self._disk.take_out(message.command) and isinstance(message, Cancel):
                self._failed(message.command, ErrorRecord("cancelled", "cancelled before it began"))
        elif (command := getattr(message, "command", 0)) != 0:
            self._failed(command, Unavailable(f"{self.hello.device} only copies pages").record())

    def _failed(self, command: int, error: ErrorRecord) -> None:
        now = monotonic_ns()
        self.report(HostFailed(command, 0, now, now, error))

    # --- on the engine's threads ------------------------------------------------------------------------------------

    def _show(self, command: int) -> None:
        self.cell[0] = command

    def _ended(self, copied: Copied) -> None:
        try:
            self.loop.call_soon_threadsafe(self.report, copied)
        except RuntimeError:  # the loop has closed meanwhile: nobody is left to be told
            self._disk.stop()


def probe(fd: int, size: int, calls: Calls = SYSTEM) -> dict[str, float]:
    """Bytes a second each way, hashes included, and nanoseconds of one small read, as the engine has them.

    Writes over the beginning of the file. Raises Unavailable for a file that cannot be written and read back.
    """
    page = min(REQUEST_BYTES, size)
    batch = min(DEPTH, size // page)
    places = Places()
    places.add(HOST, anonymous(batch * page))
    memory = places.view(HOST)
    memory[:] = (os.urandom(ALIGN_BYTES) * (len(memory) // ALIGN_BYTES + 1))[: len(memory)]
    disk = PageDisk(fd, size, places, calls)
    try:
        starts = range(0, min(PROBE_BYTES, size // page * page) - batch * page + 1, batch * page)
        written = _rounds(disk, (Piece(HOST, 0, NVME, start, page, batch) for start in starts))
        read = _rounds(disk, (Piece(NVME, start, HOST, 0, page, batch, copied.sums) for start, copied in zip(starts, written, strict=False)))  # fmt: skip
        sums = _rounds(disk, [Piece(HOST, 0, NVME, 0, ALIGN_BYTES, 1)])[0].sums
        small = _rounds(disk, [Piece(NVME, 0, HOST, 0, ALIGN_BYTES, 1, sums)] * PROBE_SMALL)
    finally:
        disk.stop(wait=True)
    return {
        "write_bytes_per_s": _speed(written),
        "read_bytes_per_s": _speed(read),
        "latency_ns": float(min(copied.end_ns - copied.start_ns for copied in small)),
    }


def _rounds(disk: PageDisk, pieces: Iterable[Piece]) -> list[Copied]:
    """Copies one piece after the other until there are no more, or the time is up."""
    until = monotonic_ns() + PROBE_NS
    reports: list[Copied] = []
    done: queue.SimpleQueue[Copied] = queue.SimpleQueue()
    for command, piece in enumerate(pieces, 1):
        disk.submit(Copy(command, (piece,)), done.put)
        reports.append(done.get())
        for fault in reports[-1].faults:
            raise Unavailable(f"the page file does not keep what is written to it: {fault.message}", "memory.nvme_path")
        if monotonic_ns() > until:
            break
    return reports


def _speed(reports: list[Copied]) -> float:
    return sum(copied.bytes for copied in reports) * 1e9 / sum(copied.end_ns - copied.start_ns for copied in reports)
