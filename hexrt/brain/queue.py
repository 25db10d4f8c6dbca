"""A queue of ready tasks by urgency, first come first served among equals.

Owns the order. Tasks of equal urgency share one bucket, so that a wide layer of a graph costs no heap operation a task. Pure.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from hexrt.runtime.entities import Task

Urgency = tuple[int, float]
"""(-priority, -remaining critical path in ns): the least is the most urgent."""


class ReadyQueue:
    __slots__ = ("_buckets", "_order", "count")

    def __init__(self) -> None:
        self._buckets: dict[Urgency, deque[Task]] = {}
        self._order: list[Urgency] = []
        self.count = 0

    def push(self, urgency: Urgency, task: Task) -> None:
        bucket = self._buckets.get(urgency)
        if bucket is None:
            bucket = self._buckets[urgency] = deque()
            heappush(self._order, urgency)
        bucket.append(task)
        self.count += 1

    @property
    def urgency(self) -> Urgency:
        """Of the first task; the queue must not be empty."""
        return self._order[0]

    def first(self) -> Task:
        """The most urgent task, which stays; the queue must not be empty."""
        return self._buckets[self._order[0]][0]

    def pop(self) -> Task:
        """Takes out the most urgent task; the queue must not be empty."""
        bucket = self._buckets[self._order[0]]
        task = bucket.popleft()
        if not bucket:
            del self._buckets[heappop(self._order)]
        self.count -= 1
        return task
