"""The table of logical pages: one row a page, in columns, and the legal moves of a page's state.

Owns the rows and their numbers, which are used again; `pool.PagePool` owns what they mean and is the only one to change them. A row takes 51
bytes, and 18 for each level in `lru.Lists`. Pure.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable

from hexrt.errors import InvariantViolation, OutOfMemory
from hexrt.memory.lru import Lists

Page = int
LEVELS = 3
DEAD = 0xFFFF
"""The class of a row that is no page."""
MAX_PAGES = 0xFFFF_FFFF - 4096
GROWTH = 64
"""Rows are added by one in so many of those there."""


class Level(enum.IntEnum):
    DEVICE = 0
    HOST = 1
    NVME = 2


class PageState(enum.Enum):
    """In respect of the page's top tier."""

    ABSENT = 0
    LOADING = 1  # on its way up, or being filled from outside
    RESIDENT = 2
    STORING = 3  # a copy is on its way down, or to another frame of the same tier


STATES = tuple(PageState)
ABSENT, LOADING, RESIDENT, STORING = range(4)
LEGAL: dict[PageState, frozenset[PageState]] = {
    PageState.ABSENT: frozenset(
        {PageState.LOADING, PageState.STORING}
    ),  # STORING: all its copies are below its top tier
    PageState.LOADING: frozenset(
        {PageState.ABSENT, PageState.RESIDENT}
    ),  # ABSENT: it failed, or went only part of the way
    PageState.RESIDENT: frozenset({PageState.STORING, PageState.ABSENT}),  # ABSENT: evicted, or its tier is lost
    PageState.STORING: frozenset({PageState.RESIDENT, PageState.ABSENT}),
}
_NEXT = tuple(sum(1 << state.value for state in LEGAL[old]) for old in STATES)


class PageColumns:
    """Rows of all pages. `copies` has a bit for each level that a valid copy is at, `frames` the (first) frame there."""

    __slots__ = (
        "bucket",
        "cls",
        "copies",
        "frames",
        "lists",
        "moves",
        "pins",
        "refs",
        "span",
        "state",
        "sums",
        "_unused",
    )

    def __init__(self) -> None:
        self.refs = array("I")
        self.pins = array("I")
        self.cls = array("H")
        self.copies = array("B")
        self.state = array("B")
        self.bucket = array("B")
        self.span = array("I")
        self.moves = array("I")  # the number of the move that the page is in, 0 for none
        self.sums = array("Q")
        self.frames = tuple(array("I") for _ in range(LEVELS))
        self.lists = tuple(Lists() for _ in range(LEVELS))
        self._unused = array("I")  # a stack

    def __len__(self) -> int:
        return len(self.refs)

    @property
    def live(self) -> int:
        return len(self.refs) - len(self._unused)

    @property
    def bytes(self) -> int:
        """Of all columns and lists."""
        columns = (
            self.refs, self.pins, self.cls, self.copies, self.state, self.bucket, self.span, self.moves, self.sums, self._unused, *self.frames
        )  # fmt: skip
        return sum(len(c) * c.itemsize for c in columns) + len(self) * sum(lists.bytes_a_node for lists in self.lists)

    def reserve(self, count: int) -> None:
        """Makes sure that `count` rows can be taken."""
        missing = count - len(self._unused)
        if missing > 0:
            self._grow(max(missing, len(self.refs) // GROWTH, 64))

    def _grow(self, more: int) -> None:
        have = len(self.refs)
        if have + more > MAX_PAGES:
            raise OutOfMemory(f"{have} pages are the most that can be counted", "pages")
        for column in (
            self.refs,
            self.pins,
            self.copies,
            self.state,
            self.bucket,
            self.span,
            self.moves,
            self.sums,
            *self.frames,
        ):
            column.extend(array(column.typecode, bytes(more * column.itemsize)))
        self.cls.extend(array("H", (DEAD,)) * more)
        for lists in self.lists:
            lists.grow(have + more)
        self._unused.extend(range(have + more - 1, have - 1, -1))

    def take(self, cls: int, span: int, bucket: int) -> Page:
        """A new row, all else 0; `reserve` has made it."""
        page = self._unused.pop()
        self.cls[page] = cls
        self.span[page] = span
        self.bucket[page] = bucket
        self.refs[page] = self.pins[page] = self.copies[page] = self.state[page] = 0
        return page

    def give_back(self, page: Page) -> None:
        self.cls[page] = DEAD
        self._unused.append(page)

    def enter(self, pages: Iterable[Page], move: int, state: int) -> None:
        """The pages are in a move from now on. Raises InvariantViolation where that is no legal change of state."""
        states, moves = self.state, self.moves
        for page in pages:
            if not _NEXT[states[page]] >> state & 1:
                raise InvariantViolation(f"to {STATES[state].name}: {self.story(page)}")
            states[page] = state
            moves[page] = move

    def story(self, page: Page) -> str:
        if not 0 <= page < len(self.refs) or self.cls[page] == DEAD:
            return f"page {page} is none"
        copies = {level.name.lower(): self.frames[level][page] for level in Level if self.copies[page] >> level & 1}
        return (
            f"page {page} of class {self.cls[page]} ({self.span[page]} frames) is {STATES[self.state[page]].name} in move "
            f"{self.moves[page]}, has {self.refs[page]} references, {self.pins[page]} pins, and copies in frames {copies}"
        )
