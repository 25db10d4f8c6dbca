"""Extents of one tier: which class each is cut for, and which frames lie free in it.

Owns the bitmaps; `frames.FrameSpace` builds on it and is what others use. A tier is cut in extents; an extent is cut for one class (one frame
size) at a time and goes back when all its frames are free. Frame f of a class of b bytes lies at [f*b, (f+1)*b) of the tier, one stride over
the whole tier, so that a host can view it as one array; a frame that crosses an edge exists only while both extents are of its class:

    extents    |------ 0 ------|------ 1 ------|------ 2 ------|
    class A    [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ].. (free)            frame 2 crosses, both extents are A's
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from hexrt.errors import InvariantViolation
from hexrt.memory.bits import longest_run, lowest, run_around, runs_of

EXTENT_BYTES = 32 << 20
GRANULE = 4096
STALE, UNLISTED = -1, -2


class FrameStatistics(msgspec.Struct, frozen=True):
    bytes: int
    free_extents: int
    held_bytes: int
    free_bytes: int
    runs: int  # of free bytes
    largest_run_bytes: int
    lost_bytes: int  # cut off at extents' edges
    fragmentation: float  # 1 - largest run / free; 0 when none is free


@dataclass(eq=False, slots=True)
class FrameClass:
    """Extents are bits of ints: those of the class, those that may have free frames, those by the size of their longest free run."""

    number: int
    bytes: int
    own: int = 0
    some: int = 0  # those in `stale` or `by_run`
    stale: int = 0  # whose free frames changed since they were measured; there may be none by now
    by_run: list[int] = field(default_factory=lambda: [0] * 24)  # k: the longest free run is of [2**k, 2**(k+1)) frames
    lowest: int = 0  # no extent below has free frames
    free: int = 0
    held: int = 0
    usable: int = -1  # frames in own and free extents; -1: not counted since an extent changed hands


class Extents:
    """What `FrameSpace` chooses from; its fields are for that class alone."""

    def __init__(self, total_bytes: int, extent_bytes: int = EXTENT_BYTES) -> None:
        if extent_bytes < GRANULE or extent_bytes % GRANULE or total_bytes < 0:
            raise InvariantViolation(f"{total_bytes} bytes in extents of {extent_bytes}")
        self.total_bytes = total_bytes - total_bytes % GRANULE
        self.extent_bytes = extent_bytes
        self.extents = -(-self.total_bytes // extent_bytes)
        self._classes: list[FrameClass] = []
        self._owner = array("i", (-1,)) * self.extents
        self._mask = [0] * self.extents  # the free frames that begin in the extent
        self._held = array("I", (0,)) * self.extents  # frames held that lie in it, wholly or in part
        self._base = array("Q", (0,)) * self.extents  # of a cut extent: the first frame that begins in it
        self._bucket = array("b", (UNLISTED,)) * self.extents  # its place in `by_run`, or one of the two
        self._longest = array("I", (0,)) * self.extents
        self._free = (1 << self.extents) - 1

    # --- classes ----------------------------------------------------------------------------------------------------

    def add_class(self, frame_bytes: int) -> int:
        """The class of frames of this size; the same number for the same size."""
        if frame_bytes < GRANULE or frame_bytes % GRANULE:
            raise InvariantViolation(f"frames of {frame_bytes} bytes are not whole granules of {GRANULE}")
        for known in self._classes:
            if known.bytes == frame_bytes:
                return known.number
        self._classes.append(FrameClass(len(self._classes), frame_bytes))
        return len(self._classes) - 1

    @property
    def classes(self) -> range:
        return range(len(self._classes))

    def frame_bytes(self, cls: int) -> int:
        return self._classes[cls].bytes

    def capacity(self, cls: int) -> int:
        """Frames, if the whole tier were cut for the class."""
        return self.total_bytes // self._classes[cls].bytes

    def held(self, cls: int) -> int:
        return self._classes[cls].held

    def is_shared(self, cls: int) -> bool:
        """Whether another class holds frames too."""
        for c in self._classes:
            if c.held and c.number != cls:
                return True
        return False

    def available(self, cls: int) -> int:
        """Frames that can be allocated now: free ones in the class's extents, and what free extents would give."""
        c = self._classes[cls]
        if c.usable < 0:
            c.usable = sum(
                max(end - first, 0) for first, end in (self._whole(c, *g) for g in runs_of(c.own | self._free))
            )
        return c.usable - c.held

    def can_allocate(self, cls: int, count: int) -> bool:
        return 0 <= count <= self.available(cls)

    # --- extents ----------------------------------------------------------------------------------------------------

    def _first(self, c: FrameClass, extent: int) -> int:
        """The first frame that begins in the extent or after it."""
        return -(-extent * self.extent_bytes // c.bytes)

    def _whole(self, c: FrameClass, low: int, high: int) -> tuple[int, int]:
        """The frames [first, end) that lie wholly in the extents [low, high)."""
        return self._first(c, low), min(high * self.extent_bytes, self.total_bytes) // c.bytes

    def _inside(self, c: FrameClass, extent: int, first: int, end: int) -> int:
        """How many of the frames [first, end) lie in the extent, wholly or in part."""
        return min(end, self._first(c, extent + 1)) - max(first, extent * self.extent_bytes // c.bytes)

    def _take(self, c: FrameClass, first: int, span: int) -> None:
        size, end = self.extent_bytes, first + span
        low, high = first * c.bytes // size, (end * c.bytes - 1) // size
        if low == high and self._owner[low] == c.number:
            self._held[low] += span
        else:
            missing = self._free & ((2 << high) - (1 << low))
            for start, stop in runs_of(missing):
                self._cut(c, start, stop)
            for extent in range(low, high + 1):
                self._held[extent] += self._inside(c, extent, first, end)
        c.held += span
        self._set_held(c, first, end)

    def _cut(self, c: FrameClass, start: int, stop: int) -> None:
        first, end = self._crossing_own(c, start, stop)
        bits = (1 << stop) - (1 << start)
        self._free ^= bits
        c.own |= bits
        self._owner[start:stop] = array("i", (c.number,)) * (stop - start)
        self._base[start:stop] = array("Q", [self._first(c, extent) for extent in range(start, stop)])
        self._set_free(c, first, end)
        self._hands_changed()

    def _crossing_own(self, c: FrameClass, start: int, stop: int) -> tuple[int, int]:
        """Frames that come to be with the extents [start, stop) beside those that the class has."""
        low, high = run_around(c.own | ((1 << stop) - (1 << start)), start)
        first, end = self._whole(c, low, high)
        size = self.extent_bytes
        return max(first, start * size // c.bytes), min(end, -(-stop * size // c.bytes))

    def _give_back(self, c: FrameClass, extent: int) -> None:
        """The extent holds no frame any more: it is cut for nobody."""
        first, end = self._crossing_own(c, extent, extent + 1)
        self._set_held(c, first, end)
        self._unlist(c, extent)
        bit = 1 << extent
        c.own ^= bit
        self._free |= bit
        self._owner[extent] = -1
        self._hands_changed()

    def _hands_changed(self) -> None:
        for c in self._classes:
            c.usable = -1

    def _set_free(self, c: FrameClass, first: int, end: int) -> None:
        c.free += max(end - first, 0)
        while first < end:
            extent = first * c.bytes // self.extent_bytes
            stop = min(end, self._first(c, extent + 1))
            self._mask[extent] |= (1 << (stop - first)) - 1 << (first - self._first(c, extent))
            self._touched(c, extent)
            first = stop

    def _set_held(self, c: FrameClass, first: int, end: int) -> None:
        c.free -= max(end - first, 0)
        while first < end:
            extent = first * c.bytes // self.extent_bytes
            stop = min(end, self._first(c, extent + 1))
            self._mask[extent] ^= (1 << (stop - first)) - 1 << (first - self._first(c, extent))
            self._touched(c, extent)
            first = stop

    def _touched(self, c: FrameClass, extent: int) -> None:
        """The extent's free frames changed: its longest run is unknown. One that has none any more is found out when it is looked at."""
        bucket = self._bucket[extent]
        if extent < c.lowest and self._mask[extent]:
            c.lowest = extent
        if bucket == STALE or (bucket == UNLISTED and not self._mask[extent]):
            return
        bit = 1 << extent
        if bucket >= 0:
            c.by_run[bucket] ^= bit
        c.some |= bit
        c.stale |= bit
        self._bucket[extent] = STALE

    def _unlist(self, c: FrameClass, extent: int) -> None:
        bucket, bit = self._bucket[extent], 1 << extent
        if bucket == UNLISTED:
            return
        if bucket == STALE:
            c.stale ^= bit
        else:
            c.by_run[bucket] ^= bit
        c.some ^= bit
        self._bucket[extent] = UNLISTED

    # --- looking in -------------------------------------------------------------------------------------------------

    def extent_of(self, cls: int, frame: int) -> int:
        """The extent that the frame begins in."""
        return frame * self._classes[cls].bytes // self.extent_bytes

    def frames_in(self, extent: int) -> tuple[int, Iterator[int]]:
        """The class that the extent is cut for (-1: it is free), and the frames held in it, wholly or in part."""
        owner = self._owner[extent]
        return owner, iter(()) if owner < 0 else self._held_in(self._classes[owner], extent)

    def _held_in(self, c: FrameClass, extent: int) -> Iterator[int]:
        first, end = self._crossing_own(c, extent, extent + 1)
        for frame in range(first, end):
            if not self._is_free(c, frame):
                yield frame

    def _is_free(self, c: FrameClass, frame: int) -> bool:
        extent = frame * c.bytes // self.extent_bytes
        return bool(self._mask[extent] >> (frame - self._first(c, extent)) & 1)

    def own_free(self, cls: int) -> tuple[int, int]:
        """Free frames in the class's extents, and the longest run of them."""
        c = self._classes[cls]
        longest = length = end = 0
        some = c.some
        while some:
            extent = lowest(some)
            base = self._first(c, extent)
            for low, high in runs_of(self._mask[extent]):
                length = high - low + (length if base + low == end else 0)
                end, longest = base + high, max(longest, length)
            some &= some - 1
        return c.free, longest

    def packed_end(self, cls: int) -> int:
        """The frame below which all held ones of the class would be, were they moved to the lowest frames of its extents."""
        c, left = self._classes[cls], self._classes[cls].held
        for low, high in runs_of(c.own):
            first, end = self._whole(c, low, high)
            if left <= end - first:
                return first + left
            left -= end - first
        return self.capacity(cls)

    def extents_of(self, cls: int) -> list[int]:
        """The extents that are cut for the class, descending."""
        return [extent for low, high in runs_of(self._classes[cls].own) for extent in range(low, high)][::-1]

    def free_runs(self) -> Iterator[tuple[int, int]]:
        """The runs of free bytes [start, end): free frames of one class in a row, or free extents in a row."""
        size = self.extent_bytes
        for low, high in runs_of(self._free):
            yield low * size, min(high * size, self.total_bytes)
        for c in self._classes:
            start = end = 0
            some = c.some
            while some:
                base = self._first(c, lowest(some))
                for low, high in runs_of(self._mask[lowest(some)]):
                    if base + low != end or end == start:
                        if end > start:
                            yield start * c.bytes, end * c.bytes
                        start = base + low
                    end = base + high
                some &= some - 1
            if end > start:
                yield start * c.bytes, end * c.bytes

    def statistics(self) -> FrameStatistics:
        sizes = [end - start for start, end in self.free_runs()]
        free, largest = sum(sizes), max(sizes, default=0)
        held = sum(c.held * c.bytes for c in self._classes)
        lost = self.total_bytes - free - held
        fragmentation = 1 - largest / free if free else 0.0
        return FrameStatistics(
            self.total_bytes, self._free.bit_count(), held, free, len(sizes), largest, lost, fragmentation
        )

    @property
    def free_bytes(self) -> int:
        free = self._free.bit_count() * self.extent_bytes
        if self._free >> (self.extents - 1) & 1 if self.extents else False:
            free -= self.extents * self.extent_bytes - self.total_bytes
        return free + sum(c.free * c.bytes for c in self._classes)

    @property
    def bitmap_bytes(self) -> int:
        return sum(mask.bit_length() // 8 + 28 for mask in self._mask) + 13 * self.extents

    def check_integrity(self) -> None:
        """Raises InvariantViolation unless extents have one owner each, and free + held == total in every class and extent."""
        owned = self._free
        for c in self._classes:
            if owned & c.own:
                raise InvariantViolation(f"extents {owned & c.own:b} have two owners")
            owned |= c.own
            free = sum(self._mask[e].bit_count() for low, high in runs_of(c.own) for e in range(low, high))
            total = sum(max(end - first, 0) for first, end in (self._whole(c, *run) for run in runs_of(c.own)))
            if free != c.free or free + c.held != total:
                raise InvariantViolation(
                    f"{c.free} ({free}) frames free and {c.held} held of {c.bytes} bytes do not make {total}"
                )
        if owned != (1 << self.extents) - 1:
            raise InvariantViolation(f"of {self.extents} extents only {owned:b} are free or cut")
        for extent, owner in enumerate(self._owner):
            self._check_extent(extent, owner)

    def _check_extent(self, extent: int, owner: int) -> None:
        bit, mask = 1 << extent, self._mask[extent]
        if owner < 0:
            if mask or self._held[extent] or not self._free & bit:
                raise InvariantViolation(
                    f"extent {extent} is free and has {self._held[extent]} frames held, free {mask:b}"
                )
            return
        c = self._classes[owner]
        held = sum(1 for _ in self._held_in(c, extent))
        if not c.own & bit or held != self._held[extent] or not held:
            raise InvariantViolation(f"extent {extent} counts {self._held[extent]} frames held and has {held}")
        bucket, length = self._bucket[extent], longest_run(mask)
        known = [k for k, bits in enumerate(c.by_run) if bits & bit]
        listed = bool(c.some & bit), bool(c.stale & bit)
        if listed != (bucket != UNLISTED, bucket == STALE) or (mask and (bucket == UNLISTED or extent < c.lowest)):
            raise InvariantViolation(f"extent {extent} with free frames {mask:b} is not listed by them")
        if known != [bucket] * (bucket >= 0) or (
            bucket >= 0 and (length != self._longest[extent] or length.bit_length() - 1 != bucket)
        ):
            raise InvariantViolation(f"extent {extent}, whose longest free run is {length}, is listed under {known}")
