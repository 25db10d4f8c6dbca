"""Which frames of the journal are still needed, and by which runs.

Owns the table of frames in memory. A run is open from its Submitted until it is closed; the bytes of closed runs are waste, and a
closed run lingers while a frame holds such bytes of it. A frame that is all waste is deleted, and frames that are partly waste are
rewritten into fewer once waste outweighs what is needed, so that a long run does not keep the facts of the others. Used by one thread;
touches no file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set

import msgspec

from hexrt.runtime.store_records import EVERY_RUN, Frame

WASTE_BYTES = 8 << 20
"""Less waste than this is never worth a rewrite."""


class FrameUse(msgspec.Struct, eq=False):
    size_bytes: int
    live: dict[bytes, int]  # run -> bytes, only of open runs
    waste: set[bytes]  # closed runs

    @property
    def waste_bytes(self) -> int:
        return self.size_bytes - sum(self.live.values())


class Journal:
    def __init__(self) -> None:
        self._frames: OrderedDict[int, FrameUse] = OrderedDict()
        self._open: dict[bytes, set[int]] = {}  # run -> the frames that hold facts of it
        self._lingering: dict[bytes, set[int]] = {}  # closed run -> likewise, never none
        self._next = 1
        self.size_bytes = 0
        self.live_bytes = 0

    @property
    def open_runs(self) -> frozenset[bytes]:
        return frozenset(self._open)

    def numbers(self) -> list[int]:
        return list(self._frames)

    def is_open(self, run: bytes) -> bool:
        return run in self._open

    def begin(self, run: bytes) -> None:
        self._open.setdefault(run, set())

    def lingers(self, run: bytes) -> bool:
        return run in self._lingering

    def load(self, number: int, size_bytes: int, uses: dict[bytes, int], closed: Set[bytes]) -> None:
        """Takes in a frame that is on disk; to be called in the order of the numbers."""
        for run in uses:
            if run in closed:
                self._lingering.setdefault(run, set()).add(number)
            elif run != EVERY_RUN:
                self.begin(run)
        live = {run: used for run, used in uses.items() if run not in closed}
        self._put(number, size_bytes, live, uses.keys() & closed)
        self._next = number + 1

    def add(self, frame: Frame) -> int:
        """The number under which the frame is to be written."""
        number = self._next
        self._next += 1
        self._put(number, len(frame.facts), {run: used for run, used in frame.uses.items() if self._lives(run)}, set())
        return number

    def _lives(self, run: bytes) -> bool:
        return run == EVERY_RUN or run in self._open

    def _put(self, number: int, size_bytes: int, live: dict[bytes, int], waste: set[bytes]) -> None:
        for run in live:
            if run != EVERY_RUN:
                self._open[run].add(number)
        self._frames[number] = FrameUse(size_bytes, live, waste)
        self.size_bytes += size_bytes
        self.live_bytes += sum(live.values())

    def close(self, run: bytes) -> set[int]:
        """The run's facts become waste; returns the frames that hold some, none for a run that is not open."""
        numbers = self._open.pop(run, set())
        for number in numbers:
            use = self._frames[number]
            self.live_bytes -= use.live.pop(run)
            use.waste.add(run)
        if numbers:
            self._lingering[run] = set(numbers)
        return numbers

    def sweep(self, numbers: Iterable[int]) -> tuple[list[int], list[bytes]]:
        """Forgets those of `numbers` that nobody needs, and returns them and the runs that linger no more."""
        dead = [number for number in numbers if number in self._frames and not self._frames[number].live]
        dead += self._idle_head()
        gone: list[bytes] = []
        dropped = [number for number in dict.fromkeys(dead) if self._drop(number, gone)]
        return dropped, gone

    def _idle_head(self) -> list[int]:
        """The oldest frames, as long as they hold nothing of an open run: what concerns all runs concerned only earlier ones."""
        idle = []
        for number, use in self._frames.items():
            if use.live.keys() - {EVERY_RUN}:
                break
            idle.append(number)
        return idle

    def _drop(self, number: int, gone: list[bytes]) -> bool:
        use = self._frames.pop(number, None)
        if use is None:
            return False
        self._forget(number, use, gone)
        return True

    def _forget(self, number: int, use: FrameUse, gone: list[bytes]) -> None:
        self.size_bytes -= use.size_bytes
        self.live_bytes -= sum(use.live.values())
        for run in use.waste:
            left = self._lingering[run]
            left.discard(number)
            if not left:
                del self._lingering[run]
                gone.append(run)

    def can_compact(self) -> bool:
        waste_bytes = self.size_bytes - self.live_bytes
        return waste_bytes > WASTE_BYTES and waste_bytes > self.live_bytes

    def stretch(self, limit_bytes: int) -> list[int]:
        """Neighbouring frames, at least one, of about `limit_bytes` in all, the first of which holds waste. Needs `can_compact`."""
        chosen: list[int] = []
        total_bytes = 0
        for number, use in self._frames.items():
            if not chosen and use.waste_bytes == 0:
                continue
            if chosen and total_bytes + use.size_bytes > limit_bytes:
                break
            chosen.append(number)
            total_bytes += use.size_bytes
        return chosen

    def replace(self, numbers: Sequence[int], frames: Sequence[Frame]) -> list[bytes]:
        """`frames`, under the first of the neighbouring `numbers`, now stand for all of them; returns the runs that linger no more."""
        gone: list[bytes] = []
        for number in numbers:
            use = self._frames[number]
            for run in use.live:
                if run != EVERY_RUN:
                    self._open[run].discard(number)
            self._forget(number, use, gone)
        for number in numbers[len(frames) :]:
            del self._frames[number]
        for number, frame in zip(numbers, frames, strict=False):
            self._put(number, len(frame.facts), dict(frame.uses), set())
        return gone
