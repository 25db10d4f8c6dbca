"""What a page fault costs the daemon in decisions: no bytes are moved.

Owns the measurement of `memory.pool` at a given number of pages; `hexrt bench memory` prints it. A fault is: a victim is chosen and evicted, a
frame reserved, the load begun and committed, the page touched. The victim has a copy below, as write-back sees to it ahead of need; what it
costs where it must be stored first is measured too.
"""

from __future__ import annotations

import gc
import random
import time
from itertools import islice

import msgspec

from hexrt.memory.frames import FrameSpace
from hexrt.memory.plan import Room, make_room
from hexrt.memory.pool import Level, Lru, NextUse, Page, PagePool

PAGE_BYTES = 360 << 10
"""16 tokens of a small model in bf16."""


class FaultCost(msgspec.Struct, frozen=True):
    pages: int
    us: float  # a fault, the median of batches
    worst_us: float  # the slowest batch
    stored_us: float  # a fault whose victim is stored first, the median of batches
    bytes_a_page: float  # of the daemon's tables


BATCH = 100


def fault_cost(pages: int, faults: int = 4_000, next_use: bool = False, seed: int = 1) -> FaultCost:
    """Processor time of random faults, one by one, in a pool of `pages` pages whose device holds a quarter of them, and is full."""
    pool = PagePool(NextUse() if next_use else Lru())
    held = max(pages // 4, 8)
    device = pool.add_tier("device", Level.DEVICE, FrameSpace(held * PAGE_BYTES))
    pool.add_tier("host", Level.HOST, FrameSpace((pages + held) * PAGE_BYTES))
    cls = pool.add_class(device, PAGE_BYTES, recomputable=True)
    everything = _fill(pool, cls, pages)
    draw = random.Random(seed)
    took: list[float] = []
    stored: list[float] = []
    gc.collect()
    gc.disable()
    try:
        for number in range(max(faults // BATCH, 5)):
            took.append(_batch(pool, device, cls, everything, draw))
            if number % 4 == 0:
                _write(pool, list(islice(pool.victims(device, cls), BATCH)))
                stored.append(_batch(pool, device, cls, everything, draw, clean=False))
    finally:
        gc.enable()
    took.sort()
    stored.sort()
    return FaultCost(pages, took[len(took) // 2], took[-1], stored[len(stored) // 2], table_bytes(pool) / pages)


def _batch(
    pool: PagePool, device: int, cls: int, everything: list[Page], draw: random.Random, clean: bool = True
) -> float:
    """Microseconds a fault."""
    absent = [
        page for page in draw.sample(everything, min(4 * BATCH, len(everything))) if not pool.has(page, Level.DEVICE)
    ]
    absent = absent[:BATCH]
    start = time.thread_time_ns()
    for page in absent:
        _fault(pool, device, cls, page, clean)
    took_ns = time.thread_time_ns() - start
    if isinstance(pool.policy, NextUse):
        for page in absent:
            pool.set_next_use((page,), draw.randrange(64))
    return took_ns / 1_000 / max(len(absent), 1)


def _fill(pool: PagePool, cls: int, pages: int) -> list[Page]:
    """All pages made at the top and stored below, a part at a time."""
    everything: list[Page] = []
    while len(everything) < pages:
        count = min(pages - len(everything), pool.room(cls), 4096)
        if not count:
            for page in list(pool.victims(pool.top(cls), cls, dirty=False)):
                pool.drop(page, Level.DEVICE)
            continue
        made = pool.create(cls, count)
        pool.unpin(made)
        pool.commit(pool.begin(made, Level.HOST))
        everything.extend(made)
    return everything


def _fault(pool: PagePool, device: int, cls: int, page: Page, clean: bool) -> None:
    if not pool.room(cls):
        room = make_room(pool, device, cls, 1, may_discard=False) if clean else _coldest(pool, device, cls)
        if room.stores:
            pool.commit(pool.begin(room.stores, Level.HOST))
        for victim in (*room.drops, *room.stores):
            pool.drop(victim, Level.DEVICE)
    pool.commit(pool.begin((page,), Level.DEVICE))
    pool.touch((page,))


def _coldest(pool: PagePool, device: int, cls: int) -> Room:
    """The coldest dirty page, as `make_room` would name it where no page is clean."""
    return Room(stores=[next(pool.victims(device, cls, dirty=True))])


def _write(pool: PagePool, pages: list[Page]) -> None:
    for page in pages:
        pool.pin((page,))
        pool.write((page,))
        pool.unpin((page,))


def table_bytes(pool: PagePool) -> int:
    """Of the columns, lists and bitmaps that grow with pages."""
    owners = [column for tier in pool.tiers for column in tier.owners.values()]
    return (
        pool.columns.bytes
        + sum(len(column) * column.itemsize for column in owners)
        + sum(t.space.bitmap_bytes for t in pool.tiers)
    )
