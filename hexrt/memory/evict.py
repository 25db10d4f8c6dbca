"""Whom to evict, so that pages can be made in a tier.

Owns nothing: `make_room` looks at a page pool and names the pages to drop, to store below and to discard; `plan` hands it on. Pages with another
copy go first, then such as can be stored, then such as can be recomputed; an extent cut for other classes goes as a whole, where all of it
is colder than what would go else. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from hexrt.memory.pool import Level, Page, PagePool

EXTENTS = 16
"""Extents of other classes that are looked at in one call."""
MERGED = 4096
"""Victims that are gone through for the coldest extents of others."""


@dataclass(slots=True)
class Room:
    """Pages to drop at once, since another copy is there; to store one level down; to drop though it is the last copy, for recomputing.

    `frames`: of the wanted class, that come free by it; an extent of others gives as many as fit into it, however few pages it held.
    """

    drops: list[Page] = field(default_factory=list)
    stores: list[Page] = field(default_factory=list)
    discards: list[Page] = field(default_factory=list)
    frames: int = field(default=0, compare=False)


@dataclass(slots=True)
class _Search:
    """One call of `make_room`: what is still needed, in frames of the class, and what may be stored below."""

    pool: PagePool
    tier: int
    cls: int
    may_discard: bool
    admits: Callable[[Page], bool] | None
    need: int
    room: Room = field(default_factory=Room)
    below: dict[int, int] = field(default_factory=dict)  # class -> pages that the tier below can still take

    @property
    def level(self) -> Level:
        return self.pool.tiers[self.tier].level

    def can_store(self, page: Page) -> bool:
        """Whether the tier below has room for one page more, once it has evicted what it can."""
        if self.is_refused(page):
            return False
        cls = self.pool.cls(page)
        if cls not in self.below:
            self.below[cls] = self._room_below(cls)
        return self.below[cls] >= self.pool.span(page)

    def is_refused(self, page: Page) -> bool:
        """Whether it is worth less than storing it takes: it can be computed again."""
        recomputable = self.pool.classes[self.pool.cls(page)].recomputable
        return recomputable and self.admits is not None and not self.admits(page)

    def _room_below(self, cls: int) -> int:
        record = self.pool.classes[cls]
        tier = next((record.tiers[level] for level in record.levels if level > self.level), -1)
        if tier < 0 or self.pool.tiers[tier].closed:
            return 0
        most = max(self.need, 1)
        have = self.pool.room(cls, tier)
        if have >= most:
            return have
        deeper = make_room(self.pool, tier, cls, most, self.may_discard)
        return (
            have
            + deeper.frames
            + self.pool.tiers[tier].leaving.get(record.frame_classes[self.pool.tiers[tier].level], 0)
        )

    def can_go(self, page: Page) -> bool:
        return (
            not self.is_last(page)
            or self.can_store(page)
            or (self.may_discard and self.pool.classes[self.pool.cls(page)].recomputable)
        )

    def is_last(self, page: Page) -> bool:
        copies = self.pool.columns.copies[page]
        return not copies & (copies - 1)

    def take(self, page: Page) -> None:
        if not self.is_last(page):
            self.room.drops.append(page)
        elif self.can_store(page):
            self.below[self.pool.cls(page)] -= self.pool.span(page)
            self.room.stores.append(page)
        else:
            self.room.discards.append(page)


def make_room(
    pool: PagePool,
    tier: int,
    cls: int,
    count: int,
    may_discard: bool,
    span: int = 1,
    admits: Callable[[Page], bool] | None = None,
) -> Room:
    """Pages whose going lets `count` pages of `span` frames be made; the room that it makes may be less. Empty where there is room, or will be.

    A dirty page that `admits` refuses is not stored but discarded, where it can be recomputed.
    """
    where = pool.tiers[tier]
    space, frame_class = where.space, pool.classes[cls].frame_classes[where.level]
    leaving = where.leaving[frame_class]
    need = count * span - leaving - (0 if where.closed else space.available(frame_class))
    if need <= 0:
        if span == 1 or leaving or pool.can_create(cls, count, span, tier):
            return Room()
        need = span  # frames enough, and no run of them: as many again, the next call goes on
    asked = need
    has_others = space.is_shared(frame_class)
    room = Room([] if has_others else pool.coldest_clean(tier, cls, need), [], [])
    if room.drops:
        need -= sum(map(pool.columns.span.__getitem__, room.drops))
        room.frames = asked - need
        if need <= 0:
            return room
    search = _Search(pool, tier, cls, may_discard, admits, need, room)
    if has_others:
        _take_cold_extents(search)
    _take_own(search)
    if has_others and search.need > 0:
        _take_extents(search, None)
    room.frames = asked - search.need
    return room


def _take_own(search: _Search) -> None:
    """Frames of the right size: clean ones, storable ones, recomputable ones, each in order of coldness."""
    pool, tier, cls = search.pool, search.tier, search.cls
    taken = {*search.room.drops, *search.room.stores, *search.room.discards}
    for page in pool.victims(tier, cls, dirty=False):
        if search.need <= 0:
            return
        if page not in taken:
            search.take(page)
            search.need -= pool.span(page)
    for discarding in (False, True):
        if discarding and not search.may_discard:
            return
        for page in pool.victims(tier, cls, dirty=True):
            if search.need <= 0:
                return
            if page in taken:
                continue
            if discarding:
                if not pool.classes[pool.cls(page)].recomputable:
                    continue
                search.room.discards.append(page)
            elif search.is_refused(page):
                if not search.may_discard:
                    continue
                search.room.discards.append(page)
            elif search.can_store(page):
                search.take(page)
            elif not any(search.below.values()):
                break  # nothing more goes below
            else:
                continue
            taken.add(page)
            search.need -= pool.span(page)


def _take_cold_extents(search: _Search) -> None:
    """Extents of others, all of whose pages are colder than the coldest of the class's own."""
    own = next(search.pool.victims(search.tier, search.cls), None)
    if own is not None:
        _take_extents(search, search.pool.coldness(own, search.level))


