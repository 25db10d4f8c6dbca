"""Which pages the sequences of one model hold, and where these have to be before a chunk may read them.

Owns the page tables of one (model, device), and the index of full pages by their tokens. A sequence takes all pages that it can come to need, or
none: those that it shares with the one it continues from or with whoever had the same beginning, its own where it was parked, brought up where they
were moved down, a private copy of a page that both would write to, and new ones. Live sequences pin theirs; parked and retained ones do not, but for
a time that `hold` sets, so the keeper may move or give up what they have. Pure; called by `llm.batch` and `llm.admission` only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from hexrt.core import SequenceId
from hexrt.llm.prefix import PrefixIndex
from hexrt.llm.sequence import State
from hexrt.memory.keeper import Keeper
from hexrt.memory.pool import Level, Page, PageState
from hexrt.memory.tables import PageTables
from hexrt.scheduling.retention import Stake

LIFTS = 2
"""How often pages are fetched from NVME for a sequence before they are computed anew instead."""


class Took(Enum):
    NOTHING = "nothing"  # there is no room now, or pages to share are on their way: ask again when frames came free
    PAGES = "pages"  # and they can be used
    LOADING = "loading"  # and some are on their way: `arrived` will be called


@dataclass(frozen=True, slots=True)
class _Found:
    """Pages that hold the beginning of a sequence's material: `tokens` of it, with the page that is to be copied."""

    pages: Sequence[Page]
    tokens: int
    tail: Page | None = None


