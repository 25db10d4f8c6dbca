"""What the brain knows of each device: what is in flight there and how long that is expected to take.

Owned by the brain, updated by it and by the service as reports come. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hexrt.core import DeviceKind
from hexrt.runtime.entities import Task
from hexrt.workflow.graph import Node

POOL = DeviceKind.POOL
Class = tuple[tuple[DeviceKind, ...], str | None]
WINDOW_NS = 1_000_000
"""Work that is sent ahead to a pool worker, so that it never waits for the daemon: a few wake-ups' worth."""


@dataclass(eq=False, slots=True)
class Device:
    """One device. `window` holds its unfinished launches in order of sending; `command` counts within a host epoch."""

    name: str
    kind: DeviceKind
    max_in_flight: int
    cost_name: str  # what the cost model calls it: workers of one pool share their estimates
    epoch: int = 0
    ready: bool = False
    lost: str = ""  # why it is not ready, once it was or could not be
    command: int = 0
    backlog_ns: int = 0
    done: int = 0
    last_report_ns: int = 0
    window: dict[int, Task] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def can_take(self, predicted_ns: int) -> bool:
        """Whether another launch may be sent now."""
        if not self.ready:
            return False
        count = len(self.window)
        if self.kind is POOL:
            return count == 0 or (count < self.max_in_flight and self.backlog_ns + predicted_ns <= WINDOW_NS)
        return count < self.max_in_flight

    def next_command(self) -> int:
        self.command += 1
        return self.command

    def drop(self, command: int) -> Task | None:
        """The launch has ended, or never will: forgets it. None for one that is not waited for."""
        task = self.window.pop(command, None)
        if task is not None:
            self.backlog_ns -= task.predicted_ns
        return task


def class_of(node: Node, part: int, served: str | None) -> Class:
    """Which devices may run a part: of its kinds, and the one of the server that it needs, or that the step insists on if that is of these kinds."""
    kinds, only = node.op.parts[part].kinds, served or node.device
    return (kinds, None) if only is None or only.partition(":")[0] not in kinds else (kinds, only)