def _take_extents(search: _Search, limit: tuple[int, int] | None) -> None:
    pool, tier = search.pool, search.tier
    space = pool.tiers[tier].space
    own = pool.classes[search.cls].frame_classes[search.level]
    frames = max(space.extent_bytes // space.frame_bytes(own), 1)
    for extent in _cold_extents(search, own, limit):
        if search.need <= 0:
            return
        pages = _evictable_pages(search, extent, limit)
        taken = {*search.room.drops, *search.room.stores, *search.room.discards}
        for page in pages:
            if page not in taken:
                search.take(page)
        search.need -= frames if pages else 0


def _cold_extents(search: _Search, own: int, limit: tuple[int, int] | None) -> Iterator[int]:
    """Extents of other classes, in order of their coldest page."""
    pool, level, seen = search.pool, search.level, set()
    space = pool.tiers[search.tier].space
    for page in islice(pool.victims(search.tier), MERGED):
        if limit is not None and pool.coldness(page, level) >= limit:
            return
        cls = pool.classes[pool.cls(page)].frame_classes[level]
        extent = space.extent_of(cls, pool.frame(page, level))
        if cls != own and extent not in seen:
            seen.add(extent)
            yield extent
            if len(seen) == EXTENTS:
                return


def _evictable_pages(search: _Search, extent: int, limit: tuple[int, int] | None) -> Iterable[Page]:
    """All pages in the extent; none where one of them cannot go, or is as hot as `limit`."""
    pool, level, tier = search.pool, search.level, search.pool.tiers[search.tier]
    cls, frames = tier.space.frames_in(extent)
    owners, pages = tier.owners.get(cls), dict[Page, None]()
    for frame in frames:
        page = owners[frame] if owners is not None and frame < len(owners) else -1
        if page not in pool or not pool.is_evictable(page, level) or not search.can_go(page):
            return ()
        if limit is not None and pool.coldness(page, level) >= limit:
            return ()
        pages[page] = None
    return pages
