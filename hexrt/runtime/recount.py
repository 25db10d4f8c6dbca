"""Counts everything over while the daemon stands still: for tests, where a difference stops the daemon.

Owns when that is done: after a turn that leaves no task and no copy in flight, and for a small share of the time. Loop thread only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from hexrt.brain.decide import Brain
from hexrt.runtime.state import RunTable
from hexrt.runtime.tensors import Tensors

LEAST_S = 0.02
SHARE = 20
"""Counting takes at most one part in so many of the time."""


class Recount:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        table: RunTable,
        brain: Brain,
        tensors: Tensors,
        is_due: Callable[[], bool],
    ) -> None:
        """`is_due`: whether a turn is to come, before which not all is settled."""
        self._loop = loop
        self._table = table
        self._brain = brain
        self._tensors = tensors
        self._again_s = 0.0  # the loop's time
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._is_due = is_due

    def after_turn(self) -> None:
        """A count follows, soon and outside of the turn: an error there is one of the loop's, which stops the daemon."""
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_at(max(self._loop.time(), self._again_s), self._count_if_still)

    def _count_if_still(self) -> None:
        self._timer = None
        if self._is_due() or len(self._brain.engines.keeper.traffic):
            return  # a turn comes, and with it the next count
        if any(run.in_flight for run in self._table.runs.values()):
            return
        began = time.monotonic()
        self.count()
        self._again_s = self._loop.time() + max(LEAST_S, SHARE * (time.monotonic() - began))

    def count(self) -> None:
        """Raises AssertionError or InvariantViolation where anything differs. Nothing must be in flight."""
        brain = self._brain
        self._table.check_integrity()
        brain.engines.keeper.check_integrity()
        brain.engines.endpoints.check_integrity()
        for engine in brain.engines.engines():
            engine.check_integrity()
        self._tensors.check_integrity(self._table.runs.values(), idle=True)
        is_served = all(device.ready or device.lost for device in brain.devices.values())
        brain.staging.check_integrity(idle=is_served and not brain.paused)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
