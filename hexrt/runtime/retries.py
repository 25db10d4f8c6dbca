"""When a failed attempt is followed by another. Pure."""

from __future__ import annotations

from hexrt.events import Failed
from hexrt.runtime.entities import Task

MAX_BLAMELESS = 3
"""How often a task is started again after its device or worker went away under it, before that is taken for its own fault."""
DROPPED = "dropped"
"""Kind of a failure that only says that a placed task was not begun; it does not count."""
NOT_BEGUN = "not_begun"
"""Kind of a failure of a task that had not begun when its worker went away, and nobody else is to blame: that might happen for ever."""
FINAL_KINDS = frozenset({"bad_request", "unavailable", "cancelled", "not_found"})
"""Errors that another attempt cannot mend."""


def may_try_again(task: Task, event: Failed) -> bool:
    """Whether a task whose attempt failed so gets another one; counts the failure."""
    node = task.step.node
    if not event.blame:
        task.blameless += 1
        return (node.idempotent or event.error.kind == NOT_BEGUN) and task.blameless < MAX_BLAMELESS
    task.failures += 1
    if event.error.kind in FINAL_KINDS or task.failures > node.retries:
        return False
    return node.idempotent or event.error.kind not in ("worker_died", "device_lost", "timed_out")
