"""What there is room for: whether a run may be submitted, and which ended runs stay in memory.

Owns the ended runs that are kept, oldest first. Called by the service. Loop thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hexrt.config import Limits
from hexrt.errors import Overloaded
from hexrt.runtime.entities import Run
from hexrt.runtime.state import RunTable
from hexrt.workflow.model import Workflow


def tasks_of(workflow: Workflow) -> int:
    """How many tasks are open once the workflow is submitted: its steps, and the listed elements of its maps."""
    steps = workflow.steps
    return len(steps) + sum(
        len(s.map.over) - 1 for s in steps if s.map is not None and isinstance(s.map.over, list | tuple) and s.map.over
    )


class Room:
    def __init__(self, table: RunTable, forget: Callable[[Run], object]) -> None:
        self._table = table
        self._forget = forget
        self._kept: deque[Run] = deque()
        self._kept_bytes = 0

    @property
    def kept(self) -> int:
        return len(self._kept)

    def check(self, tasks: int, size_bytes: int, submitting: int, limits: Limits) -> None:
        """Raises Overloaded where a run of so many tasks and bytes cannot be taken now. Kept runs are let go of first."""
        table = self._table
        if table.open_runs + submitting >= limits.max_open_runs:
            raise Overloaded(
                f"{table.open_runs} runs are open, as many as limits.max_open_runs allows; try again later"
            )
        if table.open_tasks + tasks > limits.max_open_tasks:
            raise Overloaded(
                f"{table.open_tasks} tasks are open and this run has {tasks}; limits.max_open_tasks allows "
                f"{limits.max_open_tasks}: try again later, or submit fewer"
            )
        held, most = table.holding, limits.max_held_mib << 20
        if held.held_bytes + size_bytes > most:
            self._let_go(held.held_bytes + size_bytes - most)
            if held.held_bytes - held.ended_bytes + size_bytes > most:
                raise Overloaded(
                    f"the open runs hold {(held.held_bytes - held.ended_bytes) >> 20} MiB; limits.max_held_mib allows "
                    f"{limits.max_held_mib}, and this one has {size_bytes >> 20}: try again later"
                )

    def keep(self, run: Run, limits: Limits) -> None:
        """Keeps the newest ended runs in memory, up to the configured count and bytes."""
        self._kept.append(run)
        self._kept_bytes += run.held_bytes
        while len(self._kept) > limits.kept_runs or self._kept_bytes > limits.kept_mib << 20:
            self._drop_oldest()
        over = self._table.holding.held_bytes - (limits.max_held_mib << 20)
        if over > 0:
            self._let_go(over)

    def _let_go(self, over_bytes: int) -> None:
        """Forgets the oldest ended runs until there is so much less, or none is left."""
        while self._kept and over_bytes > 0:
            over_bytes -= self._kept[0].held_bytes
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        old = self._kept.popleft()
        self._kept_bytes -= old.held_bytes
        self._forget(old)
