"""Copies of pages in tiers: where each lies, and in which order they may be evicted.

Owns the tiers, the classes of pages, their columns and lists; `pool.PagePool` builds on it and is what others use. What is asked here changes
nothing. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge

from hexrt.errors import InvariantViolation
from hexrt.memory.columns import ABSENT, DEAD, LEVELS, RESIDENT, STATES, Level, Page, PageColumns, PageState
from hexrt.memory.frames import GRANULE, FrameSpace
from hexrt.memory.lru import MAX_LISTS, Lru, Policy
from hexrt.memory.tiers import NO_PAGE, Move, PageClass, Tier

LEVELS_OF = tuple(tuple(level for level in range(LEVELS) if bits >> level & 1) for bits in range(1 << LEVELS))
"""The levels of which a bit is set."""


class Copies:
    """What `PagePool` moves; its fields are for that class, the integrity check and plans."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Lru()
        self.tiers: list[Tier] = []
        self.classes: list[PageClass] = []
        self.columns = PageColumns()
        self.moves: dict[int, Move] = {}
        self._stale: set[Page] = set()  # written while in a move: what the move copies is out of date

    # --- set-up -----------------------------------------------------------------------------------------------------

    def add_tier(self, name: str, level: Level, space: FrameSpace) -> int:
        """The number of a new tier. There may be many of DEVICE, and one each of HOST and NVME."""
        if level is not Level.DEVICE and any(tier.level is level for tier in self.tiers):
            raise InvariantViolation(f"a second tier of {level.name}: {name}")
        self.tiers.append(Tier(name, level, space))
        for cls in self.classes:
            if level > self.tiers[cls.top].level:
                self._add_level(cls, len(self.tiers) - 1)
        return len(self.tiers) - 1

    def add_class(self, top_tier: int, page_bytes: int, recomputable: bool) -> int:
        """The class of pages of this size that are used in the tier; the same number for the same words."""
        page_bytes += -page_bytes % GRANULE
        for known in self.classes:
            if (known.top, known.page_bytes, known.recomputable) == (top_tier, page_bytes, recomputable):
                return known.number
        if len(self.classes) == DEAD:
            raise InvariantViolation("too many classes of pages")
        level = self.tiers[top_tier].level
        cls = PageClass(len(self.classes), top_tier, level, page_bytes, recomputable)
        self.classes.append(cls)
        for number, tier in enumerate(self.tiers):
            if number == top_tier or tier.level > level:
                self._add_level(cls, number)
        return cls.number

    def _add_level(self, cls: PageClass, number: int) -> None:
        tier = self.tiers[number]
        frame_class = tier.space.add_class(cls.page_bytes)
        cls.tiers[tier.level] = number
        cls.frame_classes[tier.level] = frame_class
        cls.owners[tier.level] = tier.owners.setdefault(frame_class, array("I"))
        tier.leaving.setdefault(frame_class, 0)
        cls.lists[tier.level] = self.columns.lists[tier.level].add_lists(2 * self.policy.buckets)
        tier.users.setdefault(frame_class, []).append(cls)
        cls.levels = tuple(int(level) for level in Level if cls.tiers[level] >= 0)
        cls.orders = tuple((1 << at, cls.lists[at], self.columns.lists[at]) for at in cls.levels)

    def capacity(self, cls: int, tier: int | None = None) -> int:
        """Pages of one frame, if the whole tier (the class's top tier) were theirs."""
        return self._space(cls, tier).capacity(self._frame_class(cls, tier))

    def room(self, cls: int, tier: int | None = None) -> int:
        """Pages of one frame that could be made in the tier (the class's top tier) now, nothing evicted."""
        record = self.classes[cls]
        chosen = self.tiers[record.top if tier is None else tier]
        return 0 if chosen.closed else chosen.space.available(record.frame_classes[chosen.level])

    def can_create(self, cls: int, count: int, span: int = 1, tier: int | None = None) -> bool:
        """Whether the tier (the top tier) has frames for `count` pages of `span` contiguous frames each now."""
        if span == 1:
            return self.room(cls, tier) >= count
        chosen = self.tiers[self.classes[cls].top if tier is None else tier]
        return not chosen.closed and chosen.space.can_allocate_runs(self._frame_class(cls, tier), (span,) * count)

    def _space(self, cls: int, tier: int | None) -> FrameSpace:
        return self.tiers[self.classes[cls].top if tier is None else tier].space

    def _frame_class(self, cls: int, tier: int | None) -> int:
        record = self.classes[cls]
        return record.frame_classes[record.level if tier is None else self.tiers[tier].level]

    # --- copies -----------------------------------------------------------------------------------------------------

    def _set_copies(self, record: PageClass, pages: Sequence[Page], level: int, frames: Sequence[int]) -> None:
        """The pages, new ones or such as were in a move, have the state from now on that their copies give them."""
        columns, owners, bit, top = self.columns, record.owners[level], 1 << level, 1 << record.level
        copies, places, spans, state, moves = (
            columns.copies,
            columns.frames[level],
            columns.span,
            columns.state,
            columns.moves,
        )
        tiers, numbers, at = self.tiers, record.tiers, 0
        tier = tiers[numbers[level]]
        for page in pages:
            frame, span, before = frames[at], spans[page], copies[page]
            at += 1
            copies[page] = after = before | bit
            places[page] = frame
            state[page] = RESIDENT if after & top else ABSENT
            moves[page] = 0
            if len(owners) < frame + span:
                owners.extend(array("I", (NO_PAGE,)) * (frame + span - len(owners) + 63))
            if span == 1:
                owners[frame] = page
            else:
                owners[frame : frame + span] = array("I", (page,)) * span
            if not before:
                tier.dirty += 1
            elif not before & (before - 1):
                tiers[numbers[before.bit_length() - 1]].dirty -= 1
        tier.pages += at

    def _drop_copy(self, record: PageClass, page: Page, level: int) -> None:
        """Takes the page out of the level's list too; where one copy is left, it is dirty from now on."""
        columns = self.columns
        span, frame, owners = columns.span[page], columns.frames[level][page], record.owners[level]
        columns.copies[page] = after = columns.copies[page] ^ 1 << level
        if span == 1:
            owners[frame] = NO_PAGE
        else:
            owners[frame : frame + span] = array("I", (NO_PAGE,)) * span
        tier = self.tiers[record.tiers[level]]
        tier.space.free_run(record.frame_classes[level], frame, span)
        tier.pages -= 1
        columns.lists[level].remove(page)
        if not after:
            tier.dirty -= 1
        elif not after & (after - 1):
            below = after.bit_length() - 1
            self.tiers[record.tiers[below]].dirty += 1
            columns.lists[below].shift(page, 1)

    def _enlist(self, pages: Sequence[Page], fresh: int) -> None:
        """Puts pages in the lists they belong in; at the levels of `fresh` as used now, at others, if they are in none, where their last use belongs.

        A copy is in no list while the page moves, and while it is pinned and needs that copy: at the top, or, with none there, anywhere.
        Copies that belong in none are in none already.
        """
        if len(pages) > 1 and not self._are_alike(pages):
            for group in self._alike(pages):
                self._enlist(group, fresh)
            return
        columns, page = self.columns, pages[0]
        if columns.moves[page]:
            return
        record, free = self.classes[columns.cls[page]], columns.copies[page]
        offset = 2 * columns.bucket[page] + (not free & (free - 1))
        if columns.pins[page]:
            top = 1 << record.level
            free = free & ~top if free & top else 0
        for bit, first, lists in record.orders:
            if free & bit & fresh:
                lists.heat(pages, first + offset)
            elif free & bit:
                lists.put_back(pages, first + offset)

    def _are_alike(self, pages: Sequence[Page]) -> bool:
        """Whether they belong in the same lists."""
        columns, first = self.columns, pages[0]
        cls, copies, bucket, pins, moves = columns.cls, columns.copies, columns.bucket, columns.pins, columns.moves
        c, k, b, is_pinned, is_moving = cls[first], copies[first], bucket[first], not pins[first], not moves[first]
        for page in pages:
            if copies[page] != k or bucket[page] != b or (not pins[page]) is not is_pinned:
                return False
            if cls[page] != c or (not moves[page]) is not is_moving:
                return False
        return True

    def _alike(self, pages: Sequence[Page]) -> Iterable[Sequence[Page]]:
        """Groups of pages that are alike, in their order."""
        columns = self.columns
        cls, copies, bucket, pins, moves = columns.cls, columns.copies, columns.bucket, columns.pins, columns.moves
        groups: dict[tuple[int, int, int, bool, bool], list[Page]] = {}
        for page in pages:
            key = copies[page], bucket[page], cls[page], not pins[page], not moves[page]
            groups.setdefault(key, []).append(page)
        return groups.values()

    def _frames_of(self, pages: Sequence[Page]) -> int:
        return sum(map(self.columns.span.__getitem__, pages))

    def _check_movable(self, pages: Sequence[Page], source: int, level: Level) -> int:
        """The levels, as bits, at which some of them have copies."""
        columns, first = self.columns, pages[0]
        cls, copies, moves = columns.cls, columns.copies, columns.moves
        c, k = cls[first], copies[first]
        levels = k
        for page in pages:
            if copies[page] == k and cls[page] == c and not moves[page] and source != level:
                continue
            if self._source(page, level) != source or (source != level and cls[page] != c):
                raise InvariantViolation(f"in one move with {self.story(first)}: {self.story(page)}")
            levels |= copies[page]
        if len(set(pages)) != len(pages):
            raise InvariantViolation(f"twice in one move: some of {list(pages)}")
        return levels

    def _source(self, page: Page, level: int) -> int:
        columns = self.columns
        try:
            record, copies = self.classes[columns.cls[page]], columns.copies[page]
        except IndexError:
            raise InvariantViolation(f"page {page} is none") from None
        if page < 0 or record.tiers[level] < 0 or not copies or columns.moves[page]:
            raise InvariantViolation(f"cannot be moved to {Level(level).name}: {self.story(page)}")
        if copies >> level & 1:
            if columns.pins[page]:
                raise InvariantViolation(f"pinned and relocated: {self.story(page)}")
            return int(level)
        above = copies & ((1 << level) - 1)
        return above.bit_length() - 1 if above else (copies & -copies).bit_length() - 1

    # --- asking -----------------------------------------------------------------------------------------------------

    def victims(self, tier: int, cls: int | None = None, dirty: bool | None = None) -> Iterator[Page]:
        """Pages that may be evicted from the tier, the coldest first; only those in frames of the class's size, only clean or dirty ones.

        The pool must not change meanwhile.
        """
        record = self.tiers[tier]
        level, users = record.level, record.users
        if cls is not None:
            firsts = [c.lists[level] for c in users[self.classes[cls].frame_classes[level]]]
        else:
            firsts = [c.lists[level] for group in users.values() for c in group]
        if dirty is None:
            firsts += [first + 1 for first in firsts]
        elif dirty:
            firsts = [first + 1 for first in firsts]
        lists = self.columns.lists[level]
        for offset in range(0, 2 * self.policy.buckets, 2):
            numbers = [first + offset for first in firsts if lists.sizes[first + offset]]
            if len(numbers) == 1:
                yield from lists.iterate(numbers[0])
            elif numbers:
                yield from merge(*map(lists.iterate, numbers), key=lists.stamp)

    def coldest_clean(self, tier: int, cls: int, frames: int) -> list[Page]:
        """As many of the clean `victims` as hold so many frames, or all; of one class of pages it takes no search."""
        record = self.tiers[tier]
        users = record.users[self.classes[cls].frame_classes[record.level]]
        found: list[Page] = []
        span = self.columns.span
        if len(users) > 1:
            pages = self.victims(tier, cls, dirty=False)
            while frames > 0 and (page := next(pages, -1)) >= 0:
                found.append(page)
                frames -= span[page]
            return found
        lists, first = self.columns.lists[record.level], users[0].lists[record.level]
        following = lists.next
        for number in range(first, first + 2 * self.policy.buckets, 2):
            at = following[number]
            while at != number:
                found.append(at - MAX_LISTS)
                frames -= span[at - MAX_LISTS]
                if frames <= 0:
                    return found
                at = following[at]
        return found

    def coldness(self, page: Page, level: Level) -> tuple[int, int]:
        """Smaller for the page that is rather evicted from the level."""
        return self.columns.bucket[page], self.columns.lists[level].stamp(page)

    def clean_bytes(self, tier: int) -> int:
        """What evictable pages with another copy hold; a tensor counts as one frame."""
        level, total = self.tiers[tier].level, 0
        lists = self.columns.lists[level]
        for record in self.classes:
            if record.tiers[level] == tier:
                first = record.lists[level]
                total += record.page_bytes * sum(lists.size(first + 2 * b) for b in range(self.policy.buckets))
        return total

    def _cls(self, page: Page) -> int:
        known = self.columns.cls
        if page < 0 or page >= len(known) or known[page] == DEAD:
            raise InvariantViolation(f"page {page} is none")
        return known[page]

    def cls(self, page: Page) -> int:
        return self._cls(page)

    def top(self, cls: int) -> int:
        """The tier that pages of the class are used in."""
        return self.classes[cls].top

    def page_bytes(self, cls: int) -> int:
        """Of one frame."""
        return self.classes[cls].page_bytes

    def __contains__(self, page: Page) -> bool:
        return 0 <= page < len(self.columns) and self.columns.cls[page] != DEAD

    def refs(self, page: Page) -> int:
        return self.columns.refs[page]

    def pins(self, page: Page) -> int:
        return self.columns.pins[page]

    def span(self, page: Page) -> int:
        return self.columns.span[page]

    def sum(self, page: Page) -> int:
        """The xxh3_64 of the page's copy in NVME."""
        return self.columns.sums[page]

    def state(self, page: Page) -> PageState:
        self._cls(page)
        return STATES[self.columns.state[page]]

    def has(self, page: Page, level: Level) -> bool:
        """Whether a valid copy is at `level`."""
        if page in self._stale and level > self.classes[self.columns.cls[page]].level:
            return False
        return bool(self.columns.copies[page] >> level & 1)

    def is_lost(self, page: Page) -> bool:
        """No copy anywhere, and none on its way."""
        return not self.columns.copies[page] and not self.columns.moves[page]

    def is_evictable(self, page: Page, level: Level) -> bool:
        return bool(self.columns.lists[level].list_of(page))

    def moving(self, page: Page) -> bool:
        return bool(self.columns.moves[page])

    def open_moves(self) -> set[int]:
        return set(self.moves)

    def frame(self, page: Page, level: Level) -> int:
        """The (first) frame of the page's copy at `level`."""
        if not self.columns.copies[page] >> level & 1:
            raise InvariantViolation(f"no copy at {level.name}: {self.story(page)}")
        return self.columns.frames[level][page]

    def offset(self, page: Page, level: Level) -> int:
        """The byte offset in its tier of the page's copy at `level`."""
        return self.frame(page, level) * self.classes[self.columns.cls[page]].page_bytes

    def story(self, page: Page) -> str:
        return self.columns.story(page)
