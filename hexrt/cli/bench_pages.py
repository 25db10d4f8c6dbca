"""What a page fault costs the daemon in decisions: no bytes are moved.

Owns the measurement of `memory.pool` and `memory.keeper` at a given number of pages; `hexrt bench memory` prints it. A fault is: a victim is
chosen and evicted, a frame reserved, the load begun and committed, the page touched. Pages come back one by one, or all those of a sequence in
one move; through the keeper they are pinned too, queued for their host and reported by it. The victims have a copy below, as write-back sees
to it ahead of need; what a fault costs where they must be stored first is measured too.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec

from hexrt.brain.view import Device
from hexrt.core import DeviceKind
from hexrt.memory.keeper import Keeper
from hexrt.memory.plan import make_room
from hexrt.memory.pool import Level, Lru, NextUse, Page, PagePool
from hexrt.protocol.host import Copied, Copy, ToHost
from hexrt.scheduling.links import Links

PAGE_BYTES = 360 << 10
"""16 tokens of a small model in bf16."""
TOGETHER = 16
"""Pages of a sequence: they come back in one move."""
BATCH = 128
"""Faults that are timed at once."""
DEVICE = "cpu:0"

Fault = Callable[[Sequence[Page]], None]


class FaultCost(msgspec.Struct, frozen=True):
    """Processor time a page, in microseconds: medians of batches."""

    pages: int
    us: float  # one page a move
    worst_us: float  # the slowest batch of such
    stored_us: float  # one page a move, whose victim is stored first
    moved_us: float  # in moves of TOGETHER pages
    kept_us: float  # in moves of TOGETHER pages, through the keeper
    bytes_a_page: float  # of the daemon's tables


class _Faults:
    """A pool of `pages` pages, made as sequences of TOGETHER, whose device holds a quarter of them, and is full."""

    def __init__(self, pages: int, next_use: bool, seed: int) -> None:
        self.draw = random.Random(seed)
        self.pool = pool = PagePool(NextUse() if next_use else Lru())
        self.keeper = Keeper(pool, Links())
        held = max(pages // 4, 2 * TOGETHER)
        self.keeper.add_host((pages + held) * PAGE_BYTES)
        self.keeper.add_device(DEVICE, held * PAGE_BYTES)
        self.cls = self.keeper.page_class(DEVICE, PAGE_BYTES)
        self.tier = pool.top(self.cls)
        self.sequences: list[Sequence[Page]] = []
        self.devices = {DEVICE: Device(DEVICE, DeviceKind.CPU, 2, DEVICE, ready=True)}
        while len(self.sequences) < max(pages // TOGETHER, 4):
            count = min(TOGETHER * 256, max(pages - len(self.sequences) * TOGETHER, TOGETHER))
            self._fill(count - count % TOGETHER)

    def _fill(self, count: int) -> None:
        """Pages made at the top and stored below."""
        pool, count = self.pool, min(count, self.pool.capacity(self.cls) // TOGETHER * TOGETHER)
        for page in make_room(pool, self.tier, self.cls, count, may_discard=False).drops:
            pool.drop(page, Level.DEVICE)
        made = pool.create(self.cls, count)
        pool.unpin(made)
        pool.commit(pool.begin(made, Level.HOST))
        self.sequences += [made[at : at + TOGETHER] for at in range(0, count, TOGETHER)]

    def absent(self, together: int) -> list[Sequence[Page]]:
        """BATCH pages to be faulted in, in random moves of as many."""
        has, sequences = self.pool.has, self.draw.sample(self.sequences, min(8 * BATCH, len(self.sequences)))
        moves: list[Sequence[Page]] = []
        for pages in sequences:
            if len(moves) * together >= BATCH:
                break
            if together == 1 and not has(page := self.draw.choice(pages), Level.DEVICE):
                moves.append((page,))
            elif together > 1 and (gone := [page for page in pages if not has(page, Level.DEVICE)]):
                moves.append(gone)
        return moves

    def batch(self, together: int, fault: Fault) -> float:
        """Microseconds a page."""
        moves = self.absent(together)
        start = time.thread_time_ns()
        for pages in moves:
            fault(pages)
        took_ns = time.thread_time_ns() - start
        if isinstance(self.pool.policy, NextUse):  # known of whole sequences
            for pages in self.draw.sample(self.sequences, min(len(moves), len(self.sequences))):
                self.pool.set_next_use(pages, self.draw.randrange(64))
        return took_ns / 1_000 / max(sum(map(len, moves)), 1)

    # --- kinds of faults --------------------------------------------------------------------------------------------

    def load(self, pages: Sequence[Page]) -> None:
        pool, count = self.pool, len(pages)
        if pool.room(self.cls) < count:
            self.make_room(count)
        pool.commit(pool.begin(pages, Level.DEVICE))
        pool.touch(pages)

    def make_room(self, count: int) -> None:
        pool = self.pool
        room = make_room(pool, self.tier, self.cls, count, may_discard=False)
        if room.stores:
            pool.commit(pool.begin(room.stores, Level.HOST))
        for victim in (*room.drops, *room.stores):
            pool.drop(victim, Level.DEVICE)

    def load_after_storing(self, pages: Sequence[Page]) -> None:
        """The victims are the coldest dirty pages, as `make_room` would name them where no page is clean."""
        pool = self.pool
        victims = list(islice(pool.victims(self.tier, self.cls, dirty=True), len(pages)))
        pool.commit(pool.begin(victims, Level.HOST))
        for victim in victims:
            pool.drop(victim, Level.DEVICE)
        self.load(pages)

    def load_through_the_keeper(self, pages: Sequence[Page]) -> None:
        """As the pages of a sequence that goes on, up to where it could be computed and then rests again."""
        keeper, send = self.keeper, dict[str, list[ToHost]]()
        self.pool.pin(pages)
        if keeper.make_room(self.cls, len(pages)):
            keeper.load(pages, DEVICE, lambda faults: None)
        keeper.decide(0, self.devices, send)
        for copy in send.get(DEVICE, ()):
            if isinstance(copy, Copy):
                size = sum(piece.page_bytes * piece.pages for piece in copy.pieces)
                keeper.copied(DEVICE, Copied(copy.command, 0, 1_000, size))
        self.pool.unpin(pages)

    def write(self, count: int) -> None:
        """The coldest clean pages become dirty."""
        for page in list(islice(self.pool.victims(self.tier, self.cls, dirty=False), count)):
            self.pool.pin((page,))
            self.pool.write((page,))
            self.pool.unpin((page,))


def fault_cost(pages: int, faults: int = 4_000, next_use: bool = False, seed: int = 1) -> FaultCost:
    """Of so many random faults of each kind among `pages` pages."""
    there = _Faults(pages, next_use, seed)
    single: list[float] = []
    stored: list[float] = []
    moved: list[float] = []
    kept: list[float] = []
    gc.collect()
    gc.disable()
    try:
        for number in range(max(faults // BATCH, 5)):
            single.append(there.batch(1, there.load))
            moved.append(there.batch(TOGETHER, there.load))
            kept.append(there.batch(TOGETHER, there.load_through_the_keeper))
            if number % 4 == 0:
                there.write(BATCH)
                stored.append(there.batch(1, there.load_after_storing))
    finally:
        gc.enable()
    for took in (single, stored, moved, kept):
        took.sort()
    return FaultCost(
        pages, _median(single), single[-1], _median(stored), _median(moved), _median(kept), table_bytes(there.pool) / pages
    )  # fmt: skip


def _median(took: list[float]) -> float:
    return took[len(took) // 2]


def table_bytes(pool: PagePool) -> int:
    """Of the columns, lists and bitmaps that grow with pages."""
    owners = [column for tier in pool.tiers for column in tier.owners.values()]
    return (
        pool.columns.bytes
        + sum(len(column) * column.itemsize for column in owners)
        + sum(t.space.bitmap_bytes for t in pool.tiers)
    )
