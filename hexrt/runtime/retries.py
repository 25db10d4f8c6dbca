"""When a failed attempt is followed by another. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hexrt.core import TaskState
from hexrt.errors import ErrorRecord
from hexrt.events import Failed
from hexrt.runtime.entities import Run, Task

MAX_LOSSES = 3
"""How often a task may lose its worker or device before that is taken for its own fault: it may have been killed from outside."""
LOST = frozenset({"worker_died", "device_lost"})
DROPPED = "dropped"
"""Kind of a failure that only says that a placed task was not begun; it does not count."""
NOT_BEGUN = "not_begun"
"""Kind of a failure of a task that had not begun when its worker went away, and nobody else is to blame: that might happen for ever."""
FINAL_KINDS = frozenset({"bad_request", "unavailable", "cancelled", "not_found"})
"""Errors that another attempt cannot mend."""


def may_try_again(task: Task, event: Failed) -> bool:
    """Whether a task whose attempt failed so gets another one; counts the failure."""
    node = task.step.node
    lost = event.error.kind in LOST
    if lost or not event.blame:
        task.losses += 1
        if task.losses < MAX_LOSSES and (node.idempotent or event.error.kind == NOT_BEGUN):
            return True
        if not event.blame:
            return False
    task.failures += 1
    if event.error.kind in FINAL_KINDS or task.failures > node.retries:
        return False
    return node.idempotent or not (lost or event.error.kind == "timed_out")


def final_error(task: Task, error: ErrorRecord) -> ErrorRecord:
    """The error of a step whose task gets no further attempt."""
    node = task.step.node
    where = node.id if node.map is None else f"{node.id}[{task.part // len(node.op.parts)}]"
    again = f"; it was begun {task.attempt} times" if error.kind in LOST and task.attempt > 1 else ""
    return ErrorRecord(error.kind, error.message + again, error.where or where, error.retryable)


def lost_with_daemon(run: Run, now_ns: int) -> Iterator[Failed]:
    """One for each task that was in flight when the last daemon stopped."""
    error = ErrorRecord("device_lost", "the daemon stopped while this step ran; whether it took effect is not known")
    for step in run.steps:
        for task in list(step.tasks):
            if task.state is TaskState.PLACED or task.state is TaskState.RUNNING:
                yield Failed(
                    run.id, step.node.index, task.part, task.attempt, task.device, task.start_ns, now_ns, error, False
                )
