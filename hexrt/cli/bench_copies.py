"""How fast a device host copies pages between its own arena and HOST memory, beside one plain memmove of the same bytes.

The host is a real `cpu` process behind the daemon's own HostLink; a round is timed from the sending of the Copy to the arrival of its
Copied. The plain move is this process's, over memory of the same kinds, in turns with the rounds. Owns the process; nothing is left.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
from ctypes import memmove, memset
from time import perf_counter
from typing import Any

from hexrt.devices.link import HostLink
from hexrt.devices.places import Places, anonymous
from hexrt.errors import DeviceLost, InvariantViolation
from hexrt.memory.arena import create_host_arena
from hexrt.protocol.host import DEVICE, HOST, VERSION, Copied, Copy, FromHost, Hello, Map, Piece

ROUNDS = 7
RUN_PAGES = 16
WAYS = ((HOST, DEVICE, "host to device"), (DEVICE, HOST, "device to host"))
"""In this order: memory that nobody has written yet is one page of zeros, and reads faster than memory does."""


def measure(size: int, page_bytes: int) -> list[dict[str, Any]]:
    """Rows of `hexrt bench`: bytes a second of `size` bytes in pages of `page_bytes`, as one run, in short runs, and each by itself, in random order.

    Values and limits are medians of rounds that alternate. Call from the main thread, where no loop runs. Raises DeviceLost.
    """
    return asyncio.run(_measure(size // page_bytes, page_bytes))


async def _measure(pages: int, page_bytes: int) -> list[dict[str, Any]]:
    size = pages * page_bytes
    fd, _ = create_host_arena(size)
    try:
        places = Places()
        places.map(Map(HOST, size, writable=True), os.dup(fd))
        places.add(DEVICE, anonymous(size))
        for place in (HOST, DEVICE):
            memset(places.address(place, 0, size, write=True), 1, size)
        with tempfile.TemporaryDirectory() as folder:
            host = _Host(folder, size)
            try:
                await host.reports.get()
                host.link.map(HOST, fd, size, writable=True)
                return await _rows(host, places, pages, page_bytes)
            finally:
                host.link.close()
    finally:
        os.close(fd)


class _Host:
    def __init__(self, folder: str, arena_bytes: int) -> None:
        settings = {"max_output_bytes": 1 << 20, "cpu": {"arena_mib": -(-arena_bytes >> 20)}}
        hello = Hello(VERSION, 1, "cpu:0", folder, folder, settings)
        self.reports: asyncio.Queue[FromHost | str] = asyncio.Queue()
        self.link = HostLink(
            asyncio.get_running_loop(), "cpu", hello, self._on_reports, self._on_death, dict(os.environ)
        )
        self._commands = 0

    def _on_reports(self, link: HostLink, reports: list[FromHost]) -> None:
        for report in reports:
            self.reports.put_nowait(report)

    def _on_death(self, link: HostLink, reason: str) -> None:
        self.reports.put_nowait(reason)

    async def copy(self, pieces: tuple[Piece, ...]) -> float:
        """Seconds from here to the report and back."""
        self._commands += 1
        start = perf_counter()
        self.link.send([Copy(self._commands, pieces)])
        report = await self.reports.get()
        seconds = perf_counter() - start
        if isinstance(report, str):
            raise DeviceLost(f"the host died: {report}")
        if not isinstance(report, Copied) or report.faults:
            raise InvariantViolation(f"a copy ended in {report}")
        return seconds


async def _rows(host: _Host, places: Places, pages: int, page_bytes: int) -> list[dict[str, Any]]:
    size, rows = pages * page_bytes, []
    for source, target, way in WAYS:
        kinds = {run: _pieces(source, target, pages, page_bytes, run) for run in (pages, RUN_PAGES, 1)}
        ours: dict[int, list[float]] = {run: [] for run in kinds}
        plain: list[float] = []
        for attempt in range(ROUNDS + 1):
            moved = [(run, await host.copy(pieces)) for run, pieces in kinds.items()]
            limit = _plain(places, source, target, size)
            if attempt:  # the first takes the memory
                plain.append(limit)
                for run, seconds in moved:
                    ours[run].append(seconds)
        rows += [_row(f"{way}, {_name(run, pages)}", size, seconds, plain, page_bytes) for run, seconds in ours.items()]
    return rows


def _pieces(source: int, target: int, pages: int, page_bytes: int, run: int) -> tuple[Piece, ...]:
    """All pages in runs of `run`, the runs in one random order here and in another there."""
    draw = random.Random(run)
    counts = [min(run, pages - first) for first in range(0, pages, run)]
    whole = [first for first, count in zip(range(0, pages, run), counts, strict=True) if count == run]
    there = draw.sample(whole, len(whole))
    pairs = list(zip(draw.sample(whole, len(whole)), there, strict=True))
    pieces = [Piece(source, a * page_bytes, target, b * page_bytes, page_bytes, run) for a, b in pairs]
    if rest := pages % run:
        at = (pages - rest) * page_bytes
        pieces.append(Piece(source, at, target, at, page_bytes, rest))
    return tuple(pieces)


def _plain(places: Places, source: int, target: int, size: int) -> float:
    there, here = places.address(target, 0, size, write=True), places.address(source, 0, size)
    start = perf_counter()
    memmove(there, here, size)
    return perf_counter() - start


def _name(run: int, pages: int) -> str:
    return "one run" if run == pages else "page by page" if run == 1 else f"runs of {run} pages"


def _row(name: str, size: int, ours: list[float], plain: list[float], page_bytes: int) -> dict[str, Any]:
    value, limit = (size / statistics.median(seconds) / 1e6 for seconds in (ours, plain))
    note = f"pages of {page_bytes >> 10} KiB; limit: one memmove of {size >> 20} MiB"
    return {"name": name, "value": value, "unit": "MB/s", "limit": limit, "ratio": value / limit, "note": note}
