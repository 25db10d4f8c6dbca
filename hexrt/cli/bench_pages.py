"""What a page fault costs the daemon in decisions: no bytes are moved.

Owns the measurement of `memory.pool` at a given number of pages; `hexrt bench memory` prints it. The fault is the whole of it: a pinned page is
let go, a victim chosen and evicted (stored first where it is dirty), a frame reserved, the load begun and committed, the page pinned and touched.
"""

from __future__ import annotations

import gc
import random
import time

import msgspec

from hexrt.memory.frames import FrameSpace
from hexrt.memory.plan import make_room
from hexrt.memory.pool import Level, Lru, NextUse, Page, PagePool

PAGE_BYTES = 360 << 10
"""16 tokens of a small model in bf16."""


class FaultCost(msgspec.Struct, frozen=True):
    pages: int
    us: float  # a fault, the median of batches
    worst_us: float  # the slowest batch
    bytes_a_page: float  # of the daemon's tables


def fault_cost(pages: int, faults: int = 4_000, next_use: bool = False, seed: int = 1) -> FaultCost:
    """In processor time. Random faults in a pool of `pages` pages whose device holds a quarter of them, and is full. One in four faults writes its page."""
    pool = PagePool(NextUse() if next_use else Lru())
    held = max(pages // 4, 8)
    device = pool.add_tier("device", Level.DEVICE, FrameSpace(held * PAGE_BYTES))
    pool.add_tier("host", Level.HOST, FrameSpace((pages + held) * PAGE_BYTES))
    cls = pool.add_class(device, PAGE_BYTES, recomputable=True)
    everything = _fill(pool, cls, pages)
    draw = random.Random(seed)
    took = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(max(faults // 100, 1)):
            start = time.thread_time_ns()
            for _ in range(100):
                _fault(pool, device, cls, everything[draw.randrange(pages)], draw)
            took.append((time.thread_time_ns() - start) / 100_000)
    finally:
        gc.enable()
    took.sort()
    return FaultCost(pages, took[len(took) // 2], took[-1], table_bytes(pool) / pages)


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


def _fault(pool: PagePool, device: int, cls: int, page: Page, draw: random.Random) -> None:
    if not pool.has(page, Level.DEVICE):
        if not pool.room(cls):
            _evict(pool, device, cls)
        pool.commit(pool.begin((page,), Level.DEVICE))
    pool.pin((page,))
    pool.touch((page,))
    if isinstance(pool.policy, NextUse):
        pool.set_next_use((page,), draw.randrange(64))
    if draw.random() < 0.25:
        pool.write((page,))
    pool.unpin((page,))


def _evict(pool: PagePool, device: int, cls: int) -> None:
    room = make_room(pool, device, cls, 1, may_discard=True)
    if room.stores:
        pool.commit(pool.begin(room.stores, Level.HOST))
    for page in (*room.drops, *room.stores):
        pool.drop(page, Level.DEVICE)


def table_bytes(pool: PagePool) -> int:
    """Of the columns, lists and bitmaps that grow with pages."""
    owners = [column for tier in pool.tiers for column in tier.owners.values()]
    return (
        pool.columns.bytes
        + sum(len(column) * column.itemsize for column in owners)
        + sum(t.space.bitmap_bytes for t in pool.tiers)
    )
