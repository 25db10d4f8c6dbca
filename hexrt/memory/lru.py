"""Orders of pages by use: intrusive doubly linked lists over columns, and the policies that say which list a page is in.

`Lists` owns, for one level, each page's neighbours, its list and when it was last used; a page is in at most one list, and every step is
O(1). A list runs from the coldest page to the hottest. A policy is pure: it maps what is known of a page's next use to a bucket. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from hexrt.errors import InvariantViolation

NEVER = 1 << 31
"""Steps until the next use of a page that nobody is going to read again."""
MAX_LISTS = 4096
NEAR = 2
"""How far from its ends a list is searched for the place of a page that comes back to it."""


class Policy(Protocol):
    buckets: int

    def bucket(self, steps: int | None) -> int:
        """0 (coldest) to `buckets` - 1. `steps` until the page is read again: None is unknown, NEVER is never."""


class Lru:
    """By last use alone."""

    buckets = 1

    def bucket(self, steps: int | None) -> int:
        return 0


class NextUse:
    """By the distance of the next use in powers of two (Belady's order, known from the graph); within a bucket by last use."""

    buckets = 8
    UNKNOWN = 4

    def bucket(self, steps: int | None) -> int:
        if steps is None:
            return self.UNKNOWN
        if steps >= NEVER:
            return 0
        if steps < 8:
            return 7 - (max(steps, 1).bit_length() - 1)  # 7: 0 or 1; 6: 2, 3; 5: 4 to 7
        return max(1, 3 - (steps.bit_length() - 4) // 2)  # 3: 8 to 31; 2: 32 to 127; 1: beyond


Orders = tuple[tuple[int, int, "Lists"], ...]
"""For each level that a page can be at: the level's bit, the first of the lists of its class, the lists."""


class Lists:
    """Node n stands at n + MAX_LISTS of the columns; below are the lists' own ends, so that no step has a special case."""

    __slots__ = ("clock", "_count", "next", "previous", "stamps", "member", "sizes")

    def __init__(self) -> None:
        self.previous = array("I", range(MAX_LISTS))
        self.next = array("I", range(MAX_LISTS))
        self.member = array("H", (0,)) * MAX_LISTS
        self.stamps = array("Q", (0,)) * MAX_LISTS
        self.sizes = [0]
        self._count = 1  # list 0 is none
        self.clock = 0

    def add_lists(self, count: int) -> int:
        """The first of `count` new lists."""
        if self._count + count > MAX_LISTS:
            raise InvariantViolation(f"more than {MAX_LISTS} lists of pages")
        self._count += count
        self.sizes.extend([0] * count)
        return self._count - count

    def grow(self, nodes: int) -> None:
        """Makes columns for `nodes` nodes in all."""
        more = nodes + MAX_LISTS - len(self.next)
        if more > 0:
            for column, kind in ((self.previous, "I"), (self.next, "I"), (self.member, "H"), (self.stamps, "Q")):
                column.extend(array(kind, bytes(more * column.itemsize)))

    def list_of(self, node: int) -> int:
        """0 for none."""
        return self.member[node + MAX_LISTS]

    def size(self, number: int) -> int:
        return self.sizes[number]

    def stamp(self, node: int) -> int:
        """Grows with every use."""
        return self.stamps[node + MAX_LISTS]

    # Pages come and go many at a time: what follows is a page fault's whole work in lists, and so written out.

    def take_out(self, nodes: Iterable[int]) -> None:
        """Takes the nodes out of the lists that they are in, if they are in any."""
        following, preceding, member, sizes = self.next, self.previous, self.member, self.sizes
        for node in nodes:
            at = node + MAX_LISTS
            number = member[at]
            if number:
                before, after = preceding[at], following[at]
                following[before] = after
                preceding[after] = before
                sizes[number] -= 1
                member[at] = 0

    def remove(self, node: int) -> None:
        """Takes the node out of the list that it is in, if it is in one."""
        at = node + MAX_LISTS
        number = self.member[at]
        if number:
            following, preceding = self.next, self.previous
            before, after = preceding[at], following[at]
            following[before] = after
            preceding[after] = before
            self.sizes[number] -= 1
            self.member[at] = 0

    def heat(self, nodes: Iterable[int], number: int) -> None:
        """Puts the nodes at a list's hot end, in their order and as used now, from wherever they are."""
        following, preceding, member, sizes, stamps = self.next, self.previous, self.member, self.sizes, self.stamps
        clock, count, last = self.clock, 0, preceding[number]
        for node in nodes:
            at = node + MAX_LISTS
            clock += 1
            stamps[at] = clock
            if at == last:
                continue
            old = member[at]
            if old:
                before, after = preceding[at], following[at]
                following[before] = after
                preceding[after] = before
                sizes[old] -= 1
            member[at] = number
            count += 1
            following[last] = at
            preceding[at] = last
            last = at
        following[last] = number  # not sooner: nobody above looks behind the last
        preceding[number] = last
        sizes[number] += count
        self.clock = clock

    def touch(self, nodes: Sequence[int]) -> None:
        """Counts a use of each, in their order: it goes to the hot end of its list, if it is in one."""
        following, member, stamps = self.next, self.member, self.stamps
        at = nodes[0] + MAX_LISTS
        number = member[at]
        if len(nodes) == 1:
            if number and following[at] != number:
                self.heat(nodes, number)
            else:
                self.clock = stamps[at] = self.clock + 1
            return
        due, is_hottest = at, True
        for node in nodes:
            at = node + MAX_LISTS
            if member[at] != number:
                groups: dict[int, list[int]] = {}
                for each in nodes:
                    groups.setdefault(member[each + MAX_LISTS], []).append(each)
                for group in groups.values():
                    self.touch(group)
                return
            is_hottest = is_hottest and at == due
            due = following[at]
        if number and not (is_hottest and due == number):
            self.heat(nodes, number)
            return
        clock = self.clock
        for node in nodes:
            clock += 1
            stamps[node + MAX_LISTS] = clock
        self.clock = clock

    def shift(self, node: int, by: int) -> None:
        """Moves a node that is in a list, if it is, to the one `by` further, where its last use belongs."""
        at = node + MAX_LISTS
        number = self.member[at]
        if not number:
            return
        following, preceding, stamps = self.next, self.previous, self.stamps
        before, after = preceding[at], following[at]
        following[before] = after
        preceding[after] = before
        self.sizes[number] -= 1
        self.member[at] = number = number + by
        self.sizes[number] += 1
        before, after = preceding[number], number
        if stamps[before] > stamps[at]:
            after = self.place(number, stamps[at])
            before = preceding[after]
        following[before] = preceding[after] = at
        preceding[at] = before
        following[at] = after

    def put_back(self, nodes: Iterable[int], number: int) -> None:
        """Puts nodes that are in no list where their last use belongs."""
        for node in nodes:
            at = node + MAX_LISTS
            after = self.place(number, self.stamps[at])
            before = self.previous[after]
            self.next[before] = self.previous[after] = at
            self.previous[at] = before
            self.next[at] = after
            self.member[at] = number
            self.sizes[number] += 1

    def place(self, number: int, stamp: int) -> int:
        """Before whom a node used at `stamp` belongs."""
        stamps, cold, hot = self.stamps, self.next[number], self.previous[number]
        first, last = stamps[cold], stamps[hot]
        for _ in range(NEAR):
            if cold == number or stamps[cold] >= stamp:
                return cold
            if stamps[hot] <= stamp:
                return self.next[hot]
            cold, hot = self.next[cold], self.previous[hot]
        return self.next[number] if stamp - first < last - stamp else number

    def front(self, number: int) -> int:
        """The coldest node; -1 for an empty list."""
        first = self.next[number]
        return first - MAX_LISTS if first != number else -1

    def iterate(self, number: int) -> Iterator[int]:
        """From cold to hot. The list must not change meanwhile."""
        at = self.next[number]
        while at != number:
            yield at - MAX_LISTS
            at = self.next[at]

    @property
    def bytes_a_node(self) -> int:
        return sum(column.itemsize for column in (self.previous, self.next, self.member, self.stamps))
