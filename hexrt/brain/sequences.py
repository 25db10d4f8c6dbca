"""Which sequence an LLM task is, which one it goes on from, and who goes on from it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from hexrt.runtime.entities import Run, Task
from hexrt.values import NIL, pick
from hexrt.workflow.graph import ITEM

Key = tuple[bytes, int, int]
"""Run, step index, first part."""
PARENT_PORTS = (("continue_from",), ("prefix",))


def key_of(task: Task) -> Key:
    return task.run.id, task.step.node.index, task.part - task.op_part


def input_of(task: Task, port: str) -> msgspec.Raw:
    """What a task is given at an input port, encoded. Raises TaskFailed where that is not there."""
    node = task.step.node
    for ref in node.refs:
        if ref.to == (port,):
            raw = task.item if ref.step == ITEM else task.run.steps[ref.step].output
            return pick(raw or NIL, ref.path)
    return pick(node.inputs, (port,))


def parent_of(task: Task) -> Key | None:
    """The key of the sequence that an LLM task's goes on from: that of an unmapped step whose whole output it is given."""
    run = task.run
    parents = [r.step for r in task.step.node.refs if r.to in PARENT_PORTS and not r.path and r.step != ITEM]
    return (run.id, parents[0], 0) if parents and run.steps[parents[0]].node.map is None else None


def heirs(run: Run, index: int) -> Iterator[int]:
    """The steps that go on from the sequence of this one."""
    for successor in run.steps[index].node.successors:
        if any(ref.step == index and ref.to in PARENT_PORTS for ref in run.steps[successor].node.refs):
            yield successor
