"""Whether the KV pages of a sequence that does not run are held, moved, left or dropped, and which sequences make way for a more urgent one.

Each is the cheaper of the possible: bytes over a measured link, tokens over a measured prefill speed, and how soon the pages are read again. Pins
while a tool runs have a time-to-live as in Continuum (Li et al., arXiv:2511.02230), here by the ski-rental rule (Karlin et al., Algorithmica 3, 1988): what
is held no longer than it costs to bring back costs at most twice the best choice in hindsight. Pure; the clock is passed in.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


class Fate(enum.Enum):
    HOLD = "hold"  # pinned where they are, until a time
    LEAVE = "leave"  # unpinned: they move or go when others need the room, in order of next use
    MOVE = "move"  # unpinned and written down now, since others wait for the room
    DROP = "drop"  # nobody goes on from them


@dataclass(frozen=True, slots=True)
class Verdict:
    fate: Fate
    until_ns: int = 0  # of HOLD
    why: str = ""


@dataclass(frozen=True, slots=True)
class Stake:
    """What is known of the pages of one sequence that has ended for now. Times in ns; `swap_ns` and `recompute_ns` may be infinite."""

    needed_in_ns: float | None  # None: by nobody
    swap_ns: float  # to store them one tier down and load them again
    recompute_ns: float  # to compute them anew
    others_wait: bool  # for room on the device


def retain(stake: Stake, now_ns: int, most_hold_ns: int) -> Verdict:
    """What becomes of the pages while the step before their next reader runs."""
    needed_in_ns = stake.needed_in_ns
    if needed_in_ns is None:
        return Verdict(Fate.DROP, why="nobody goes on from it")
    back_ns = min(stake.swap_ns, stake.recompute_ns)
    if needed_in_ns <= back_ns and most_hold_ns:
        hold_ns = int(min(back_ns, most_hold_ns))
        return Verdict(
            Fate.HOLD, now_ns + hold_ns, f"read again in about {needed_in_ns / 1e6:.1f} ms, sooner than brought back"
        )
    if not stake.others_wait:
        return Verdict(Fate.LEAVE, why="nobody waits for the room")
    if stake.swap_ns <= stake.recompute_ns:
        return Verdict(Fate.MOVE, why="others wait for the room, and bringing it back takes less than computing it")
    return Verdict(Fate.LEAVE, why="others wait for the room, and computing it takes less than bringing it back")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running sequence that could be stopped: `pages` come free by it, and stopping and resuming it costs `cost_ns`."""

    key: Hashable
    priority: int
    pages: int
    cost_ns: float


def victims(candidates: Sequence[Candidate], priority: int, short_pages: int) -> list[Candidate]:
    """Which to stop so that a request of `priority` gets the pages that it is short of; none where stopping all below it would not do.

    Of the least urgent first, those that cost least a page; whoever turns out not to be needed is let be.
    """
    below = [c for c in candidates if c.priority < priority and c.pages > 0]
    if short_pages <= 0 or sum(c.pages for c in below) < short_pages:
        return []
    below.sort(key=lambda c: (c.priority, c.cost_ns / c.pages))
    chosen: list[Candidate] = []
    got = 0
    for candidate in below:
        if got >= short_pages:
            break
        chosen.append(candidate)
        got += candidate.pages
    for candidate in sorted(chosen, key=lambda c: (-c.priority, -c.cost_ns)):
        if got - candidate.pages >= short_pages:
            chosen.remove(candidate)
            got -= candidate.pages
    return chosen
