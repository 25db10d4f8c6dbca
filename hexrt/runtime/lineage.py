"""What was put out and is lost is put out again, where that is possible: its step runs once more, after those that it needs again itself.

Changes a run's steps; called by `hexrt.runtime.state` only. Pure.
"""

from __future__ import annotations

from hexrt.core import TaskState
from hexrt.errors import ErrorRecord
from hexrt.runtime.entities import Run, Step, record_of
from hexrt.runtime.holding import Holding

WAITING, READY, DONE = TaskState.WAITING, TaskState.READY, TaskState.DONE


def make_again(run: Run, step: Step, holding: Holding) -> tuple[list[Step], ErrorRecord | None]:
    """Undoes the end of a done step, and of those before it whose output it needs and which is not kept; or changes nothing and says why not.

    Returns the steps that are undone, some of them READY, the others waiting for these.
    """
    again: dict[int, Step] = {}
    todo = [step]
    while todo:
        needed = todo.pop()
        if needed.node.index in again:
            continue
        if reason := _why_not(run, needed):
            message = f"its output was lost with the memory it lay in, and cannot be made again: {reason}; submit the run again"
            return [], ErrorRecord("device_lost", message, needed.node.id, True)
        again[needed.node.index] = needed
        before = (run.steps[ref.step] for ref in needed.node.refs if ref.step >= 0)
        todo.extend(s for s in before if s.state is DONE and s.output is None)
    for undone in again.values():
        _undo(run, undone, holding)
    for undone in again.values():
        undone.pending = sum(run.steps[index].state < DONE for index in undone.node.predecessors)
        undone.state = WAITING if undone.pending else READY
    return list(again.values()), None


def _why_not(run: Run, step: Step) -> str:
    """Why a done step cannot run again; empty where it can."""
    node = step.node
    if not node.idempotent:
        return f"step {node.id!r} may not run twice"
    if node.map is not None or len(node.op.parts) > 1:
        return f"of step {node.id!r} the elements or parts are not kept"
    mapped = next((s for s in node.successors if run.steps[s].state < DONE and run.steps[s].node.map is not None), None)
    return "" if mapped is None else f"the elements of step {run.steps[mapped].node.id!r} name what it was"


def _undo(run: Run, step: Step, holding: Holding) -> None:
    """What has not begun of what waited for the step waits for it again; what has begun has read it."""
    output, step.output = step.output, None
    if output is not None:
        holding.release(run, holding.drop(run, output))
    step.state, step.read = WAITING, 0
    run.open_steps += 1
    task = step.tasks[0]
    run.history.append(record_of(task, "lost"))
    task.state = WAITING
    task.start_ns = task.end_ns = 0
    for index in step.node.predecessors:
        run.steps[index].read = 0  # their outputs are needed once more
    for index in step.node.successors:
        successor = run.steps[index]
        if successor.state < DONE:
            successor.pending += 1
            if successor.tasks[0].state <= READY:
                successor.state = successor.tasks[0].state = WAITING
