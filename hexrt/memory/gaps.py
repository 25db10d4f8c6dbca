"""The free parts of a stretch of memory that is handed out in pieces of any size.

Owns the list of gaps, not the memory. One owner; no two gaps are ever neighbours. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from hexrt.errors import InvariantViolation


class Gaps:
    """`size` bytes from `start`. The lowest address that has room goes first, so that what was touched is touched again."""

    __slots__ = ("_sizes", "_starts", "size", "start")

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.size = size
        self._starts = [start]  # in order of address
        self._sizes = [size]

    @property
    def largest(self) -> int:
        return max(self._sizes, default=0)

    def take(self, size: int) -> int:
        """Where `size` bytes are now the caller's; -1 where no gap has them."""
        for index, gap in enumerate(self._sizes):
            if gap >= size:
                start = self._starts[index]
                if gap == size:
                    del self._starts[index], self._sizes[index]
                else:
                    self._starts[index] = start + size
                    self._sizes[index] = gap - size
                return start
        return -1

    def take_at(self, start: int, size: int) -> bool:
        """Takes these very bytes; False, with nothing changed, where they are not all in one gap."""
        index = bisect_left(self._starts, start + 1) - 1
        if index < 0 or start + size > self._starts[index] + self._sizes[index]:
            return False
        first, end = self._starts[index], self._starts[index] + self._sizes[index]
        parts = [part for part in ((first, start - first), (start + size, end - start - size)) if part[1]]
        self._starts[index : index + 1] = [part[0] for part in parts]
        self._sizes[index : index + 1] = [part[1] for part in parts]
        return True

    def give(self, start: int, size: int) -> None:
        """Takes back what was taken as a whole; it joins the gaps beside it."""
        starts, sizes = self._starts, self._sizes
        index = bisect_left(starts, start)
        if index < len(starts) and start + size == starts[index]:
            size += sizes[index]
            del starts[index], sizes[index]
        if index and starts[index - 1] + sizes[index - 1] == start:
            sizes[index - 1] += size
        else:
            starts.insert(index, start)
            sizes.insert(index, size)

    def check_integrity(self, held: Iterable[tuple[int, int]]) -> None:
        """Raises InvariantViolation unless the gaps and `held` make up the whole without overlap, and no two gaps are neighbours."""
        gaps = list(zip(self._starts, self._sizes, strict=True))
        end, was_gap = self.start, False
        for start, size, is_gap in sorted([*((*gap, True) for gap in gaps), *((*span, False) for span in held)]):
            if start != end or size < 1 or (is_gap and was_gap):
                raise InvariantViolation(f"bytes {start} to {start + size} follow {end}")
            end, was_gap = start + size, is_gap
        if end != self.start + self.size or gaps != sorted(gaps):
            raise InvariantViolation(f"gaps and held parts end at {end}, not at {self.start + self.size}")
