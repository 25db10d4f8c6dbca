"""Page tables: which pages hold a sequence, in order.

Owns the tables and one reference on each entry's page; the pages themselves are `pool.PagePool`'s. Versions tell a host's copy of a table from
an old one. One owner, the daemon's LLM engine state. Pure.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hexrt.core import SequenceId
from hexrt.errors import InvariantViolation
from hexrt.memory.pool import Level, Page, PagePool


@dataclass(eq=False, slots=True)
class _Table:
    pages: array[Page]
    version: int = 1


class PageTables:
    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._tables: dict[SequenceId, _Table] = {}

    def create(self, sequence: SequenceId, pages: Iterable[Page] = ()) -> None:
        """A table for a new sequence. The reference that each page was made with is the table's from now on."""
        if sequence in self._tables:
            raise InvariantViolation(f"sequence {sequence} has a page table already")
        self._tables[sequence] = _Table(array("I", pages))

    def share(self, source: SequenceId, target: SequenceId, count: int) -> array[Page]:
        """Makes the table of `target`, a new sequence, out of the first `count` entries of `source`; returns them."""
        table = self._table(source)
        if target in self._tables or not 0 <= count <= len(table.pages):
            raise InvariantViolation(f"cannot share {count} of {len(table.pages)} pages of {source} with {target}")
        shared = table.pages[:count]
        self.pool.share(shared)
        self._tables[target] = _Table(shared)
        return shared[:]

    def truncate(self, sequence: SequenceId, count: int) -> array[Page]:
        """Drops the entries after the first `count` and the references on them; returns them."""
        table = self._table(sequence)
        dropped = table.pages[count:]
        if dropped:
            del table.pages[count:]
            table.version += 1
            self.pool.release(dropped)
        return dropped

    def release(self, sequence: SequenceId) -> None:
        """Drops the table and its references."""
        pages = self._table(sequence).pages
        del self._tables[sequence]
        self.pool.release(pages)

    def table(self, sequence: SequenceId) -> array[Page]:
        """The pages, in order; not to be changed, and valid until the table changes."""
        return self._table(sequence).pages

    def frames(self, sequence: SequenceId) -> tuple[int, ...]:
        """The frames of the pages in their top tier. Raises InvariantViolation where one is not there."""
        pool, pages = self.pool, self._table(sequence).pages
        if not pages:
            return ()
        top = Level(pool.classes[pool.cls(pages[0])].level)  # a table's pages are of one class
        return tuple([pool.frame(page, top) for page in pages])

    def version(self, sequence: SequenceId) -> int:
        """Grows with every change of an entry that was there."""
        return self._table(sequence).version

    def lost_at(self, sequence: SequenceId) -> int | None:
        """The index of the first page that has no copy, and none on its way; None where there is none."""
        lost = self.pool.is_lost
        return next((index for index, page in enumerate(self._table(sequence).pages) if lost(page)), None)

    def sequences(self) -> set[SequenceId]:
        """Those that have a page table."""
        return set(self._tables)

    def __contains__(self, sequence: SequenceId) -> bool:
        return sequence in self._tables

    def _table(self, sequence: SequenceId) -> _Table:
        table = self._tables.get(sequence)
        if table is None:
            raise InvariantViolation(f"sequence {sequence} has no page table")
        return table

    def check_integrity(self) -> None:
        """Raises InvariantViolation unless every entry is a page with a reference for each table that it is in."""
        counts = Counter(page for table in self._tables.values() for page in table.pages)
        for page, count in counts.items():
            if page not in self.pool or self.pool.refs(page) < count:
                raise InvariantViolation(f"in {count} tables: {self.pool.story(page)}")
