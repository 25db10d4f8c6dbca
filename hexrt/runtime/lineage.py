"""What was put out and is lost is put out again, where that is possible: its step runs once more on the inputs that it had.

Changes a run's steps; called by `hexrt.runtime.state` only. Pure.
"""

from __future__ import annotations

from hexrt.core import TaskState
from hexrt.errors import ErrorRecord
from hexrt.runtime.entities import Run, Step, record_of
from hexrt.runtime.holding import Holding

WAITING, READY, DONE = TaskState.WAITING, TaskState.READY, TaskState.DONE


def why_not(run: Run, step: Step) -> str:
    """Why a done step cannot run again; empty where it can."""
    node = step.node
    if not node.idempotent:
        return "the step may not run twice"
    if node.map is not None or len(node.op.parts) > 1:
        return "its elements or parts are not kept"
    if any(run.steps[ref.step].output is None for ref in node.refs if ref.step >= 0):
        return "what it was given is not kept"
    for index in node.successors:
        successor = run.steps[index]
        if successor.state < DONE and (successor.node.map is not None or any(t.state > READY for t in successor.tasks)):
            return f"step {successor.node.id!r} is at work on it"
    return ""


def lost_for_good(step: Step, reason: str) -> ErrorRecord:
    message = f"its output was lost with the memory it lay in, and cannot be made again: {reason}; submit the run again"
    return ErrorRecord("device_lost", message, step.node.id, True)


def take_back(run: Run, step: Step, holding: Holding) -> None:
    """Undoes the end of a done step: it is ready, and what waited for it and has not begun waits for it again."""
    assert step.output is not None
    output, step.output = step.output, None
    holding.release(run, holding.drop(run, output))
    step.state, step.read = READY, 0
    run.open_steps += 1
    for index in step.node.successors:
        successor = run.steps[index]
        if successor.state < DONE:
            successor.pending += 1
            successor.state = WAITING
            for task in successor.tasks:
                if task.state is READY:
                    task.state = WAITING
    task = step.tasks[0]
    run.history.append(record_of(task, "lost"))
    task.state = WAITING
    task.start_ns = task.end_ns = 0
