"""The deadlines of open runs and of their steps, soonest first.

Owned by the service. Those of ended runs are thrown out each time they may make up half of all, so the heap stays within twice what is open. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush

from hexrt.runtime.entities import Run
from hexrt.workflow.graph import TaskGraph

FEW = 1000
"""Entries that are not worth a look."""


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[int, bytes, int]] = []
        self._look_at = FEW

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, run: bytes, graph: TaskGraph, submitted_ns: int, runs: Mapping[bytes, Run]) -> None:
        """Takes over the deadlines of a run that is among `runs`, those in memory."""
        if graph.deadline_ns:
            heappush(self._heap, (submitted_ns + graph.deadline_ns, run, -1))
        for node in graph.nodes:
            if node.deadline_ns:
                heappush(self._heap, (submitted_ns + node.deadline_ns, run, node.index))
        if len(self._heap) > self._look_at:
            self._heap = [entry for entry in self._heap if _is_open(entry[1], runs)]
            heapify(self._heap)
            self._look_at = FEW + 2 * len(self._heap)

    def due(self, now_ns: int) -> Iterator[tuple[int, bytes, int]]:
        """Takes out what has passed: (when, run, step), step -1 for the run's own."""
        while self._heap and self._heap[0][0] <= now_ns:
            yield heappop(self._heap)

    def clear(self) -> None:
        """No run is open."""
        self._heap.clear()
        self._look_at = FEW


def _is_open(run: bytes, runs: Mapping[bytes, Run]) -> bool:
    found = runs.get(run)
    return found is not None and not found.ended_ns
