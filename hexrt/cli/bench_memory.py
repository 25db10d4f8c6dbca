"""What `hexrt bench memory` measures: page copies, the page file, the daemon's decisions, and rings, each beside its limit.

A row is {"name", "value", "unit", "limit", "ratio", "asked", "met"} and, where there is more to say, "note". `limit` was measured in the
same run; `asked` is what the row is held to, as text, and `met` whether it is (None: nothing was asked). What cannot be
measured here is a row without a value that says why. Leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hexrt.cli import bench_copies, bench_disk, bench_pages, bench_ring
from hexrt.errors import HexrtError

SIZE_MIB = 256
PAGE_BYTES = bench_pages.PAGE_BYTES
FAULT_PAGES = (1_000, 100_000, 1_000_000)
LEAST_RATIO, MOST_FAULT_US, MOST_PAGE_BYTES, MOST_MESSAGE_US = 0.9, 20.0, 200.0, 10.0
FLAT = 1.5
"""How much longer a decision among many pages may take than among the fewest and still be called flat."""

Row = dict[str, Any]


def measure(path: str, size_mib: int = SIZE_MIB, fault_pages: tuple[int, ...] = FAULT_PAGES) -> Iterator[Row]:
    """The rows, as they are measured. `path` is the folder for the page file."""
    size = size_mib << 20
    yield from guarded("device and host", lambda: bench_copies.measure(size, PAGE_BYTES), _at_least)
    yield from guarded("host and NVMe", lambda: bench_disk.measure(path, size, PAGE_BYTES), _at_least)
    yield from faults(fault_pages)
    rounds = min(bench_ring.ROUNDS, max(2, size_mib // 16))
    yield from guarded("ring", lambda: bench_ring.measure(rounds=rounds), ring_asked)


def guarded(name: str, act: Callable[[], list[Row]], asked: Callable[[Row], Row]) -> Iterator[Row]:
    """The rows of one measurement, or one that says why there are none."""
    try:
        yield from map(asked, act())
    except HexrtError as error:
        yield _nothing_asked(
            {"name": name, "value": None, "unit": "absent", "limit": None, "ratio": None, "note": str(error)}
        )


def _nothing_asked(row: Row) -> Row:
    return row | {"asked": "", "met": None}


def _at_least(row: Row) -> Row:
    return row | {"asked": f">= {LEAST_RATIO:.0%}", "met": row["ratio"] >= LEAST_RATIO}


def _below(row: Row, most: float) -> Row:
    return row | {"asked": f"< {most:g}", "met": row["value"] < most}


def ring_asked(row: Row) -> Row:
    """The copies that a consumer makes, and its reading, are its own affair: a row for each says what they cost."""
    if row["unit"] == "us":
        return _below(row, MOST_MESSAGE_US)
    return _at_least(row) if row["name"].endswith("in place") else _nothing_asked(row)


def faults(pages: tuple[int, ...]) -> Iterator[Row]:
    """Decision time a page at each number of pages, one page at a time and as sequences come; its limit is the time at the fewest."""
    fewest: dict[str, float] = {}
    for count in pages:
        cost = bench_pages.fault_cost(count)
        together = f"in {bench_pages.TOGETHER}s"
        for kind, us in (("alone", cost.us), (together, cost.moved_us), (f"{together}, keeper", cost.kept_us)):
            yield _fault(kind, count, us, fewest)
    yield _below(
        {
            "name": f"tables, a page of {pages[-1]:,}",
            "value": cost.bytes_a_page,
            "unit": "B",
            "limit": None,
            "ratio": None,
        },
        MOST_PAGE_BYTES,
    )


def _fault(kind: str, count: int, us: float, fewest: dict[str, float]) -> Row:
    limit = fewest.get(kind)
    row: Row = {"name": f"fault {kind}, {count:,}", "value": us, "unit": "us", "limit": limit}
    row["ratio"] = us / limit if limit else None
    row = _below(row, MOST_FAULT_US)
    if limit:
        row["asked"] += ", flat"
        row["met"] = row["met"] and row["ratio"] <= FLAT
    fewest.setdefault(kind, us)
    return row
