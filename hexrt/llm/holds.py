"""Sequences that have ended and are gone on from: whether their pages are held, left or moved down until then.

Owns which are held, and until when: a pin always ends by itself, so it cannot block others for ever. The choice is `scheduling.retention`'s. Pure;
called by `llm.batch` only.
"""

from __future__ import annotations

from hexrt.llm.pages import SequencePages
from hexrt.llm.sequence import State
from hexrt.scheduling.retention import Fate, retain


class Holds:
    def __init__(self, pages: SequencePages) -> None:
        self._pages = pages
        self._held: set[State] = set()
        self.count = 0

    def settle(self, state: State, now_ns: int, others_wait: bool) -> None:
        """Does with a retained sequence's pages what is known to be best now."""
        need = state.need
        if need is None:
            return
        if state in self._held and state.pinned:
            self._pages.pool.set_next_use(self._pages.tables.table(state.number), need.steps)
            return
        stake = self._pages.stake(state, max(0.0, need.at_ns - now_ns), others_wait)
        verdict = retain(stake, now_ns, need.most_hold_ns)
        if verdict.fate is Fate.HOLD and self._pages.hold(state, verdict.until_ns):
            self._held.add(state)
            self.count += 1
        self._pages.will_be_read(state, need.steps)
        if verdict.fate is Fate.MOVE:
            self._pages.move_down(state)

    def expire(self, now_ns: int) -> bool:
        """Ends those whose time is over; whether there were any."""
        over = [state for state in self._held if state.held_until_ns <= now_ns]
        for state in over:
            self.end(state)
        return bool(over)

    def end(self, state: State) -> None:
        if state in self._held:
            self._held.discard(state)
            self._pages.end_hold(state)

    def until_ns(self) -> int:
        """When the next one ends; 0 where there is none."""
        return min((state.held_until_ns for state in self._held), default=0)