class SequencePages:
    def __init__(self, keeper: Keeper, cls: int, device: str, page_tokens: int, arrived: Callable[[State, bool], None]) -> None:  # fmt: skip
        """`arrived(state, good)` is called once for each LOADING."""
        self.keeper = keeper
        self.pool = keeper.pool
        self.tables = PageTables(keeper.pool)
        self.prefixes = PrefixIndex(keeper.pool)
        self.cls = cls
        self.device = device
        self.page_tokens = page_tokens
        self.token_ns = 0.0  # what it takes to compute one token anew; 0 until that is known
        self._arrived = arrived
        self._discards = 0

    @property
    def capacity(self) -> int:
        """Pages that one sequence can have at most."""
        return self.pool.capacity(self.cls)

    def pages_of(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.page_tokens)

    def learn(self, token_ns: float) -> None:
        """What a token took in the newest chunk. Those with the most prompt are the fastest, and they are what computing anew is like."""
        slowly = self.token_ns * 1.01
        self.token_ns = token_ns if not self.token_ns or token_ns < slowly else slowly
        self.keeper.prices.recompute_ns[self.cls] = self.token_ns * self.page_tokens

    # --- taking -----------------------------------------------------------------------------------------------------

    def take(self, state: State, parent: State | None) -> Took:
        """All pages of a sequence, or none. Sets what of its material need not be computed."""
        keeper, pool, number = self.keeper, self.pool, state.number
        found = self._found(state, parent)
        if found is None:
            return Took.NOTHING
        shared = found.pages
        pool.share(shared)
        pool.pin(shared)
        absent = [page for page in shared if keeper.prices.below_top(page)]
        fresh = state.pages - len(shared)
        tail = self._room_with(found.tail, fresh + len(absent))
        if tail is None and not keeper.make_room(self.cls, fresh + len(absent)):
            state.lacks = fresh + len(absent)
            pool.unpin(shared)
            pool.release(shared)
            return Took.NOTHING
        state.awaited = state.missing = 0
        own: list[Page] = []
        if tail is not None:
            own.append(keeper.copy_private(tail, self.device, self._note(state)))
            pool.unpin((tail,))
            state.awaited += 1
        if absent:
            keeper.load(absent, self.device, self._note(state))
            state.awaited += 1
            state.pages_loaded += len(absent)
        own += pool.create(self.cls, fresh - len(own))
        if number in self.tables:  # it was parked
            self.tables.release(number)
        self.tables.create(number, (*shared, *own))
        state.pinned = True
        state.begin_again(found.tokens if tail is not None else min(found.tokens, len(shared) * self.page_tokens))
        state.published = state.computed // self.page_tokens
        self.prefixes.used(state.keys(state.published, self.page_tokens))
        return Took.LOADING if state.awaited else Took.PAGES

    def _room_with(self, tail: Page | None, count: int) -> Page | None:
        """The page to be copied, pinned, where there is room for `count` pages beside it; else None: its tokens are computed anew."""
        if tail is not None:
            self.pool.pin((tail,))
            if self.keeper.make_room(self.cls, count):
                return tail
            self.pool.unpin((tail,))
        return None

    def _found(self, state: State, parent: State | None) -> _Found | None:
        """What is there of the sequence's beginning and worth having; None while some of it is on its way."""
        held = self._held_by(state, parent)
        whole = (
            len(state.request.ids) + len(state.answer) - 1
        ) // self.page_tokens  # the last token must be computed to draw from it
        known = self.prefixes.find(state.keys(whole, self.page_tokens))
        if len(known) > len(held.pages):
            held = _Found(known, len(known) * self.page_tokens)
        pages = list(held.pages)
        if any(self._is_unsettled(page) for page in pages):
            return None
        deep = [page for page in pages if self.keeper.prices.below_top(page) > 1]
        if deep and self._is_worth(pages) and state.lifts < LIFTS and self.keeper.lift(deep):
            state.lifts += 1
            return None
        if deep:
            pages = pages[: pages.index(deep[0])]
        absent = [page for page in pages if self.keeper.prices.below_top(page)]
        if absent and not self._is_worth(absent):
            pages = pages[: pages.index(absent[0])]
        tail = held.tail if len(pages) == len(held.pages) else None
        if tail is not None and (self._is_unsettled(tail) or self.keeper.prices.below_top(tail)):
            tail = None
        return _Found(pages, held.tokens, tail)

    def _held_by(self, state: State, parent: State | None) -> _Found:
        """What the sequence itself has, if it was parked, or the one that it continues from.

        A page that is written to again is copied in either case: it may have copies below, and others may read it.
        """
        source = state if state.number in self.tables else parent
        if source is None:
            return _Found((), 0)
        tokens = source.common((*state.request.ids, *state.answer))
        table = self.tables.table(source.number)
        lost = self.tables.lost_at(source.number)
        there = len(table) if lost is None else lost
        full = tokens // self.page_tokens
        tail = table[full] if full < there and tokens % self.page_tokens else None
        return _Found(table[: min(full, there)], tokens if tail is not None else full * self.page_tokens, tail)

    def _is_unsettled(self, page: Page) -> bool:
        """In a move, other than one that copies it down from where it is used: it cannot be loaded, or its frame changes in a moment."""
        stored = self.pool.state(page) is PageState.STORING and not self.keeper.prices.below_top(page)
        return self.pool.moving(page) and not stored

    def _is_worth(self, pages: list[Page]) -> bool:
        """Whether bringing pages up takes less than computing them anew."""
        return not self.token_ns or self.keeper.prices.load_ns(pages) < self.token_ns * self.page_tokens * len(pages)

    def _note(self, state: State) -> Callable[[frozenset[Page]], None]:
        number = state.number

        def arrived(faults: frozenset[Page]) -> None:
            if number not in self.tables or not state.awaited:  # given up meanwhile
                return
            state.awaited -= 1
            state.missing += len(faults)
            if not state.awaited:
                self._arrived(state, not state.missing)

        return arrived

    def publish(self, state: State) -> bool:
        """Makes its full pages known to whoever has the same beginning; whether there were new ones."""
        full = state.valid // self.page_tokens
        if not state.request.root or full <= state.published:
            return False
        keys, table = state.keys(full, self.page_tokens), self.tables.table(state.number)
        for index in range(state.published, full):
            self.prefixes.add(keys[index], table[index])
        state.published = full
        return True

    # --- giving back ------------------------------------------------------------------------------------------------

    def let_go(self, state: State) -> None:
        """Keeps what the sequence has computed where the keeper thinks best. Later pages are given up before earlier ones."""
        pages = self.tables.table(state.number)
        if state.pinned:
            self.pool.unpin(pages)
            state.pinned = False
        self.tables.truncate(state.number, self.pages_of(state.valid))
        self.pool.touch(reversed(pages))
        self.keeper.freed()

    def hold(self, state: State, until_ns: int) -> bool:
        """Pins what a retained sequence has; False where not all of it is where it is used."""
        pages, top = self.tables.table(state.number), Level(self.pool.classes[self.cls].level)
        if not all(self.pool.has(page, top) for page in pages):
            return False
        self.pool.pin(pages)
        state.pinned, state.held_until_ns = True, until_ns
        return True

    def end_hold(self, state: State) -> None:
        if state.pinned:
            self.pool.unpin(self.tables.table(state.number))
            state.pinned = False
            self.keeper.freed()

    def move_down(self, state: State) -> None:
        """Writes what a sequence has down ahead of those who wait for the room."""
        self.keeper.store(self.tables.table(state.number), self.device)

    def give_back(self, state: State) -> None:
        """Whatever the sequence holds; nothing where it holds nothing."""
        if state.number in self.tables:
            if state.pinned:
                self.pool.unpin(self.tables.table(state.number))
                state.pinned = False
            self.tables.release(state.number)
            if state.published:
                self.prefixes.left(state.keys(state.published, self.page_tokens))
                state.published = 0
            self.keeper.freed()

    def touch(self, state: State) -> None:
        self.pool.touch(reversed(self.tables.table(state.number)))

    def will_be_read(self, state: State, steps: int | None) -> None:
        """A retained sequence is read again in so many steps; None: never. In the next one: it is brought up where there is room."""
        pages = self.tables.table(state.number)
        self.pool.set_next_use(pages, steps)
        if steps is not None and steps <= 1 and not state.pinned:
            self.keeper.prefetch(pages, self.device)

    def discarded(self) -> bool:
        """Whether pages may have been given up since this was last asked."""
        discards, self._discards = self._discards, sum(tier.discards for tier in self.pool.tiers)
        return discards != self._discards

    def trim(self, state: State) -> bool:
        """Cuts a parked or retained sequence before its first lost page; False where nothing is left of it."""
        lost = self.tables.lost_at(state.number)
        if lost is not None:
            if state.pinned:  # the device was lost under it
                self.end_hold(state)
            self.tables.truncate(state.number, lost)
        return bool(len(self.tables.table(state.number)))

    # --- what it is worth ---------------------------------------------------------------------------------------------

    def own_pages(self, state: State) -> int:
        """Pages that come free for others if a live sequence is stopped: those that no other pins."""
        return sum(self.pool.pins(page) == 1 for page in self.tables.table(state.number))

    def stop_ns(self, state: State) -> float:
        """What stopping a sequence and going on with it later costs."""
        used = self.pages_of(state.valid)
        anew = self.token_ns * state.valid if self.token_ns else float("inf")
        swap = self.keeper.prices.swap_ns(self.cls, used) if used else 0.0
        cost = min(swap, anew)
        return cost if cost < float("inf") else float(state.valid)  # nothing is known yet: the shorter, the cheaper

    def stake(self, state: State, needed_in_ns: float | None, others_wait: bool) -> Stake:
        """What is at stake with a retained sequence's pages."""
        pages = len(self.tables.table(state.number))
        anew = self.token_ns * state.valid if self.token_ns else float("inf")
        return Stake(needed_in_ns, self.keeper.prices.swap_ns(self.cls, pages), anew, others_wait)

    def frames(self, number: SequenceId) -> tuple[int, ...]:
        return self.tables.frames(number)
