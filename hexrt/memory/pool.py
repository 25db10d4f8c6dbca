"""Frames of one tier and the page tables over them: who holds what, counted.

Owns the free frames, a reference count a frame, and one page table a sequence. Knows nothing of what the frames hold, and moves no
bytes. Used by one owner (the daemon's LLM engine state); every method either does the whole of what it says or changes nothing. Pure.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from hexrt.core import SequenceId
from hexrt.errors import InvariantViolation, OutOfMemory


class PoolStatistics(msgspec.Struct, frozen=True):
    frames: int
    free: int
    held: int
    shared: int  # held by more than one table
    tables: int


@dataclass(eq=False, slots=True)
class _Table:
    frames: array[int]
    version: int = 1  # grows with every change of an entry that was there


def _column(values: Iterable[int]) -> array[int]:
    return array("I", values)


class PagePool:
    """`frames` frames of `page_tokens` tokens each. The lowest free frame that was never held goes first, then the last one freed."""

    __slots__ = ("_counts", "_free", "_shared", "_tables", "frames", "page_tokens")

    def __init__(self, frames: int, page_tokens: int) -> None:
        if frames < 1 or page_tokens < 1:
            raise InvariantViolation(f"a pool of {frames} frames of {page_tokens} tokens")
        self.frames = frames
        self.page_tokens = page_tokens
        self._free = _column(range(frames - 1, -1, -1))  # a stack
        self._counts = _column((0,)) * frames
        self._shared = 0
        self._tables: dict[SequenceId, _Table] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def pages_of(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.page_tokens)

    def can_allocate(self, pages: int) -> bool:
        return 0 <= pages <= len(self._free)

    def allocate(self, sequence: SequenceId, pages: int) -> tuple[int, ...]:
        """Appends `pages` new frames to the sequence's table, which is made if there was none, and returns them.

        Raises OutOfMemory, with nothing changed, where fewer are free.
        """
        if not self.can_allocate(pages):
            raise OutOfMemory(f"{pages} pages are needed and {len(self._free)} of {self.frames} are free", "pages")
        table = self._tables.setdefault(sequence, _Table(_column(())))
        taken = self._free[len(self._free) - pages :]
        del self._free[len(self._free) - pages :]
        taken.reverse()
        for frame in taken:
            self._counts[frame] = 1
        table.frames.extend(taken)
        return tuple(taken)

    def share(self, source: SequenceId, target: SequenceId, pages: int) -> tuple[int, ...]:
        """Makes the table of `target`, a new sequence, out of the first `pages` entries of `source`; the frames are counted twice then."""
        table = self._table(source)
        if target in self._tables or not 0 <= pages <= len(table.frames):
            raise InvariantViolation(f"cannot share {pages} of {len(table.frames)} pages of {source} with {target}")
        shared = table.frames[:pages]
        for frame in shared:
            self._counts[frame] += 1
            self._shared += self._counts[frame] == 2
        self._tables[target] = _Table(shared)
        return tuple(shared)

    def truncate(self, sequence: SequenceId, pages: int) -> None:
        """Drops the entries after the first `pages` of the table."""
        table = self._table(sequence)
        if pages < len(table.frames):
            self._drop(table.frames[pages:])
            del table.frames[pages:]
            table.version += 1

    def release(self, sequence: SequenceId) -> None:
        """Drops the table; frames that no other table holds are free at once."""
        self._drop(self._table(sequence).frames)
        del self._tables[sequence]

    def reclaimable(self, sequences: Iterable[SequenceId]) -> int:
        """How many frames would become free if all of `sequences` were released."""
        held = Counter(frame for sequence in sequences for frame in self._table(sequence).frames)
        return sum(self._counts[frame] == count for frame, count in held.items())

    def __contains__(self, sequence: SequenceId) -> bool:
        return sequence in self._tables

    def sequences(self) -> set[SequenceId]:
        """Those that have a page table."""
        return set(self._tables)

    def table(self, sequence: SequenceId) -> tuple[int, ...]:
        return tuple(self._table(sequence).frames)

    def version(self, sequence: SequenceId) -> int:
        return self._table(sequence).version

    def _table(self, sequence: SequenceId) -> _Table:
        table = self._tables.get(sequence)
        if table is None:
            raise InvariantViolation(f"sequence {sequence} has no page table")
        return table

    def _drop(self, frames: array[int]) -> None:
        for frame in reversed(frames):
            self._counts[frame] -= 1
            self._shared -= self._counts[frame] == 1
            if not self._counts[frame]:
                self._free.append(frame)

    def statistics(self) -> PoolStatistics:
        free = len(self._free)
        return PoolStatistics(self.frames, free, self.frames - free, self._shared, len(self._tables))

    def check_integrity(self) -> None:
        """Raises InvariantViolation unless free + held == frames and every count is the number of tables that hold the frame."""
        owners = Counter(frame for table in self._tables.values() for frame in table.frames)
        free = set(self._free)
        if len(free) != len(self._free) or len(free) + len(owners) != self.frames or free & owners.keys():
            raise InvariantViolation(f"{len(self._free)} frames free and {len(owners)} held do not make {self.frames}")
        for frame, count in enumerate(self._counts):
            if count != owners[frame]:
                raise InvariantViolation(f"frame {frame} is counted {count} times and held {owners[frame]} times")
        if self._shared != sum(count > 1 for count in owners.values()):
            raise InvariantViolation(f"{self._shared} shared frames are counted")
