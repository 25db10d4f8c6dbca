"""A dictionary model of the page pool, with bytes: what each granule of each tier would hold, had the hosts carried out the moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hexrt.memory import plan
from hexrt.memory.frames import GRANULE, FrameSpace
from hexrt.memory.lru import Policy
from hexrt.memory.pool import Hop, Level, Move, Page, PagePool, PageState

DEVICE, OTHER, HOST, NVME = range(4)


@dataclass
class Told:
    """What the model knows of one page."""

    cls: int
    span: int
    value: int
    refs: int = 1
    pins: int = 1
    copies: set[int] = field(default_factory=set)
    move: int = 0
    stale: bool = False


@dataclass
class Under:
    move: Move
    source: int  # level; -1: a new page's
    late: bool  # its bytes go at the commit, not at the beginning


class Model:
    """Does everything twice, in the pool and in dictionaries, and compares them in `check`."""

    def __init__(self, policy: Policy) -> None:
        extent = 8 * GRANULE
        self.pool = pool = PagePool(policy)
        sizes = (
            ("cpu:0", Level.DEVICE, 20),
            ("cpu:1", Level.DEVICE, 12),
            ("host", Level.HOST, 40),
            ("nvme", Level.NVME, 64),
        )
        for name, level, granules in sizes:
            pool.add_tier(name, level, FrameSpace(granules * GRANULE, extent))
        self.classes = (
            pool.add_class(DEVICE, GRANULE, True),
            pool.add_class(DEVICE, 3 * GRANULE, True),
            pool.add_class(OTHER, 2 * GRANULE, False),
            pool.add_class(HOST, GRANULE, False),
        )
        self.pages: dict[Page, Told] = {}
        self.moves: dict[int, Under] = {}
        self.bytes: dict[tuple[int, int], int] = {}
        self.values = 0

    # --- bytes ------------------------------------------------------------------------------------------------------

    def granules(self, cls: int, place: tuple[int, int], span: int) -> list[tuple[int, int]]:
        size = self.pool.page_bytes(cls) * span
        return [(place[0], place[1] // GRANULE + i) for i in range(size // GRANULE)]

    def fill(self, page: Page, place: tuple[int, int]) -> None:
        told = self.pages[page]
        self.bytes.update(dict.fromkeys(self.granules(told.cls, place, told.span), told.value))

    def carry(self, hop: Hop) -> None:
        told = self.pages[hop.page]
        if hop.source[0] < 0:
            self.fill(hop.page, hop.target)
            return
        there = self.granules(told.cls, hop.target, told.span)
        here = self.granules(told.cls, hop.source, told.span)
        self.bytes.update(zip(there, [self.bytes[granule] for granule in here], strict=True))

    def new_value(self) -> int:
        self.values += 1
        return self.values

    def top(self, page: Page) -> int:
        return int(self.pool.classes[self.pages[page].cls].level)

    def place(self, page: Page, level: int) -> tuple[int, int]:
        return self.pool.classes[self.pages[page].cls].tiers[level], self.pool.offset(page, Level(level))

    # --- what is done -----------------------------------------------------------------------------------------------

    def create(self, cls: int, count: int, span: int) -> list[Page]:
        pages = list(self.pool.create(cls, count, span))
        for page in pages:
            assert page not in self.pages
            self.pages[page] = Told(cls, span, self.new_value())
            self.pages[page].copies = {self.top(page)}
            self.fill(page, self.place(page, self.top(page)))
        return pages

    def open(self, move: Move, source: int, late: bool) -> None:
        self.moves[move.number] = Under(move, source, late)
        for hop in move.hops:
            self.pages[hop.page].move = move.number
            if not late:
                self.carry(hop)

    def adopt(self, cls: int, span: int, late: bool) -> None:
        page, move = self.pool.adopt(cls, span)
        self.pages[page] = Told(cls, span, self.new_value())
        self.open(move, -1, late)

    def cow(self, page: Page, late: bool) -> None:
        source = self.pages[page]
        new, move = self.pool.cow(page)
        source.pins += 1
        self.pages[new] = Told(source.cls, source.span, source.value)
        self.open(move, -1, late=False)  # the source may be written to by whoever had it pinned before

    def begin(self, pages: Sequence[Page], level: int, late: bool) -> Move:
        copies = self.pages[pages[0]].copies
        source = level if level in copies else max((c for c in copies if c < level), default=min(copies))
        move = self.pool.begin(pages, Level(level))
        self.open(move, source, late)
        return move

    def end(self, number: int, faults: frozenset[Page], bad_source: bool, aborted: bool) -> None:
        under = self.moves.pop(number)
        if under.late and not aborted:
            for hop in under.move.hops:
                if hop.page not in faults:
                    self.carry(hop)
        if aborted:
            self.pool.abort(under.move)
            faults, bad_source = frozenset(hop.page for hop in under.move.hops), False
        else:
            self.pool.commit(under.move, faults, {p: p * 7 for p in self.pages}, bad_source)
        for hop in under.move.hops:
            self.settle(hop.page, under, hop.page in faults, bad_source)

    def settle(self, page: Page, under: Under, faulted: bool, bad_source: bool) -> None:
        told, level = self.pages[page], int(under.move.level)
        told.move = 0
        if not faulted and not told.stale and not (under.source == level and told.pins):
            told.copies.add(level)
        if faulted and bad_source and under.source >= 0:
            told.copies.discard(under.source)
        if told.stale:
            told.copies &= {self.top(page)}
            told.stale = False
        if under.move.copy_of in self.pages and under.source < 0 and under.move.hops[0].source[0] >= 0:
            self.pages[under.move.copy_of].pins -= 1
            self.bury(under.move.copy_of)
        self.bury(page)

    def bury(self, page: Page) -> None:
        told = self.pages[page]
        if not (told.refs or told.pins or told.move):
            del self.pages[page]

    def write(self, page: Page) -> None:
        self.pool.write((page,))
        told = self.pages[page]
        told.value = self.new_value()
        told.stale = bool(told.move)
        if not told.stale:
            told.copies = {self.top(page)}
        self.fill(page, self.place(page, self.top(page)))

    def tier_lost(self, tier: int) -> None:
        level = int(self.pool.tiers[tier].level)
        gone = [n for n, u in self.moves.items() if tier in (u.move.hops[0].source[0], u.move.hops[0].target[0])]
        lost = set(self.pool.tier_lost(tier))
        for number in gone:
            under = self.moves.pop(number)
            for hop in under.move.hops:
                self.settle(hop.page, under, faulted=True, bad_source=False)
        expected = set()
        for page, told in self.pages.items():
            if level in told.copies and self.pool.classes[told.cls].tiers[level] == tier:
                told.copies.discard(level)
                expected |= {page} if not told.copies else set()
        assert lost == expected

    def drop(self, page: Page, level: int) -> None:
        self.pool.drop(page, Level(level))
        self.pages[page].copies.discard(level)

    def make_room(self, tier: int, cls: int, count: int, span: int) -> None:
        pool, level = self.pool, int(self.pool.tiers[tier].level)
        room = plan.make_room(pool, tier, cls, count, may_discard=True, span=span)
        named = [*room.drops, *room.stores, *room.discards]
        assert len(named) == len(set(named))
        if pool.can_create(cls, count, span, tier):
            assert not named
        for page in room.drops:
            assert len(self.pages[page].copies) > 1
        for page in (*room.drops, *room.discards):
            self.drop(page, level)
        groups: dict[int, list[Page]] = {}
        for page in room.stores:
            assert self.pages[page].copies == {level}
            groups.setdefault(pool.cls(page), []).append(page)
        for group in groups.values():
            if pool.can_create(pool.cls(group[0]), sum(map(pool.span, group)), 1, NVME if level else HOST):
                self.try_begin(group, level + 1)

    def try_begin(self, pages: Sequence[Page], level: int) -> None:
        if all(self.pool.span(page) == 1 for page in pages) or len(pages) == 1:
            page = pages[0]
            tier = self.pool.classes[self.pages[page].cls].tiers[level]
            if not self.pool.can_create(self.pool.cls(page), len(pages), self.pool.span(page), tier):
                return
            self.begin(pages, level, late=False)

    # --- comparing --------------------------------------------------------------------------------------------------

    def evictable(self, page: Page, level: int) -> bool:
        told = self.pages[page]
        held = told.pins and (level == self.top(page) or self.top(page) not in told.copies)
        return level in told.copies and not told.move and not held

    def state(self, page: Page) -> PageState:
        told, top = self.pages[page], self.top(page)
        if not told.move:
            return PageState.RESIDENT if top in told.copies else PageState.ABSENT
        under = self.moves[told.move]
        return PageState.STORING if 0 <= under.source <= under.move.level else PageState.LOADING

    def check(self) -> None:
        pool = self.pool
        pool.check_integrity()
        assert pool.columns.live == len(self.pages)
        assert pool.open_moves() == set(self.moves)
        for page, told in self.pages.items():
            assert (pool.refs(page), pool.pins(page), pool.span(page)) == (told.refs, told.pins, told.span)
            assert pool.state(page) is self.state(page)
            assert pool.is_lost(page) == (not told.copies and not told.move)
            valid = told.copies & {self.top(page)} if told.stale else told.copies
            for level in Level:
                assert pool.has(page, level) == (level in valid), pool.story(page)
            for at in valid:
                held = {self.bytes[g] for g in self.granules(told.cls, self.place(page, at), told.span)}
                assert held == {told.value}, pool.story(page)
        for tier in range(len(pool.tiers)):
            self.check_victims(tier)

    def check_victims(self, tier: int) -> None:
        level = int(self.pool.tiers[tier].level)
        here = [
            p
            for p, t in self.pages.items()
            if self.pool.classes[t.cls].tiers[level] == tier and self.evictable(p, level)
        ]
        assert sorted(self.pool.victims(tier)) == sorted(here)
        assert set(self.pool.victims(tier, None, dirty=True)) == {p for p in here if len(self.pages[p].copies) == 1}
        buckets = [self.pool.columns.bucket[page] for page in self.pool.victims(tier)]
        assert buckets == sorted(buckets)
