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
from hexrt.memory.copies import LEVELS_OF
from hexrt.memory.counts import ALL, Counts
from hexrt.memory.frames import GRANULE
from hexrt.memory.lru import MAX_LISTS, NEVER, Lru, NextUse, Policy
from hexrt.memory.tiers import NO_PAGE, NOWHERE, Hop, Move, PageClass, Tier, TierStatistics

__all__ = [
    "GRANULE", "NEVER", "NOWHERE", "Hop", "Level", "Lru", "Move", "NextUse", "Page", "PagePool", "PageState", "Policy",
    "Tier", "TierStatistics",
]  # fmt: skip

_NO_SUMS: Mapping[Page, int] = MappingProxyType({})
_NOBODY: frozenset[Page] = frozenset()


class PagePool(Counts):
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
        for _ in frames:
            page = columns.take(cls, span, self._unknown)
            columns.refs[page] = columns.pins[page] = 1
            pages.append(page)
        self._set_copies(record, pages, level, frames)
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
        hop = Hop(page, source, (record.top, frame * record.page_bytes), span * record.page_bytes)
        return page, self._open((page,), LOADING, 0, (hop,), record.level, (), copy_of)

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
            else:
                self._void_below(record, page)

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
        held = columns.copies[pages[0]] if len(pages) == 1 else self._check_movable(pages, source, level)
        if source == level:
            return self._open(tuple(pages), STORING, held, self._relocation(pages, level), level)
        pages, frames, hops = self._passage(record, pages, source, level)
        if level > source:
            self.tiers[record.tiers[source]].leaving[record.frame_classes[source]] += self._frames_of(pages)
        return self._open(pages, LOADING if level < source else STORING, held, hops, level, frames)

    def _passage(
        self, record: PageClass, pages: Sequence[Page], source: int, level: int
    ) -> tuple[Sequence[Page], Sequence[int], tuple[Hop, ...]]:
        """The pages in order of their source, frames for them in the same order, so that they make few copies, and the hops."""
        span, place, size = self.columns.span, self.columns.frames[source], record.page_bytes
        start, end = record.tiers[source], record.tiers[level]
        if len(pages) == 1:
            (page,) = pages
            frames = self._allocate(record, level, (span[page],))
            hop = Hop(page, (start, place[page] * size), (end, frames[0] * size), span[page] * size)
            return (page,), frames, (hop,)
        order = sorted(pages, key=place.__getitem__)
        frames = self._allocate(record, level, [span[page] for page in order])
        return order, frames, tuple([
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

    def _open(
        self,
        pages: Sequence[Page],
        state: int,
        held: int,
        hops: tuple[Hop, ...],
        level: Level,
        frames: Sequence[int] = (),
        copy_of: Page = NO_PAGE,
    ) -> Move:
        """`held` are the levels, as bits, at which some of the pages may be in lists."""
        self._numbers = number = self._numbers % 0xFFFF_FFFF + 1
        move = self.moves[number] = Move(number, hops, level, copy_of, pages, frames)
        columns = self.columns
        columns.enter(pages, number, state)
        for at in LEVELS_OF[held]:
            columns.lists[at].take_out(pages)
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
        for page in sums or ():
            self.columns.sums[page] = sums[page]
        hops = move.hops
        source, target = hops[0].source[0], self.tiers[hops[0].target[0]]
        if faults or not self._arrive(move, source):
            for hop in hops:
                is_good = hop.page not in faults
                self._end(move, hop, arrived=is_good, lose_source=bad_source and not is_good)
        if faults:
            hops = tuple([hop for hop in hops if hop.page not in faults])
        count, size = len(hops), hops[0].bytes if len(hops) == 1 else sum([hop.bytes for hop in hops])
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
            self._set_copies(record, (page,), level, (hop.target[1] // record.page_bytes,))
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
            columns.state[page] = RESIDENT if columns.copies[page] >> record.level & 1 else ABSENT
            self._enlist((page,), 0 if source == level else 1 << level if level > source else ALL)

    def _arrive(self, move: Move, number: int) -> bool:
        """Ends all hops together, as nearly all moves end; False, with nothing changed, where they must be ended one by one."""
        if self._stale or not move.frames:
            return False
        columns, level, pages, source = self.columns, move.level, move.pages, self.tiers[number].level
        refs, pins = columns.refs, columns.pins
        for page in pages:
            if not refs[page] and not pins[page]:
                return False
        record = self.classes[columns.cls[page]]
        self._set_copies(record, pages, level, move.frames)
        if level > source:
            self.tiers[number].leaving[record.frame_classes[source]] -= self._frames_of(pages)
            self._enlist(pages, 1 << level)
        else:
            self._enlist(pages, ALL)
        return True

    def _free_target(self, record: PageClass, level: Level, hop: Hop) -> None:
        frame, span = hop.target[1] // record.page_bytes, self.columns.span[hop.page]
        self.tiers[hop.target[0]].space.free_run(record.frame_classes[level], frame, span)

    # --- losing copies ----------------------------------------------------------------------------------------------

    def drop(self, page: Page, level: Level) -> None:
        """Frees the copy at `level` of an evictable page: another copy must be there, or the class be recomputable (the page may be lost then)."""
        columns = self.columns
        if not 0 <= page < len(columns.cls) or not columns.lists[level].member[page + MAX_LISTS]:
            raise InvariantViolation(f"cannot be evicted from {Level(level).name}: {self.story(page)}")
        record = self.classes[columns.cls[page]]
        tier = self.tiers[record.tiers[level]]
        if columns.copies[page] != 1 << level:
            tier.evictions += 1
        elif record.recomputable:
            tier.discards += 1
        else:
            raise InvariantViolation(f"the last copy cannot be dropped: {self.story(page)}")
        self._drop_copy(record, page, level)
        if level == record.level:
            columns.state[page] = ABSENT

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
                if level == record.level and not columns.moves[page]:
                    columns.state[page] = ABSENT
                    if columns.pins[page]:
                        for at in LEVELS_OF[columns.copies[page]]:
                            columns.lists[at].take_out((page,))
                if not columns.copies[page]:
                    lost.append(page)
        return lost

    # --- looking in -------------------------------------------------------------------------------------------------

    def statistics(self) -> tuple[TierStatistics, ...]:
        """One record a tier."""
        return audit.statistics(self)

    def check_integrity(self) -> None:
        """Raises InvariantViolation unless free + held == total in every tier, and owners, counts, lists, states and moves agree."""
        audit.check_integrity(self)
