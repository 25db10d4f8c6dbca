"""Which pages the sequences of one model hold, and where these have to be before a chunk may read them.

Owns the page tables of one (model, device). A sequence takes all pages that it can come to need, or none: those that it shares with the one
it continues from, brought up where they were moved down, a private copy of a page that both would write to, and new ones. Live sequences
pin theirs; retained ones do not, so the keeper may move or give up what they hold. Pure; called by `llm.batch` only.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from hexrt.core import SequenceId
from hexrt.llm.sequence import State
from hexrt.memory.keeper import Keeper
from hexrt.memory.pool import Page, PageState
from hexrt.memory.tables import PageTables

LIFTS = 2
"""How often pages are fetched from NVME for a sequence before they are computed anew instead."""


class Took(Enum):
    NOTHING = "nothing"  # there is no room now, or its parent's pages are on their way: ask again when frames came free
    PAGES = "pages"  # and they can be used
    LOADING = "loading"  # and some are on their way: `arrived` will be called


class SequencePages:
    def __init__(self, keeper: Keeper, cls: int, device: str, page_tokens: int, arrived: Callable[[State, bool], None]) -> None:  # fmt: skip
        """`arrived(state, good)` is called once for each LOADING."""
        self.keeper = keeper
        self.pool = keeper.pool
        self.tables = PageTables(keeper.pool)
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
        shared, tail = self._shareable(state, parent) if parent is not None else ([], None)
        if shared is None:
            return Took.NOTHING
        pool.share(shared)
        pool.pin(shared)
        absent = [page for page in shared if keeper.prices.below_top(page)]
        fresh = state.pages - len(shared)
        tail = self._room_with(tail, fresh + len(absent))
        if tail is None and not keeper.make_room(self.cls, fresh + len(absent)):
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
        self.tables.create(number, (*shared, *own))
        state.pinned = True
        self._account(state, len(shared), tail, parent)
        return Took.LOADING if state.awaited else Took.PAGES

    def _room_with(self, tail: Page | None, count: int) -> Page | None:
        """The page to be copied, pinned, where there is room for `count` pages beside it; else None: its tokens are computed anew."""
        if tail is not None:
            self.pool.pin((tail,))
            if self.keeper.make_room(self.cls, count):
                return tail
            self.pool.unpin((tail,))
        return None

    def _account(self, state: State, shared: int, tail: Page | None, parent: State | None) -> None:
        computed = shared * self.page_tokens
        if tail is not None and parent is not None:
            computed = parent.common(state.material)
        state.planned = state.computed = computed

    def _shareable(self, state: State, parent: State) -> tuple[list[Page] | None, Page | None]:
        """The parent's full pages that can be used, and its last one where that is to be copied; None for pages while some are on their way."""
        common = parent.common(state.material)
        table = self.tables.table(parent.number)
        lost = self.tables.lost_at(parent.number)
        there = len(table) if lost is None else lost
        full = common // self.page_tokens
        pages = list(table[: min(full, there)])
        if any(self._is_unsettled(page) for page in pages):
            return None, None
        deep = [page for page in pages if self.keeper.prices.below_top(page) > 1]
        if deep and self._is_worth(pages):
            if state.lifts < LIFTS and self.keeper.lift(deep):
                state.lifts += 1
                return None, None
        first_deep = pages.index(deep[0]) if deep else len(pages)
        pages = pages[:first_deep]
        absent = [page for page in pages if self.keeper.prices.below_top(page)]
        if absent and not self._is_worth(absent):
            pages = pages[: pages.index(absent[0])]
        tail = table[full] if len(pages) == full < there and common % self.page_tokens else None
        if tail is not None and (self._is_unsettled(tail) or self.keeper.prices.below_top(tail)):
            tail = None
        return pages, tail

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

    # --- giving back ------------------------------------------------------------------------------------------------

    def retain(self, state: State) -> None:
        """Keeps what the sequence has computed where the keeper thinks best. Later pages are given up before earlier ones."""
        pages = self.tables.table(state.number)
        self.pool.unpin(pages)
        state.pinned = False
        self.tables.truncate(state.number, self.pages_of(state.valid))
        self.pool.touch(reversed(pages))
        self.keeper.freed()

    def give_back(self, state: State) -> None:
        """Whatever the sequence holds; nothing where it holds nothing."""
        if state.number in self.tables:
            if state.pinned:
                self.pool.unpin(self.tables.table(state.number))
                state.pinned = False
            self.tables.release(state.number)
            self.keeper.freed()

    def touch(self, state: State) -> None:
        self.pool.touch(reversed(self.tables.table(state.number)))

    def will_be_read(self, state: State, steps: int | None) -> None:
        """A retained sequence is read again in so many steps; None: never. In the next one: it is brought up where there is room."""
        pages = self.tables.table(state.number)
        self.pool.set_next_use(pages, steps)
        if steps is not None and steps <= 1:
            self.keeper.prefetch(pages, self.device)

    def discarded(self) -> bool:
        """Whether pages may have been given up since this was last asked."""
        discards, self._discards = self._discards, sum(tier.discards for tier in self.pool.tiers)
        return discards != self._discards

    def trim(self, state: State) -> bool:
        """Cuts a retained sequence before its first lost page; False where nothing is left of it."""
        lost = self.tables.lost_at(state.number)
        if lost is not None:
            self.tables.truncate(state.number, lost)
        return bool(len(self.tables.table(state.number)))

    def frames(self, number: SequenceId) -> tuple[int, ...]:
        return self.tables.frames(number)
