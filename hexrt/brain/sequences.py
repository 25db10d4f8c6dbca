"""Which sequence an LLM task is, which one it goes on from, who goes on from it, and with whom it may share pages. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from hexrt.brain.models import LoadedModel
from hexrt.core import TaskState
from hexrt.llm.prefix import root_key
from hexrt.llm.sequence import SequenceRequest
from hexrt.llm.steps import request_of
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


class Sharing(msgspec.Struct, frozen=True):
    """Between whose sequences full pages are shared: nobody's, one user's, everybody's; and how long pages may be held while a tool runs."""

    between: str = "user"
    hold_ns: int = 2_000_000_000


def root_of(task: Task, about: LoadedModel | None, sharing: Sharing) -> bytes:
    """The beginning of the prefix keys of a task's sequence; empty where it shares pages with nobody."""
    if about is None or sharing.between == "off":
        return b""
    uid = None if sharing.between == "all" else task.run.uid
    return root_key(uid, about.digest, task.step.node.params.numerics)  # type: ignore[attr-defined]


def request_for(task: Task, root: bytes = b"") -> SequenceRequest:
    """The sequence of a step, from what its tasks before this one gave and what it had answered before a restart. Raises BadRequest."""
    step, run = task.step, task.run
    node, key = step.node, key_of(task)
    decode = step.tasks[key[2] + len(node.op.parts) - 1]
    tokenised = step.tasks[key[2]].output if node.op.parts[0].body is not None else input_of(task, "prefix")
    is_parent = any(run.steps[index].state < TaskState.DONE for index in heirs(run, node.index))
    request = request_of(
        node.op.name, node.params, tokenised, tuple(decode.answered or ()), key, parent_of(task), is_parent,
        node.priority, "".join(decode.text or ()),
    )  # fmt: skip
    return replace(request, root=root, answered_logprobs=tuple(decode.logprobs or ()))
