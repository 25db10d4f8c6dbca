"""What could be done about memory: the fewest copies of a move, whom to evict, what to write ahead, fetch ahead and tidy up.

Owns nothing; each function looks at a page pool, changes nothing that lasts, and returns pages for the keeper to act on. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from hexrt.memory.evict import Room, make_room
from hexrt.memory.pool import Hop, Level, Page, PagePool

__all__ = [
    "Room",
    "Run",
    "Watermarks",
    "admit",
    "coalesce",
    "defragment",
    "make_room",
    "prefetch",
    "watermarks",
    "write_back",
]

LOW = 1 / 16
"""Of a tier's bytes: with less than that free or clean, pages are written down ahead of need."""
HIGH = 1 / 8
"""So much is free or clean afterwards."""
SCATTERED = 0.25
"""Fragmentation from which pages of one class are moved together even where no extent comes free."""

_ENDS = attrgetter("source", "target")


@dataclass(slots=True)
class Run:
    """Pages that lie side by side at both ends: one copy of len(pages) * page_bytes bytes."""

    source: int
    source_offset: int
    target: int
    target_offset: int
    page_bytes: int
    pages: list[Page] = field(default_factory=list)


class Watermarks(NamedTuple):
    low: int  # bytes
    high: int


def coalesce(hops: Iterable[Hop]) -> list[Run]:
    """The fewest contiguous runs of the hops' bytes, in order of their sources."""
    runs: list[Run] = []
    last = Run(-1, 0, -1, 0, 0)
    source_end = target_end = -1
    for hop in sorted(hops, key=_ENDS):
        (source, offset), (target, place), size = hop.source, hop.target, hop.bytes
        is_next = offset == source_end and place == target_end and size == last.page_bytes
        if is_next and source == last.source and target == last.target:
            last.pages.append(hop.page)
        else:
            last = Run(source, offset, target, place, size, [hop.page])
            runs.append(last)
        source_end, target_end = offset + size, place + size
    return runs


def watermarks(pool: PagePool, tier: int) -> Watermarks:
    """Bytes of the tier that should be free or droppable at once."""
    total = pool.tiers[tier].space.total_bytes
    return Watermarks(int(total * LOW), int(total * HIGH))


def droppable_bytes(pool: PagePool, tier: int) -> int:
    """Bytes that are free, or whose pages have a copy elsewhere or will soon."""
    space, leaving = pool.tiers[tier].space, pool.tiers[tier].leaving
    coming = sum(frames * space.frame_bytes(cls) for cls, frames in leaving.items())
    return space.free_bytes + pool.clean_bytes(tier) + coming


def write_back(
    pool: PagePool, tier: int, low_watermark: int, batch_bytes: int, admits: Callable[[Page], bool] | None = None
) -> list[Page]:
    """The coldest dirty pages of one class, to be stored below before there is pressure; none while `low_watermark` bytes are free or clean.

    Of at most `batch_bytes`, and until the high watermark is reached. Pages that `admits` refuses are left alone.
    """
    lack = low_watermark - droppable_bytes(pool, tier)
    if lack <= 0:
        return []
    wanted = min(batch_bytes, lack + watermarks(pool, tier).high - watermarks(pool, tier).low)
    level, size = pool.tiers[tier].level, 0
    chosen: list[Page] = []
    for page in pool.victims(tier, None, dirty=True):
        record = pool.classes[pool.cls(page)]
        if not any(below > level for below in record.levels) or (chosen and pool.cls(chosen[0]) != record.number):
            continue
        if admits is not None and not admits(page):
            continue
        page_bytes = record.page_bytes * pool.span(page)
        if chosen and size + page_bytes > wanted:
            break
        chosen.append(page)
        size += page_bytes
    return chosen


def prefetch(pool: PagePool, pages: Iterable[Page], level: Level, room_bytes: int) -> list[Page]:
    """Of the pages that are read next, in that order, those of one class to load to `level` from the level below, as far as `room_bytes` go."""
    chosen: list[Page] = []
    for page in pages:
        record, copies = pool.classes[pool.cls(page)], pool.columns.copies[page]
        if pool.moving(page) or copies & ((2 << level) - 1) or not copies >> (level + 1) & 1:
            continue
        if record.tiers[level] < 0 or (chosen and pool.cls(chosen[0]) != record.number):
            continue
        room_bytes -= record.page_bytes * pool.span(page)
        if room_bytes < 0:
            break
        chosen.append(page)
    return chosen


def defragment(pool: PagePool, tier: int, batch_bytes: int) -> list[Page]:
    """Pages of one class to be relocated to lower frames, the highest first chosen, so that free frames form runs and extents come free.

    Never pinned ones. Every page goes down, so that repeating it ends; it returns none where no extent would come free and the free frames
    are one run for the most part.
    """
    for cls in pool.tiers[tier].space.classes:
        pages = _pages_above(pool, tier, cls, batch_bytes) if _is_worth_it(pool, tier, cls) else []
        chosen = _that_find_a_place(pool, tier, cls, pages)
        if chosen:
            return chosen
    return []


def _is_worth_it(pool: PagePool, tier: int, cls: int) -> bool:
    space = pool.tiers[tier].space
    free, largest = space.own_free(cls)
    if not free:
        return False
    whole = max(space.extent_bytes // space.frame_bytes(cls), 1)
    return free >= whole or largest < free * (1 - SCATTERED)


def _pages_above(pool: PagePool, tier: int, cls: int, batch_bytes: int) -> list[Page]:
    """Evictable pages in the frames that would be empty, were all of the class packed together; the highest first."""
    space, owners, level = pool.tiers[tier].space, pool.tiers[tier].owners[cls], pool.tiers[tier].level
    end, size, last = space.packed_end(cls), 0, -1
    pages: list[Page] = []
    for extent in space.extents_of(cls):
        if size >= batch_bytes or (last >= 0 and last < end):
            break
        for frame in reversed(list(space.frames_in(extent)[1])):
            page = owners[frame] if frame < len(owners) else -1
            last = frame
            if frame < end or size >= batch_bytes:
                break
            if page in pool and pool.is_evictable(page, level) and not pool.pins(page) and page not in pages[-1:]:
                pages.append(page)
                size += space.frame_bytes(cls) * pool.span(page)
    return pages


def _that_find_a_place(pool: PagePool, tier: int, cls: int, pages: Sequence[Page]) -> list[Page]:
    """Those, ascending, for which lower frames are free; tried out, and undone."""
    space, level = pool.tiers[tier].space, pool.tiers[tier].level
    tried, chosen = [], []
    for page in reversed(pages):
        frame = space.allocate_below(cls, pool.span(page), pool.frame(page, level))
        if frame >= 0:
            tried.append((frame, pool.span(page)))
            chosen.append(page)
    for frame, span in tried:
        space.free_run(cls, frame, span)
    return chosen


def admit(page_bytes: int, store_ns: float, load_ns: float, recompute_ns: float, reuse_probability: float) -> bool:
    """Whether a page is worth storing: writing it and, if it is read again, loading it costs less than recomputing it then."""
    if page_bytes <= 0 or not 0 <= reuse_probability <= 1:
        return False
    return store_ns + reuse_probability * load_ns < reuse_probability * recompute_ns
