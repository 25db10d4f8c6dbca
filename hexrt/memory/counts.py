"""Who counts on pages: references, pins, uses and what is known of the next one.

Owns the reference and pin counts of each page; `pool.PagePool` builds on it and is what others use. A page that nobody counts on any more, and
that is in no move, is gone with its copies. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from hexrt.errors import InvariantViolation
from hexrt.memory.columns import Page
from hexrt.memory.copies import LEVELS_OF, Copies

ALL = 0b111
"""Levels."""


class Counts(Copies):
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
        pins, cls = columns.pins, columns.cls
        held: list[Page] = []
        for page in pages:
            c = self._cls(page)
            pins[page] += 1
            if pins[page] == 1:
                self.tiers[self.classes[c].top].pinned += 1
                held.append(page)
        while held:
            first = held[0]
            c, copies = cls[first], columns.copies[first]
            alike = [page for page in held if columns.copies[page] == copies and cls[page] == c]
            top = 1 << self.classes[c].level
            for level in LEVELS_OF[top if copies & top else copies]:
                columns.lists[level].take_out(alike)
            held = [page for page in held if columns.copies[page] != copies or cls[page] != c]

    def unpin(self, pages: Iterable[Page]) -> None:
        """Takes one pin off each; the last one counts as a use."""
        columns = self.columns
        pins, refs, moves = columns.pins, columns.refs, columns.moves
        free: list[Page] = []
        try:
            for page in pages:
                c = self._cls(page)
                left = pins[page] - 1
                if left < 0:
                    raise InvariantViolation(f"unpinned too often: {self.story(page)}")
                pins[page] = left
                if not left:
                    self.tiers[self.classes[c].top].pinned -= 1
                    if refs[page] or moves[page]:
                        free.append(page)
                    else:
                        self._forget(page)
        finally:
            if free:
                self._enlist(free, ALL)

    def touch(self, pages: Iterable[Page]) -> None:
        """Counts a use of each page, in their order."""
        pages, columns = tuple(pages), self.columns
        copies, cls = columns.copies, columns.cls
        if not pages:
            return
        held, c = copies[pages[0]], cls[pages[0]]
        for page in pages if len(pages) > 1 else ():
            if copies[page] != held or cls[page] != c:
                groups: dict[tuple[int, int], list[Page]] = {}
                for each in pages:
                    groups.setdefault((copies[each], cls[each]), []).append(each)
                for group in groups.values():
                    self.touch(group)
                return
        for bit, _, lists in self.classes[c].orders:
            if held & bit:
                lists.touch(pages)

    def set_next_use(self, pages: Iterable[Page], steps: int | None) -> None:
        """Says how many steps pass until the pages are read again: None is unknown, NEVER never."""
        bucket, column = self.policy.bucket(steps), self.columns.bucket
        changed = [page for page in pages if self._cls(page) >= 0 and column[page] != bucket]
        for page in changed:
            column[page] = bucket
        if changed:
            self._enlist(changed, ALL)

    def _forget(self, page: Page) -> None:
        """The page has no reference, pin or move: its copies and its number are free."""
        columns = self.columns
        record = self.classes[columns.cls[page]]
        for level in record.levels:
            if columns.copies[page] >> level & 1:
                self._drop_copy(record, page, level)
        columns.give_back(page)
