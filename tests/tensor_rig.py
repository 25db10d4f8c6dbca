"""A whole daemon in the test's own process, so that a test sees its tables; its hosts are real, its clients are calls of the service."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hexrt import values
from hexrt.client.tensors import Received
from hexrt.config import Config
from hexrt.core import Durability, Peer, RunState, TaskState
from hexrt.daemon import Daemon
from hexrt.devices.link import HostLink
from hexrt.memory.arena import sealed_copy
from hexrt.memory.passed import ClientMemory, Export, client_memory
from hexrt.ops.registry import load_ops
from hexrt.protocol.messages import RunResult, Tensor
from hexrt.runtime.entities import Run
from hexrt.server.listen import bind
from hexrt.workflow.model import StepSpec, Workflow

ME = Peer(os.getuid(), os.getgid())
CONFIG: dict[str, Any] = {
    "daemon": {"check_integrity": True},
    "cpu": {"enabled": False},
    "npu": {"enabled": False},
    "pool": {"workers": 2},
    "memory": {"ring_mib": 4},
    "ops": {"map.python": {"modules": ["tests.tensor_bodies", "tests.hostile"]}},
}


def call(step: str, function: str, value: Any = None, idempotent: bool = True, **arguments: Any) -> StepSpec:
    """A step that calls a function of tests.tensor_bodies."""
    inputs = ({} if value is None else {"value": value}) | ({"arguments": arguments} if arguments else {})
    return StepSpec(step, "map.python", {"function": f"tests.tensor_bodies:{function}"}, inputs, idempotent=idempotent)


def ref(path: str) -> dict[str, str]:
    return {"$ref": path}


def passed(arrays: Mapping[int, Any]) -> ClientMemory:
    """What a client sends for these arrays by handle."""
    contents = [memoryview(np.ascontiguousarray(array)).cast("B") for array in arrays.values()]
    fd, offsets = sealed_copy(contents)
    tensors = zip(arrays, offsets, contents, strict=True)
    return client_memory(fd, tuple(Tensor(handle, at, len(content)) for handle, at, content in tensors))


def named(handle: int, array: Any) -> Any:
    return values.descriptor(handle, array.dtype.name, array.shape)


class Rig:
    def __init__(self, directory: Path, **config: Any) -> None:
        listener = bind(directory / "d.sock")
        made = msgspec.convert({**CONFIG, **config}, Config)
        self.daemon = Daemon(made, lambda: made, listener, directory / "state", load_ops()[0])
        asyncio.get_running_loop().set_exception_handler(self.daemon._on_loop_error)
        self._listener = listener
        self.service, self.table, self.tensors = self.daemon.service, self.daemon.table, self.daemon.tensors
        self.daemon.recover()
        self.daemon.start_hosts()
        self.service.resume()

    async def submit(self, workflow: Workflow, durability: Durability = Durability.NONE, arrays: Mapping[int, Any] | None = None) -> Run:  # fmt: skip
        memory = passed(arrays) if arrays else None
        try:
            run = await self.service.submit(ME, workflow, durability, True, memory)
        finally:
            if memory is not None:
                memory.close()
        return self.table.runs[run]

    async def result(self, run: Run) -> tuple[RunResult, dict[str, Any]]:
        """The result and its outputs, as a client reads them."""
        answer = await self.service.result(ME, run.id, True)  # type: ignore[arg-type]
        if not isinstance(answer, Export):
            return answer, {name: values.decode(raw) for name, raw in answer.outputs.items()}
        result, fd = answer.make()
        content = Received(fd, result.tensors).content if fd >= 0 else None
        return result, {name: values.decode(raw, content) for name, raw in result.outputs.items()}

    async def run(self, workflow: Workflow, durability: Durability = Durability.NONE, arrays: Mapping[int, Any] | None = None) -> dict[str, Any]:  # fmt: skip
        """The outputs of a run that must succeed."""
        result, outputs = await self.result(await self.submit(workflow, durability, arrays))
        assert result.state is RunState.SUCCEEDED, result.errors
        return outputs

    @property
    def links(self) -> list[HostLink]:
        fleet = self.service.owner.fleet
        assert fleet is not None
        return [m.link for m in fleet._members.values() if isinstance(m.link, HostLink)]

    def check(self) -> None:
        """Counts are right; nothing must be in flight."""
        self.table.check_integrity()
        self.tensors.check_integrity(self.table.runs.values(), idle=True)

    def forget_ended(self) -> None:
        self.service.owner.close_ended()
        for run in list(self.table.runs.values()):
            assert run.ended_ns, run.name
            self.table.forget(run)
        self.service._room._kept.clear()  # they were let go of behind its back
        self.service._room._kept_bytes = 0
        self.tensors.collect()

    def check_empty(self) -> None:
        """After every run was forgotten there is no tensor, and of each living host the ring alone."""
        self.forget_ended()
        self.check()
        found = self.tensors.statistics()
        assert (found["tensors"], found["tensor_bytes"]) == (0, 0)
        left = [s for s in self.tensors._segments.values() if s.moves and not s.filling]  # until their copies end
        assert found["segments"] == len(self.tensors._rings) + len(left)

    async def until(self, true: Callable[[], bool]) -> None:
        """Lets the loop go on until the condition holds, looking after each of its rounds."""
        async with asyncio.timeout(20):
            while not true():
                await asyncio.sleep(0)

    async def close(self) -> None:
        await self.daemon.close()
        self._listener.close()
        assert self.daemon.failure is None, self.daemon.failure


@contextmanager
def rigged(directory: Path, **config: Any) -> Iterator[tuple[Rig, asyncio.Runner]]:
    """A rig on a loop of its own, for tests that are not async."""
    with asyncio.Runner() as runner:

        async def start() -> Rig:
            rig = Rig(directory, **config)
            await rig.until(lambda: all(d.ready for d in rig.daemon.brain.devices.values()))
            return rig

        rig = runner.run(start())
        try:
            yield rig, runner
        finally:
            runner.run(rig.close())


def is_in_flight(run: Run, step: str) -> bool:
    found = next(s for s in run.steps if s.node.id == step)
    return any(t.state in (TaskState.PLACED, TaskState.RUNNING) for t in found.tasks)
