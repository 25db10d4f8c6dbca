"""Logical pages over the tiers of one machine: where their copies lie, who counts on them, and what may be evicted.

Owns the tiers' frames, the table of pages and every open move. It decides nothing by itself (`plan` proposes, the keeper chooses) and moves no
bytes: a move is begun (its target frames are reserved), carried out by a host, and then committed or aborted; between the two its pages are
neither evicted nor moved. One owner, the daemon's loop; every method does the whole of what it says or changes nothing. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType

from hexrt.errors import InvariantViolation, OutOfMemory
from hexrt.memory import audit
from hexrt.memory.columns import ABSENT, DEAD, LOADING, RESIDENT, STORING, Level, Page, PageState
from hexrt.memory.copies import Copies
from hexrt.memory.frames import GRANULE
from hexrt.memory.lru import MAX_LISTS, NEVER, Lru, NextUse, Policy, relink
from hexrt.memory.tiers import NO_PAGE, NOWHERE, Hop, Move, PageClass, Tier, TierStatistics

__all__ = [
    "GRANULE", "NEVER", "NOWHERE", "Hop", "Level", "Lru", "Move", "NextUse", "Page", "PagePool", "PageState", "Policy",
    "Tier", "TierStatistics",
]  # fmt: skip

_NO_SUMS: Mapping[Page, int] = MappingProxyType({})
_ALL = 0b111
_NOBODY: frozenset[Page] = frozenset()


class PagePool(Copies):
    def __init__(self, policy: Policy | None = None) -> None:
        super().__init__(policy)
        self._numbers = 0
        self._unknown = self.policy.bucket(None)

    # --- making pages -----------------------------------------------------------------------------------------------

    def create(self, cls: int, count: int, span: int = 1) -> array[Page]:
        """New pages of `span` contiguous frames: RESIDENT at the top, no copy below, one reference and one pin each.

        Raises OutOfMemory, with nothing changed, where the top tier has not the frames for all of them.
        """
        record = self.classes[cls]
        frames = self._allocate(record, record.level, (span,) * count)
        columns, level = self.columns, record.level
        columns.reserve(count)
        pages = array("I")
        for frame in frames:
            page = columns.take(cls, span, self._unknown)
            columns.refs[page] = columns.pins[page] = 1
            columns.state[page] = RESIDENT
            self._set_copy(record, page, level, frame)
            pages.append(page)
        self.tiers[record.top].pinned += count
        return pages

    def adopt(self, cls: int, span: int = 1) -> tuple[Page, Move]:
        """A new page that is filled from outside: LOADING, one reference and one pin; its only hop comes from NOWHERE. Raises OutOfMemory."""
        record = self.classes[cls]
        return self._new_in_move(record, span, (NOWHERE, 0))

    def cow(self, page: Page) -> tuple[Page, Move]:
        """A private copy of a RESIDENT page in a new one: LOADING, one reference and one pin. The source stays pinned until the move's end.

        Raises OutOfMemory. Where the move fails, the new page stays, lost.
        """
        record = self.classes[self._cls(page)]
        if not self.columns.copies[page] >> record.level & 1:
            raise InvariantViolation(f"what is to be copied is not at the top: {self.story(page)}")
        new, move = self._new_in_move(
            record, self.columns.span[page], (record.top, self.offset(page, record.level)), page
        )
        self.pin((page,))
        return new, move

    def _new_in_move(
        self, record: PageClass, span: int, source: tuple[int, int], copy_of: Page = NO_PAGE
    ) -> tuple[Page, Move]:
        (frame,) = self._allocate(record, record.level, (span,))
        columns = self.columns
        columns.reserve(1)
        page = columns.take(record.number, span, self._unknown)
        columns.refs[page] = columns.pins[page] = 1
        self.tiers[record.top].pinned += 1
        columns.to(page, LOADING)
        hop = Hop(page, source, (record.top, frame * record.page_bytes), span * record.page_bytes)
        return page, self._open((hop,), record.level, copy_of)

    def _allocate(self, record: PageClass, level: int, spans: Sequence[int]) -> Sequence[int]:
        """A first frame for each span, ascending where they are equal."""
        tier = self.tiers[record.tiers[level]]
        if tier.closed:
            raise OutOfMemory(f"{tier.name} takes no pages: {tier.degraded}", "pages")
        space, frame_class = tier.space, record.frame_classes[level]
        if len(spans) == 1:
            return (space.allocate_run(frame_class, spans[0]),)
        if spans.count(1) == len(spans):
            return space.allocate(frame_class, len(spans))
        return space.allocate_runs(frame_class, spans)

    # --- counting ---------------------------------------------------------------------------------------------------

    def share(self, pages: Iterable[Page]) -> None:
        """One reference more to each."""
        for page in pages:
            self._cls(page)
            self.columns.refs[page] += 1

    def release(self, pages: Iterable[Page]) -> None:
        """One reference less to each. A page with no reference, pin or move is gone, and its number may be used again."""
        columns = self.columns
        for page in pages:
            self._cls(page)
            if not columns.refs[page]:
                raise InvariantViolation(f"released too often: {self.story(page)}")
            columns.refs[page] -= 1
            if not columns.refs[page] and not columns.pins[page] and not columns.moves[page]:
                self._forget(page)

    def pin(self, pages: Iterable[Page]) -> None:
        """A pinned page keeps its place at the top; where it is not there, its copies below stay until it is."""
        columns = self.columns
        for page in pages:
            record = self.classes[self._cls(page)]
            columns.pins[page] += 1
            if columns.pins[page] == 1:
                self.tiers[record.top].pinned += 1
                self._relink(record, page)

    def unpin(self, pages: Iterable[Page]) -> None:
        """Takes one pin off each; the last one counts as a use."""
        columns = self.columns
        for page in pages:
            record = self.classes[self._cls(page)]
            if not columns.pins[page]:
                raise InvariantViolation(f"unpinned too often: {self.story(page)}")
            columns.pins[page] -= 1
            if columns.pins[page]:
                continue
            self.tiers[record.top].pinned -= 1
            if not columns.refs[page] and not columns.moves[page]:
                self._forget(page)
            else:
                self._relink(record, page, fresh=_ALL)

    def touch(self, pages: Iterable[Page]) -> None:
        """Counts a use of each page."""
        columns, classes = self.columns, self.classes
        for page in pages:
            copies = columns.copies[page]
            for bit, _, lists in classes[self._cls(page)].orders:
                if copies & bit:
                    lists.touch(page)

    def set_next_use(self, pages: Iterable[Page], steps: int | None) -> None:
        """Says how many steps pass until the pages are read again: None is unknown, NEVER never."""
        bucket, columns = self.policy.bucket(steps), self.columns
        for page in pages:
            record = self.classes[self._cls(page)]
            if columns.bucket[page] != bucket:
                columns.bucket[page] = bucket
                self._relink(record, page, fresh=_ALL)

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self, pages: Iterable[Page]) -> None:
        """The content at the top changes: copies below are void. The pages must be there, and pinned."""
        columns = self.columns
        for page in pages:
            record = self.classes[self._cls(page)]
            if not columns.pins[page] or not columns.copies[page] >> record.level & 1:
                raise InvariantViolation(f"written, but not at the top or not pinned: {self.story(page)}")
            if columns.moves[page]:
                self._stale.add(page)
            elif columns.copies[page] != 1 << record.level:
                self._void_below(record, page)
                self._relink(record, page)

    def _void_below(self, record: PageClass, page: Page) -> None:
        for level in record.levels:
            if level > record.level and self.columns.copies[page] >> level & 1:
                self._drop_copy(record, page, level)

    # --- moves ------------------------------------------------------------------------------------------------------

    def begin(self, pages: Sequence[Page], level: Level) -> Move:
        """Reserves a frame at `level` for each page and opens a move there, from the nearest copy above, else the nearest below.

        With a copy at `level` already, the page is relocated to a lower frame of the same tier (its pins must be 0). All hops go between the
        same two tiers. A page that is pinned or written to before the commit is not relocated after all. Raises OutOfMemory.
        """
        if not pages:
            raise InvariantViolation("a move of no pages")
        source, columns = self._source(pages[0], level), self.columns
        record = self.classes[columns.cls[pages[0]]]
        if len(pages) > 1:
            self._check_alike(pages, record.number, source, level)
        if source == level:
            hops, state = self._relocation(pages, level), STORING
        else:
            hops, state = self._passage(record, pages, source, level), LOADING if level < source else STORING
        if level > source:
            leaving, frame_class = self.tiers[record.tiers[source]].leaving, record.frame_classes[source]
            for page in pages:
                leaving[frame_class] += columns.span[page]
        for page in pages:
            columns.to(page, state)
        return self._open(hops, level)

    def _passage(self, record: PageClass, pages: Sequence[Page], source: int, level: int) -> tuple[Hop, ...]:
        """Hops in order of their source, to frames in the same order, so that they make few copies."""
        span, place, size = self.columns.span, self.columns.frames[source], record.page_bytes
        start, end = record.tiers[source], record.tiers[level]
        if len(pages) == 1:
            (page,) = pages
            (frame,) = self._allocate(record, level, (span[page],))
            return (Hop(page, (start, place[page] * size), (end, frame * size), span[page] * size),)
        order = sorted(pages, key=place.__getitem__)
        frames = self._allocate(record, level, [span[page] for page in order])
        return tuple([
            Hop(page, (start, place[page] * size), (end, frame * size), span[page] * size)
            for page, frame in zip(order, frames, strict=True)
        ])  # fmt: skip

    def _relocation(self, pages: Sequence[Page], level: Level) -> tuple[Hop, ...]:
        """Hops to lower frames, in the order given."""
        columns = self.columns
        hops: list[Hop] = []
        for page in pages:
            record = self.classes[columns.cls[page]]
            number, size, span, old = (
                record.tiers[level],
                record.page_bytes,
                columns.span[page],
                columns.frames[level][page],
            )
            frame = self.tiers[number].space.allocate_below(record.frame_classes[level], span, old)
            if frame < 0:
                for hop in hops:
                    other = self.classes[columns.cls[hop.page]]
                    self._free_target(other, level, hop)
                raise OutOfMemory(f"no lower frames than {old} are free in {self.tiers[number].name}", "pages")
            hops.append(Hop(page, (number, old * size), (number, frame * size), span * size))
        return tuple(hops)

    def _open(self, hops: tuple[Hop, ...], level: Level, copy_of: Page = NO_PAGE) -> Move:
        self._numbers = number = self._numbers % 0xFFFF_FFFF + 1
        move = self.moves[number] = Move(number, hops, level, copy_of)
        columns = self.columns
        for hop in hops:
            page = hop.page
            columns.moves[page] = number
            for lists in columns.lists:
                if lists.member[page + MAX_LISTS]:
                    lists.remove(page)
        return move

    def commit(
        self,
        move: Move,
        faults: AbstractSet[Page] = _NOBODY,
        sums: Mapping[Page, int] = _NO_SUMS,
        bad_source: bool = False,
    ) -> None:
        """The copies are made, but those of `faults`, which lose their source too with `bad_source`. `sums` of pages written to NVME."""
        self._take_off(move)
        count = size = 0
        for hop in move.hops:
            page = hop.page
            if sums and page in sums:
                self.columns.sums[page] = sums[page]
            if faults and page in faults:
                self._end(move, hop, arrived=False, lose_source=bad_source)
            else:
                count += 1
                size += hop.bytes
                self._end(move, hop, arrived=True, lose_source=False)
        source, target = move.hops[0].source[0], self.tiers[move.hops[0].target[0]]
        target.copies_in += count
        target.bytes_in += size
        if source >= 0:
            self.tiers[source].copies_out += count
            self.tiers[source].bytes_out += size
        if faults:
            (self.tiers[source] if bad_source and source >= 0 else target).faults += len(faults)

    def abort(self, move: Move) -> None:
        """As if it had never begun; a page that was to be made by it stays, lost."""
        self._take_off(move)
        for hop in move.hops:
            self._end(move, hop, arrived=False, lose_source=False)

    def _take_off(self, move: Move) -> None:
        if self.moves.pop(move.number, None) is not move:
            raise InvariantViolation(f"move {move.number} is not open")

    def _end(self, move: Move, hop: Hop, arrived: bool, lose_source: bool) -> None:
        columns, page, level = self.columns, hop.page, move.level
        record = self.classes[columns.cls[page]]
        columns.moves[page] = 0
        is_new = hop.source[0] < 0 or move.copy_of != NO_PAGE  # the page has no copy yet
        source = NOWHERE if is_new else self.tiers[hop.source[0]].level
        if not is_new and level > source:
            self.tiers[hop.source[0]].leaving[record.frame_classes[source]] -= columns.span[page]
        gone, stale = not columns.refs[page] and not columns.pins[page], page in self._stale
        if gone or stale or not arrived or (source == level and columns.pins[page]):
            self._free_target(record, level, hop)
        else:
            if source == level:
                self._drop_copy(record, page, level)
            self._set_copy(record, page, level, hop.target[1] // record.page_bytes)
        if lose_source and not is_new:
            self._drop_copy(record, page, source)
        if stale:
            self._stale.discard(page)
            self._void_below(record, page)
        if move.copy_of != NO_PAGE:
            self.unpin((move.copy_of,))
        if gone:
            self._forget(page)
        else:
            # a page that was loaded counts as used in all its tiers
            self._settle(record, page, 0 if source == level else 1 << level if level > source else _ALL)

    def _free_target(self, record: PageClass, level: Level, hop: Hop) -> None:
        frame, span = hop.target[1] // record.page_bytes, self.columns.span[hop.page]
        self.tiers[hop.target[0]].space.free_run(record.frame_classes[level], frame, span)

    # --- losing copies ----------------------------------------------------------------------------------------------

    def drop(self, page: Page, level: Level) -> None:
        """Frees the copy at `level` of an evictable page: another copy must be there, or the class be recomputable (the page may be lost then)."""
        columns = self.columns
        if not 0 <= page < len(columns.cls) or not columns.lists[level].member[page + MAX_LISTS]:
            raise InvariantViolation(f"cannot be evicted from {Level(level).name}: {self.story(page)}")
        record, only = self.classes[columns.cls[page]], columns.copies[page] == 1 << level
        tier = self.tiers[record.tiers[level]]
        if not only:
            tier.evictions += 1
        elif record.recomputable:
            tier.discards += 1
        else:
            raise InvariantViolation(f"the last copy cannot be dropped: {self.story(page)}")
        self._drop_copy(record, page, level)
        if level == record.level:
            columns.to(page, ABSENT)
        copies, top = columns.copies[page], 1 << record.level
        free = copies if not columns.pins[page] else copies & ~top if copies & top else 0
        relink(record.orders, page, free, 2 * columns.bucket[page] + (not copies & (copies - 1)), 0)

    def tier_lost(self, tier: int) -> list[Page]:
        """All copies in the tier are gone, and moves that touch it are aborted; the tier stays. Returns the pages that have no copy any more."""
        for move in [m for m in self.moves.values() if tier in (m.hops[0].source[0], m.hops[0].target[0])]:
            self.abort(move)
        columns, level, lost = self.columns, self.tiers[tier].level, []
        for page in range(len(columns)):
            if columns.cls[page] == DEAD or not columns.copies[page] >> level & 1:
                continue
            record = self.classes[columns.cls[page]]
            if record.tiers[level] == tier:
                self._drop_copy(record, page, level)
                if not columns.moves[page]:
                    self._settle(record, page)
                if not columns.copies[page]:
                    lost.append(page)
        return lost

    def _forget(self, page: Page) -> None:
        """The page has no reference, pin or move: its copies and its number are free."""
        columns = self.columns
        record = self.classes[columns.cls[page]]
        for lists in columns.lists:
            if lists.list_of(page):
                lists.remove(page)
        for level in record.levels:
            if columns.copies[page] >> level & 1:
                self._drop_copy(record, page, level)
        columns.give_back(page)

    # --- looking in -------------------------------------------------------------------------------------------------

    def statistics(self) -> tuple[TierStatistics, ...]:
        """One record a tier."""
        return audit.statistics(self)

    def check_integrity(self) -> None:
        """Raises InvariantViolation unless free + held == total in every tier, and owners, counts, lists, states and moves agree."""
        audit.check_integrity(self)
