"""How a map step becomes tasks: those of its first elements at once, of each other element when an earlier one has ended.

So a map over a million elements begins as fast as one over a few thousand, and fills no queue. Changes steps; called by
`hexrt.runtime.state` only. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hexrt.errors import ErrorRecord, TaskFailed
from hexrt.events import Stopped
from hexrt.runtime.entities import Run, Step, Task
from hexrt.values import NIL, elements, pick

NOTHING = msgspec.Raw()
AT_A_TIME = 4096
"""Elements of one map that have tasks and have not ended, at most."""


def read_items(run: Run, step: Step, max_tasks: int) -> Sequence[msgspec.Raw]:
    """What a map step goes over. Raises TaskFailed where that is no list, or one of more elements than the run may have."""
    over = step.node.map
    assert over is not None
    if over.elements is not None:
        items: Sequence[msgspec.Raw] = over.elements
    else:
        items = elements(pick(run.steps[over.step].output or NIL, over.path))
    tasks = run.mapped_tasks + len(items) * len(step.node.op.parts)
    if tasks > max_tasks:
        raise TaskFailed(
            f"with its {len(items)} elements there are more than the {max_tasks} tasks allowed: map over fewer and larger "
            "elements, or raise limits.max_tasks"
        )
    run.mapped_tasks = tasks
    return items


def no_room(run: Run, step: Step, size: int, open_tasks: int, most: int, now_ns: int) -> Stopped:
    """Why the step is not begun: what all runs have open depends on the moment, so this is a fact to record."""
    message = (
        f"map.over: {open_tasks} tasks are open, and with its {size} elements there are more than the {most} of "
        "limits.max_open_tasks: try again later, or map over fewer and larger elements"
    )
    return Stopped(run.id, step.node.index, now_ns, ErrorRecord("overloaded", message, step.node.id, True))


def begin(run: Run, step: Step, items: Sequence[msgspec.Raw]) -> list[Task]:
    """Gives the step what it goes over; returns the first tasks of the elements that may begin."""
    over = step.node.map
    assert over is not None
    step.items = items
    step.size = step.open_tasks = len(items)
    step.outputs = [NOTHING] * len(items)
    at_once = min(len(items), over.max_in_flight or AT_A_TIME, AT_A_TIME)
    return [add_element(run, step) for _ in range(at_once)]


def add_element(run: Run, step: Step) -> Task:
    """Makes the tasks of the next element; returns the first of them."""
    assert step.items is not None
    parts = len(step.node.op.parts)
    position = len(step.tasks) // parts
    add_parts(run, step, position, step.items[position])
    return step.tasks[-parts]


def add_parts(run: Run, step: Step, position: int, item: msgspec.Raw | None) -> None:
    parts = len(step.node.op.parts)
    for op_part in range(parts):
        task = Task(run, step, position * parts + op_part, op_part)
        task.item = item
        step.tasks.append(task)


def has_more(step: Step) -> bool:
    """Whether some elements have no tasks yet."""
    return step.items is not None and len(step.tasks) < step.size * len(step.node.op.parts)
