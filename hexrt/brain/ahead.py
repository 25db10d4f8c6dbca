"""How soon something is read again, from what is still to be done of its run. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from hexrt.core import TaskState
from hexrt.runtime.entities import Run

FAR = 64
"""Steps beyond which it makes no difference."""


def steps_until(run: Run, consumers: Iterable[int]) -> int | None:
    """How many steps end, one after the other, before the soonest of these steps runs, itself counted; None where all of them have ended."""
    open_ones = [index for index in consumers if run.steps[index].state < TaskState.DONE]
    return min((_chain(run, index) for index in open_ones), default=None)


def _chain(run: Run, index: int) -> int:
    """The longest chain of steps that have not ended and lead to this one: as often as one can go back to predecessors."""
    length, front = 1, {index}
    while length < FAR:
        front = {p for i in front for p in run.steps[i].node.predecessors if run.steps[p].state < TaskState.DONE}
        if not front:
            break
        length += 1
    return length
