"""From runs of pages to the reads and writes of the page file that carry them: few, large, and in the order of the file.

Owns the shapes of a Copy's work, which hexrt.memory.disk makes and carries out. No I/O and no threads; a hash is only kept here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from xxhash import xxh3_64

REQUEST_BYTES = 4 << 20  # measured: less costs throughput, more only makes others wait
MAX_PARTS = 512  # of one request; preadv takes 1,024


@dataclass(slots=True, eq=False)
class Run:
    """Pages that are neighbours in memory and in the file. `page` is the first one's number in the Copy."""

    page: int
    pages: int
    page_bytes: int
    memory: memoryview


@dataclass(slots=True, eq=False)
class Request:
    """One read or write of the file; the runs follow one another there."""

    write: bool
    offset: int
    bytes: int
    runs: list[Run]


@dataclass(slots=True, eq=False)
class Whole:
    """A page that is larger than a request. Its parts come in any order and are hashed in the page's."""

    page: int
    bytes: int
    parts: int
    hash: xxh3_64 = field(default_factory=xxh3_64)
    done: dict[int, memoryview] = field(default_factory=dict)
    hashed: int = 0
    busy: bool = False  # a thread is hashing, and looks again afterwards


@dataclass(slots=True, eq=False)
class Part:
    write: bool
    offset: int
    memory: memoryview
    number: int
    whole: Whole


@dataclass(slots=True, eq=False)
class Move:
    """Bytes within memory. The views keep both ends mapped."""

    target: int
    source: int
    bytes: int
    views: tuple[memoryview, memoryview]


Work = Request | Part | Move


def cut(runs: list[tuple[bool, int, Run]]) -> deque[Work]:
    """The fewest requests of at most REQUEST_BYTES: neighbours in the file together, wherever they lie in memory; pages whole where they fit.

    Writes and reads each in the order of the file.
    """
    requests: deque[Work] = deque()
    last: Request | None = None
    for write, start, run in sorted(runs, key=lambda entry: entry[:2]):
        if run.page_bytes > REQUEST_BYTES:
            for page in range(run.pages):
                requests.extend(_parts(write, start + page * run.page_bytes, run, page))
            last = None
            continue
        taken = 0
        while taken < run.pages:
            offset = start + taken * run.page_bytes
            if last is None or last.write != write or last.offset + last.bytes != offset or last.bytes + run.page_bytes > REQUEST_BYTES or len(last.runs) == MAX_PARTS:  # fmt: skip
                last = Request(write, offset, 0, [])
                requests.append(last)
            pages = min(run.pages - taken, (REQUEST_BYTES - last.bytes) // run.page_bytes)
            memory = run.memory[taken * run.page_bytes : (taken + pages) * run.page_bytes]
            last.runs.append(Run(run.page + taken, pages, run.page_bytes, memory))
            last.bytes += len(memory)
            taken += pages
    return requests


def _parts(write: bool, offset: int, run: Run, page: int) -> list[Part]:
    memory = run.memory[page * run.page_bytes : (page + 1) * run.page_bytes]
    starts = range(0, run.page_bytes, REQUEST_BYTES)
    whole = Whole(run.page + page, run.page_bytes, len(starts))
    return [
        Part(write, offset + at, memory[at : at + REQUEST_BYTES], number, whole) for number, at in enumerate(starts)
    ]
