"""Frames of one tier: taking them in long runs, and giving them back.

Owns the choice of frames over the extents that `Extents` keeps. Knows nothing of what frames hold and moves no bytes; used by
`pool.PagePool` alone. Every method does the whole of what it says or changes nothing. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from hexrt.errors import InvariantViolation, OutOfMemory
from hexrt.memory.bits import find_run, longest_run, lowest, run_around, runs_of
from hexrt.memory.extents import EXTENT_BYTES, GRANULE, STALE, Extents, FrameClass, FrameStatistics

__all__ = ["EXTENT_BYTES", "GRANULE", "FrameSpace", "FrameStatistics"]

REFRESH = 32
"""Extents whose longest run is measured anew in one allocation that can do with shorter runs."""


class FrameSpace(Extents):
    def can_allocate_run(self, cls: int, span: int) -> bool:
        return span <= self.available(cls) and self._find_run(self._classes[cls], span) >= 0

    # --- taking and giving back -------------------------------------------------------------------------------------

    def allocate(self, cls: int, count: int) -> array[int]:
        """`count` frames in the longest runs at hand, ascending. Raises OutOfMemory with nothing changed."""
        c = self._classes[cls]
        if count == 1 and c.free:
            return array("I", (self._take_lowest(c),))
        if not 0 <= count <= self.available(cls):
            raise self._refusal(c, count, "frames")
        pieces = []
        while count:
            first, length = self._pick(c, count)
            if length > 1 or not c.free:
                self._take(c, first, length)
                pieces.append((first, length))
                count -= length
                continue
            singles = min(count, c.free)  # no run is longer, so that any free frames do
            pieces.extend([(self._take_lowest(c), 1) for _ in range(singles)])
            count -= singles
        pieces.sort()
        frames = array("I")
        for first, length in pieces:
            frames.extend(range(first, first + length))
        return frames

    def allocate_run(self, cls: int, span: int) -> int:
        """The first of `span` contiguous frames. Raises OutOfMemory with nothing changed."""
        c = self._classes[cls]
        if span == 1 and c.free:
            return self._take_lowest(c)
        first = self._find_run(c, span) if 0 < span <= self.available(cls) else -1
        if first < 0:
            raise self._refusal(c, span, "contiguous frames")
        self._take(c, first, span)
        return first

    def _take_lowest(self, c: FrameClass) -> int:
        """The lowest free frame in the class's extents, which has one: the commonest case, and so written out."""
        extent = c.lowest
        mask = self._mask[extent]
        if not mask or self._owner[extent] != c.number:
            extent = self._lowest_extent(c)
            mask = self._mask[extent]
        bit = mask & -mask
        first = self._base[extent] + bit.bit_length() - 1
        if (first + 1) * c.bytes > (extent + 1) * self.extent_bytes:
            self._take(c, first, 1)
            return first
        self._mask[extent] = mask ^ bit
        self._held[extent] += 1
        c.held += 1
        c.free -= 1
        if self._bucket[extent] != STALE:
            self._touched(c, extent)
        return first

    def can_allocate_runs(self, cls: int, spans: Sequence[int]) -> bool:
        """Whether `allocate_runs` would do."""
        if len(spans) == 1:
            return self.can_allocate_run(cls, spans[0])
        try:
            firsts = self.allocate_runs(cls, spans)
        except OutOfMemory:
            return False
        self._undo(cls, firsts, spans)
        return True

    def allocate_runs(self, cls: int, spans: Sequence[int]) -> list[int]:
        """The first frame of a run for each span. Raises OutOfMemory with nothing changed."""
        firsts: list[int] = []
        try:
            for span in spans:
                firsts.append(self.allocate_run(cls, span))
        except OutOfMemory:
            self._undo(cls, firsts, spans)
            raise
        return firsts

    def _undo(self, cls: int, firsts: list[int], spans: Sequence[int]) -> None:
        for first, span in zip(firsts, spans, strict=False):
            self.free_run(cls, first, span)

    def allocate_below(self, cls: int, span: int, limit: int) -> int:
        """The first of `span` contiguous free frames, the lowest in one of the class's extents that begin before frame `limit`; -1 where none do."""
        c = self._classes[cls]
        some = c.some & ((2 << (limit * c.bytes // self.extent_bytes)) - 1)
        while some:
            extent = lowest(some)
            some &= some - 1
            if span > 1 and self._bucket[extent] == STALE:
                self._measure(c, extent)
            if self._mask[extent] and (span == 1 or self._longest[extent] >= span):
                first = self._first(c, extent) + find_run(self._mask[extent], span)
                if first >= limit:
                    return -1
                self._take(c, first, span)
                return first
        return -1

    def free(self, cls: int, frames: Iterable[int]) -> None:
        first = end = -1
        for frame in frames:
            if frame == end:
                end += 1
                continue
            if end > first:
                self.free_run(cls, first, end - first)
            first, end = frame, frame + 1
        if end > first:
            self.free_run(cls, first, end - first)

    def free_run(self, cls: int, first: int, span: int) -> None:
        c, size = self._classes[cls], self.extent_bytes
        low = first * c.bytes // size
        if span == 1 and low < self.extents and self._held[low] > 1 and self._owner[low] == cls:
            mask, bit = self._mask[low], 1 << (first - self._base[low])
            if not mask & bit and (first + 1) * c.bytes <= (low + 1) * size:  # the commonest case, and so written out
                self._mask[low] = mask | bit
                self._held[low] -= 1
                c.held -= 1
                c.free += 1
                if low < c.lowest or self._bucket[low] != STALE:
                    self._touched(c, low)
                return
        high = ((first + span) * c.bytes - 1) // size
        self._check_held(c, first, span, low, high)
        c.held -= span
        self._set_free(c, first, first + span)
        if low == high:
            self._held[low] -= span
            if not self._held[low]:
                self._give_back(c, low)
            return
        for extent in range(low, high + 1):
            self._held[extent] -= self._inside(c, extent, first, first + span)
            if not self._held[extent]:
                self._give_back(c, extent)

    def _check_held(self, c: FrameClass, first: int, span: int, low: int, high: int) -> None:
        for extent in range(low, high + 1):
            if extent >= self.extents or self._owner[extent] != c.number:
                raise InvariantViolation(
                    f"frames {first} to {first + span - 1} of {c.bytes} bytes are freed and are not held"
                )
            offset = first - self._first(c, extent)
            ones = ((1 << span) - 1 << offset) if offset >= 0 else ((1 << span) - 1 >> -offset)
            if self._mask[extent] & ones:
                raise InvariantViolation(f"frames {first} to {first + span - 1} of {c.bytes} bytes are freed twice")

    def _refusal(self, c: FrameClass, need: int, what: str) -> OutOfMemory:
        free = self.available(c.number)
        return OutOfMemory(
            f"{need} {what} of {c.bytes} bytes are needed and {free} are free of {self.capacity(c.number)}", "pages"
        )

    # --- choosing ---------------------------------------------------------------------------------------------------

    def _lowest_extent(self, c: FrameClass) -> int:
        """The lowest of the class's extents with a free frame; there is one."""
        if self._owner[c.lowest] != c.number or not self._mask[c.lowest]:
            while not self._mask[extent := lowest(c.some)]:
                self._unlist(c, extent)
            c.lowest = extent
        return c.lowest

    def _lowest_frame(self, c: FrameClass) -> tuple[int, int]:
        extent = self._lowest_extent(c)
        return self._first(c, extent) + lowest(self._mask[extent]), 1

    def _pick(self, c: FrameClass, need: int) -> tuple[int, int]:
        """A run of at most `need` frames: one that is long enough in the class's extents, else in free ones, else the longest."""
        if need == 1 and c.free:
            return self._lowest_frame(c)
        extent = self._fit(c, need, thorough=False)
        if extent >= 0:
            return self._first(c, extent) + find_run(self._mask[extent], need), need
        first, end, from_top = self._uncut(c, need)
        bucket = next((bits for bits in reversed(c.by_run) if bits), 0)
        if bucket and end - first < need and self._longest[lowest(bucket)] >= end - first:
            extent = lowest(bucket)
            length = self._longest[extent]
            return self._first(c, extent) + find_run(self._mask[extent], length), length
        length = min(need, end - first)
        return self._place_in(c, first, end, length, from_top), length

    def _place_in(self, c: FrameClass, first: int, end: int, length: int, from_top: bool) -> int:
        """Where a run of `length` goes in the free frames [first, end): at one end, and from an extent's beginning where that is a frame's."""
        if not from_top:
            return first
        if self.extent_bytes % c.bytes:
            return end - length
        whole = self.extent_bytes // c.bytes
        return max(first, (end - length) // whole * whole)

    def _fit(self, c: FrameClass, span: int, thorough: bool) -> int:
        """An extent of the class that has a run of `span` free frames; -1 where none is found."""
        stale, left = c.stale, -1 if thorough else REFRESH
        while stale and left:
            self._measure(c, lowest(stale))
            stale &= stale - 1
            left -= 1
        k = (span - 1).bit_length()
        for bits in c.by_run[k:]:
            if bits:
                return lowest(bits)
        bits, left = c.by_run[k - 1] if 0 < k <= len(c.by_run) else 0, -1 if thorough else REFRESH
        while bits and left:
            if self._longest[lowest(bits)] >= span:
                return lowest(bits)
            bits &= bits - 1
            left -= 1
        return -1

    def _measure(self, c: FrameClass, extent: int) -> None:
        length = self._longest[extent] = longest_run(self._mask[extent])
        if not length:
            self._unlist(c, extent)
            return
        bit, k = 1 << extent, length.bit_length() - 1
        self._bucket[extent] = k
        c.by_run[k] |= bit
        c.stale ^= bit

    def _uncut(self, c: FrameClass, need: int) -> tuple[int, int, bool]:
        """The frames [first, end) that one run of free extents would give, the neighbours' edges included, and whether to take them from the top.

        Extents beside the class's own come first, so that frames may cross the edge between them. A class that loses nothing at edges
        grows from the top down, out of the others' way.
        """
        from_top = self.extent_bytes % c.bytes == 0
        beside = self._free & (c.own << 1 | c.own >> 1)
        best = (0, 0, False)
        runs = list(runs_of(self._free))
        runs.sort(key=(lambda run: -run[0]) if from_top else (lambda run: not beside & ((1 << run[1]) - (1 << run[0]))))
        for start, stop in runs:
            first, end = self._crossing(c, start, stop)
            upward = from_top or (bool(c.own >> stop & 1) and not (start and c.own >> (start - 1) & 1))
            if end - first > best[1] - best[0]:
                best = (first, end, upward)
            if end - first >= need:
                return first, end, upward
        return best

    def _crossing(self, c: FrameClass, start: int, stop: int) -> tuple[int, int]:
        """Frames that the free extents [start, stop) would make usable."""
        low, high = run_around(c.own | self._free, start)
        first, end = self._whole(c, low, high)
        size = self.extent_bytes
        return max(first, start * size // c.bytes), min(end, -(-stop * size // c.bytes))

    def _find_run(self, c: FrameClass, span: int) -> int:
        extent = self._fit(c, span, thorough=True)
        if extent >= 0:
            return self._first(c, extent) + find_run(self._mask[extent], span)
        first, end, from_top = self._uncut(c, span)
        if end - first >= span:
            return self._place_in(c, first, end, span, from_top)
        for low, high in runs_of(c.own | self._free):
            found = self._find_across(c, low, high, span)
            if found >= 0:
                return found
        return -1

    def _find_across(self, c: FrameClass, low: int, high: int, span: int) -> int:
        """A run over several of the adjacent extents [low, high), each of the class or free; -1 where there is none."""
        first, end = self._whole(c, low, high)
        if end - first < span:
            return -1
        length = 0
        for extent in range(low, high):
            begin, stop = max(self._first(c, extent), first), min(self._first(c, extent + 1), end)
            frames = stop - begin
            if frames <= 0:
                continue
            mask = self._reachable(c, extent, stop)
            prefix = lowest(~mask)
            if length + min(prefix, frames) >= span:
                return begin - length
            length = length + frames if prefix >= frames else frames - (mask ^ ((1 << frames) - 1)).bit_length()
            if length >= span:  # with a frame that crosses into a free extent
                return stop - length
        return -1

    def _reachable(self, c: FrameClass, extent: int, stop: int) -> int:
        """The free frames before `stop` that begin in the extent, with those that taking free extents beside would give."""
        count = stop - self._first(c, extent)
        if self._owner[extent] < 0:
            return (1 << count) - 1
        edge = (stop * c.bytes - 1) // self.extent_bytes
        crosses_free = self._free & ((2 << edge) - (2 << extent)) if edge > extent else 0
        return self._mask[extent] | (1 << (count - 1) if crosses_free else 0)
