"""How soon something is read again, from what is still to be done of its run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hexrt.core import TaskState
from hexrt.runtime.entities import Run, Task
from hexrt.workflow.graph import ITEM

PARENT_PORTS = (("continue_from",), ("prefix",))
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


def parent_of(task: Task) -> tuple[bytes, int, int] | None:
    """The key of the sequence that an LLM task's goes on from: that of an unmapped step whose whole output it is given."""
    run = task.run
    parents = [r.step for r in task.step.node.refs if r.to in PARENT_PORTS and not r.path and r.step != ITEM]
    return (run.id, parents[0], 0) if parents and run.steps[parents[0]].node.map is None else None


def heirs(run: Run, index: int) -> Iterator[int]:
    """The steps that go on from the sequence of this one."""
    for successor in run.steps[index].node.successors:
        if any(ref.step == index and ref.to in PARENT_PORTS for ref in run.steps[successor].node.refs):
            yield successor
