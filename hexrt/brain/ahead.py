"""How soon something is read again, from what is still to be done of its run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hexrt.core import TaskState
from hexrt.llm.sequence import Need
from hexrt.runtime.entities import Run

FAR = 64
"""Steps beyond which it makes no difference."""


MANY = 256
"""Steps on the way beyond which nothing is expected soon."""


def need_of(
    run: Run, consumers: Iterable[int], expected_ns: Callable[[Run, int], float], now_ns: int, most_hold_ns: int
) -> Need | None:
    """When the soonest of these steps runs; None where all of them have ended."""
    open_ones = _open(run, consumers)
    if not open_ones:
        return None
    soon_ns = min(_until_ns(run, index, expected_ns) for index in open_ones)
    return Need(min(_chain(run, index) for index in open_ones), now_ns + soon_ns, most_hold_ns)


def steps_until(run: Run, consumers: Iterable[int]) -> int | None:
    """How many steps end, one after the other, before the soonest of these steps runs, itself counted; None where all of them have ended."""
    return min((_chain(run, index) for index in _open(run, consumers)), default=None)


def _open(run: Run, consumers: Iterable[int]) -> list[int]:
    return [index for index in consumers if run.steps[index].state < TaskState.DONE]


def _before(run: Run, index: int) -> list[int]:
    """The steps that this one waits for."""
    return [p for p in run.steps[index].node.predecessors if run.steps[p].state < TaskState.DONE]


def _chain(run: Run, index: int) -> int:
    """The longest chain of steps that have not ended and lead to this one: as often as one can go back to predecessors."""
    length, front = 1, {index}
    while length < FAR:
        front = {p for i in front for p in _before(run, i)}
        if not front:
            break
        length += 1
    return length


def _until_ns(run: Run, index: int, expected_ns: Callable[[Run, int], float]) -> float:
    """What the steps before this one are expected to take, one after the other along the slowest way."""
    done_ns: dict[int, float] = {}  # of those looked at
    stack = [index]
    while stack:
        step = stack[-1]
        before = _before(run, step)
        if missing := [p for p in before if p not in done_ns]:
            if len(done_ns) + len(stack) > MANY:
                return float("inf")
            stack += missing
            continue
        stack.pop()
        begin_ns = max((done_ns[p] for p in before), default=0.0)
        done_ns[step] = begin_ns if step == index else begin_ns + expected_ns(run, step)
    return done_ns[index]
