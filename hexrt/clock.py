"""The clock as a value that is passed in, so that decisions and tests choose their own time.

`SystemClock` reads the machine's clocks; `ManualClock` moves only when told. Nothing else in hexrt calls `time` for now-values
outside a host process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Monotonic nanoseconds; comparable between processes of one machine and one boot (CLOCK_MONOTONIC)."""

    def wall_ns(self) -> int:
        """Unix time in nanoseconds, for people and for the store; may step."""


class SystemClock:
    now_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)


@dataclass(slots=True)
class ManualClock:
    ns: int = 0
    epoch_ns: int = 1_700_000_000_000_000_000

    def now_ns(self) -> int:
        return self.ns

    def wall_ns(self) -> int:
        return self.epoch_ns + self.ns

    def advance_ns(self, by_ns: int) -> None:
        self.ns += by_ns
