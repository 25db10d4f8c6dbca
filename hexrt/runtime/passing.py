"""Tensors between a client and its run: what a submission brought is checked and made recordable, what a result names is gathered.

Owns nothing. Called by the service. Loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from hexrt import values
from hexrt.errors import BadRequest, NotFound
from hexrt.memory.passed import ClientMemory, Export
from hexrt.protocol.messages import RunResult
from hexrt.runtime.answers import result_of, result_of_ended
from hexrt.runtime.entities import Run
from hexrt.runtime.state import RunTable
from hexrt.runtime.store import Store
from hexrt.runtime.tensors import Tensors
from hexrt.workflow.graph import TaskGraph
from hexrt.workflow.model import Workflow

INLINE_AT_ONCE = 1 << 20
"""Memory of fewer bytes than this is copied into the workflow on the loop."""


def check_tensors(graph: TaskGraph, memory: ClientMemory | None, most_bytes: int) -> None:
    """Raises BadRequest unless the graph names just what its client passed.

    And where it has more than `most_bytes` once they are in it, as it is recorded: a small tensor may be named often.
    """
    passed = memory.tensors if memory is not None else {}
    whole_bytes = graph.bytes
    for handle, size, where in graph.tensors:
        one = passed.get(handle)
        if one is None:
            raise BadRequest(f"it names tensor {handle}, which did not come with the message", where)
        if one.bytes != size:
            raise BadRequest(f"this tensor has {size} bytes, and tensor {handle} came with {one.bytes}", where)
        whole_bytes += size
        if whole_bytes > most_bytes:
            raise BadRequest(
                f"up to this tensor the workflow has {whole_bytes} bytes, more than the {most_bytes} that limits.max_run_mib allows; a "
                "tensor counts each time it is named: let one step put it out, and others refer to that step",
                where,
            )
    if memory is not None:
        if unnamed := passed.keys() - {handle for handle, _, _ in graph.tensors}:
            raise BadRequest(f"the workflow does not name tensor {min(unnamed)}", "tensors")


async def recordable(workflow: Workflow, memory: ClientMemory) -> Workflow:
    """The same workflow with the bytes of each tensor in it; much of it is copied on a thread, as sealed bytes allow."""
    if memory.bytes < INLINE_AT_ONCE:
        return _inlined(workflow, memory.content)
    return await asyncio.to_thread(_inlined, workflow, memory.content)


def _inlined(workflow: Workflow, content: Callable[[int], memoryview]) -> Workflow:
    return msgspec.msgpack.decode(values.inline(values.encode(workflow), content), type=Workflow)


class Results:
    """What runs in memory answer with."""

    def __init__(self, table: RunTable, store: Store, tensors: Tensors) -> None:
        self._table = table
        self._store = store
        self._tensors = tensors

    def answer(self, run: Run) -> RunResult | Export:
        """The result of an ended run; an Export where it names tensors, which are copied when it is sent."""
        result = result_of(run)
        if run.tensors and any(map(values.handles, result.outputs.values())):
            return Export(lambda: self._exported(run))
        return result

    def _exported(self, run: Run) -> tuple[RunResult, int]:
        if run.id not in self._table.runs:  # it was let go of since the answer was promised
            past = self._store.find_run(run.id)
            if past is None:
                raise NotFound("the run was let go of before its result could be sent", run.id.hex())
            return result_of_ended(past), -1
        result = result_of(run)
        tensors, fd = self._tensors.export(run, result.outputs.values())
        return msgspec.structs.replace(result, tensors=tensors), fd
