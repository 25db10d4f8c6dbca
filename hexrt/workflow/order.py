"""The order of steps: successors, topological order, depth, and the naming of a cycle. Pure.

Each function is a generator that yields now and then, so that its caller can let others work; what it returns is the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence

from hexrt.errors import BadRequest
from hexrt.workflow.graph import Node

SLICE = 500
"""Steps between two yields."""
MOST_NAMED = 12


def link(nodes: Sequence[Node], max_depth: int) -> Generator[None, None, list[int]]:
    """Fills `successors` of each node and returns a topological order: the user's own where it is one, else Kahn's (1962).

    Raises BadRequest for a cycle, or a path of more than `max_depth` steps.
    """
    depth = [0] * len(nodes)  # 0: not reached yet
    successors = [node.successors for node in nodes]
    is_sorted = True
    for i, node in enumerate(nodes):
        deepest = 0
        for p in node.predecessors:
            successors[p].append(i)
            deep = depth[p]
            if deep > deepest:
                deepest = deep
            elif not deep:
                is_sorted = False
        depth[i] = deepest + 1
        if i % SLICE == SLICE - 1:
            yield
    if is_sorted:  # every step stands after those it waits for, so that the depths are right
        order = list(range(len(nodes)))
    else:
        order = yield from _kahn(nodes)
        yield from _measure(nodes, order, depth)
    if max(depth) > max_depth:
        raise _too_deep(nodes[next(i for i in order if depth[i] > max_depth)], max_depth)
    return order


def _kahn(nodes: Sequence[Node]) -> Generator[None, None, list[int]]:
    waiting = [len(node.predecessors) for node in nodes]
    ready = deque(i for i, count in enumerate(waiting) if not count)
    order: list[int] = []
    while ready:
        i = ready.popleft()
        order.append(i)
        for s in nodes[i].successors:
            waiting[s] -= 1
            if not waiting[s]:
                ready.append(s)
        if len(order) % SLICE == 0:
            yield
    if len(order) < len(nodes):
        raise _cycle(nodes, waiting)
    return order


def _measure(nodes: Sequence[Node], order: Sequence[int], depth: list[int]) -> Generator[None, None, None]:
    for count, i in enumerate(order):
        predecessors = nodes[i].predecessors
        depth[i] = max(map(depth.__getitem__, predecessors)) + 1 if predecessors else 1
        if count % SLICE == SLICE - 1:
            yield


def _too_deep(node: Node, max_depth: int) -> BadRequest:
    return BadRequest(
        f"step {node.id!r} comes after {max_depth} others in a row, and {max_depth} is the longest path allowed: split the "
        "workflow or raise limits.max_depth",
        f"steps.{node.id}",
    )


def _cycle(nodes: Sequence[Node], waiting: Sequence[int]) -> BadRequest:
    """A step that still waits has a predecessor that waits: going back from one to the next must come round."""
    i = next(i for i, count in enumerate(waiting) if count)
    seen: dict[int, int] = {}
    walked: list[int] = []
    while i not in seen:
        seen[i] = len(walked)
        walked.append(i)
        i = next(p for p in nodes[i].predecessors if waiting[p])
    cycle = walked[seen[i] :][::-1]
    first = cycle.index(min(cycle))
    names = [nodes[c].id for c in cycle[first:] + cycle[:first]]
    if len(names) == 1:
        return BadRequest(f"step {names[0]!r} refers to its own output: take that reference out", f"steps.{names[0]}")
    shown = (
        names
        if len(names) <= MOST_NAMED
        else [*names[: MOST_NAMED - 1], f"({len(names) - MOST_NAMED} more)", names[-1]]
    )
    return BadRequest(
        f"a cycle: {' -> '.join([*shown, names[0]])}; take out one of these references or `after`", f"steps.{names[0]}"
    )
