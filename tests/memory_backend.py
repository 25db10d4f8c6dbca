"""A small backend that runs steps in memory, for tests of the socket, the clients and the command line.

`noop` ends at once with its input `value`, tensors of a client's in the client's own memory; `hold` runs until `release`; `fail` fails. A run's name chooses what its acknowledgement does:
`late` waits for `gate`, `bug` raises what no backend should.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
from msgspec.structs import replace

from hexrt import values
from hexrt.core import Durability, Peer, RunId, RunState
from hexrt.errors import BadRequest, ErrorRecord, NotFound
from hexrt.memory.arena import sealed_copy
from hexrt.memory.passed import ClientMemory, Export
from hexrt.protocol import messages as m
from hexrt.protocol.models import ModelPlace, ModelStatus, WeightsBudget
from hexrt.workflow.model import Workflow

OPS = ("noop", "hold", "fail")
Push = Callable[[m.Update | m.RunResult], None]


@dataclass(eq=False, slots=True)
class MemoryRun:
    id: RunId
    peer: Peer
    workflow: Workflow
    durability: Durability
    state: RunState = RunState.RUNNING
    updates: list[m.Update] = field(default_factory=list)
    watchers: list[Push] = field(default_factory=list)
    outputs: dict[str, msgspec.Raw] = field(default_factory=dict)
    errors: dict[str, ErrorRecord] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    memory: dict[int, memoryview] = field(default_factory=dict)  # of its tensors

    def result(self) -> m.RunResult | Export:
        result = m.RunResult(0, self.id, self.state, self.outputs, self.errors)
        return Export(partial(self.exported, result)) if self.memory and self.outputs else result

    def exported(self, result: m.RunResult) -> tuple[m.RunResult, int]:
        if not self.memory:  # let go of
            raise NotFound("there is no such run", self.id.hex())
        fd, offsets = sealed_copy(list(self.memory.values()))
        placed = zip(self.memory.items(), offsets, strict=True)
        tensors = tuple(m.Tensor(handle, offset, len(content)) for (handle, content), offset in placed)
        return replace(result, tensors=tensors), fd


class MemoryBackend:
    def __init__(self) -> None:
        self.runs: dict[RunId, MemoryRun] = {}
        self.gate = asyncio.Event()
        self.peers: list[Peer] = []
        self.shut_down: list[bool] = []

    def _run(self, peer: Peer, run: RunId) -> MemoryRun:
        found = self.runs.get(run)
        if found is None or peer.uid not in (found.peer.uid, 0):
            raise NotFound("there is no such run", run.hex())
        return found

    async def submit(
        self,
        peer: Peer,
        workflow: Workflow,
        durability: Durability,
        awaits_end: bool,
        memory: ClientMemory | None = None,
    ) -> RunId:
        self.peers.append(peer)
        for i, step in enumerate(workflow.steps):
            if step.op not in OPS:
                raise BadRequest(f"there is no op {step.op!r}", f"steps[{i}].op")
        run = MemoryRun(RunId(secrets.token_bytes(16)), peer, workflow, durability)
        if memory is not None:
            run.memory = {handle: memory.content(handle) for handle in memory.tensors}
        self.runs[run.id] = run
        if workflow.name == "late":
            await self.gate.wait()
        if workflow.name == "bug":
            raise ZeroDivisionError("a bug")
        for step in workflow.steps:
            self.event(run, "started", step.id)
            if step.op == "noop":
                run.outputs[step.id] = msgspec.Raw(values.encode(step.inputs.get("value")))
                self.event(run, "done", step.id)
            elif step.op == "fail":
                run.errors[step.id] = ErrorRecord("task_failed", "it was asked to fail", step.id)
                self.event(run, "failed", step.id, error=run.errors[step.id])
        if all(step.op != "hold" for step in workflow.steps):
            self.end(run, RunState.FAILED if run.errors else RunState.SUCCEEDED)
        return run.id

    def event(self, run: MemoryRun, event: str, step: str, text: str = "", error: ErrorRecord | None = None) -> None:
        update = m.Update(0, len(run.updates) + 1, event, step, 0, "pool:0", 1, 0, text, error)
        run.updates.append(update)
        for push in run.watchers:
            push(update)

    def end(self, run: MemoryRun, state: RunState) -> None:
        run.state = state
        run.ended.set()
        for push in run.watchers:
            push(m.RunResult(0, run.id, state, {}, run.errors))
        run.watchers.clear()

    def release(self, run: RunId) -> None:
        """Ends the steps that hold."""
        held = self.runs[run]
        for step in held.workflow.steps:
            if step.op == "hold":
                held.outputs[step.id] = values.NIL
                self.event(held, "done", step.id)
        self.end(held, RunState.FAILED if held.errors else RunState.SUCCEEDED)

    async def cancel(self, peer: Peer, run: RunId, reason: str) -> None:
        found = self._run(peer, run)
        if found.state is RunState.RUNNING:
            found.errors["run"] = ErrorRecord("cancelled", reason or "cancelled")
            self.end(found, RunState.CANCELLED)

    async def status(self, peer: Peer, run: RunId) -> m.RunStatus:
        found = self._run(peer, run)
        steps = tuple(
            m.StepStatus(s.id, s.op, "done", 1, 1)
            if s.id in found.outputs
            else m.StepStatus(s.id, s.op, "running", 1, 0, waits="a release" if s.op == "hold" else "")
            for s in found.workflow.steps
        )
        return m.RunStatus(0, self._summary(found), steps)

    def _summary(self, run: MemoryRun) -> m.RunSummary:
        steps, done = len(run.workflow.steps), len(run.outputs)
        return m.RunSummary(run.id, run.workflow.name, run.peer.uid, run.state, 1, 0.5, steps, done, run.durability)

    async def list_runs(self, peer: Peer, state: RunState | None, limit: int) -> m.RunList:
        mine = [r for r in reversed(self.runs.values()) if peer.uid in (r.peer.uid, 0) and state in (None, r.state)]
        return m.RunList(0, tuple(self._summary(run) for run in mine[:limit]))

    async def result(self, peer: Peer, run: RunId, wait: bool) -> m.RunResult:
        found = self._run(peer, run)
        if not wait and found.state is RunState.RUNNING:
            raise BadRequest("the run goes on", "run")
        await found.ended.wait()
        return found.result()

    def when_ended(self, peer: Peer, run: RunId, push: Callable[[m.RunResult | Export], None]) -> Callable[[], None]:
        found = self._run(peer, run)

        async def tell() -> None:
            await found.ended.wait()
            push(found.result())

        return asyncio.get_running_loop().create_task(tell()).cancel

    def watch(self, peer: Peer, run: RunId, push: Push) -> Callable[[], None]:
        found = self._run(peer, run)
        for update in found.updates:
            push(update)
        if found.state is not RunState.RUNNING:
            push(m.RunResult(0, found.id, found.state, {}, found.errors))
            return lambda: None
        found.watchers.append(push)
        return lambda: found.watchers.remove(push) if push in found.watchers else None

    async def timeline(self, peer: Peer, run: RunId) -> m.RunTimeline:
        found = self._run(peer, run)
        steps = tuple((s.id, s.op) for s in found.workflow.steps)
        attempts = tuple(
            m.AttemptRecord(i, 0, "run", 1, "pool:0", 0, 1_000, 2_000, 3_000 + i, 9_000 + i, "done")
            for i in range(len(steps))
        )
        return m.RunTimeline(0, found.id, found.workflow.name, found.state, 500, 1, 10_000, steps, (), attempts)

    def devices(self) -> m.DeviceList:
        here = m.DeviceStatus("pool:0", "pool", "ready", 0, 0, 7, {"pid": 1})
        return m.DeviceList(0, (here, m.DeviceStatus("npu:0", "npu", "absent", why="no provider is installed")))

    def memory(self, peer: Peer) -> m.MemoryReport:
        gib = 1 << 30
        tiers = (
            m.TierStatus("host", "host", "ok", "", gib, gib // 2, gib // 2, gib // 4, 0.5, 100, 40, 3, 2, 90, 40, gib, 2 * gib, 8, 7, 0),
            m.TierStatus("nvme", "nvme", "unstarted", "", 4 * gib, 0, 4 * gib, 4 * gib, 0.0, *(0,) * 11),
            m.TierStatus("cpu:0", "device", "degraded", "5 pages could not be moved", gib, 0, gib, gib, 0.0, *(0,) * 10, 5),
        )  # fmt: skip
        links = (m.LinkStatus("host", "cpu:0", 9e9, 1500.0, 12), m.LinkStatus("cpu:0", "host", 2e9, 20_000.0, 0))
        moved = m.Moved(90, gib, 40, gib // 2, 0, 0, 1, 4096, 5, 1)
        mine = [run for run in self.runs.values() if peer.uid in (run.peer.uid, 0)]
        holders = tuple(m.Holder(r.id, r.workflow.name, r.peer.uid, r.state, 3, 3 << 20, 1, 5000) for r in mine)
        tensors = m.TensorTotals(1, 5000, 2, 10_000)
        return m.MemoryReport(0, tiers, links, moved, tensors, "plain", "shmem_enabled is never", holders)

    def models(self, peer: Peer) -> m.ModelList:
        source = "/srv/models/small" if peer.uid == 0 else "small"
        there = ModelPlace("cpu:0", "loaded", "", 513 << 20, 2, 1, 3, used_s=4.2, answer_tokens=90, tokens_per_s=31.25)
        refused = ModelPlace("cpu:0", "refused", "its folder holds no safetensors (tried 3 s ago, 2 times in a row)")
        server = ModelPlace("endpoint:far", "ready", live=3, limit=8)
        models = (
            ModelStatus("small", "folder", source, "float32", "as_dtype", "float32", "LlamaForCausalLM", 134_515_008, 8192, 720 << 10, 513 << 20, {"attention": "native"}, (there,)),
            ModelStatus("broken", "gguf", "b.gguf", "bfloat16", "int8", "bfloat16", places=(refused,)),
            ModelStatus("far", "endpoint", "http://127.0.0.1:8000/v1", places=(server,)),
        )  # fmt: skip
        return m.ModelList(0, models, (WeightsBudget("cpu:0", 513 << 20, 2 << 30),))

    def statistics(self) -> m.StatisticsReport:
        return m.StatisticsReport(0, {"runs": float(len(self.runs))})

    async def shutdown(self, peer: Peer, drain: bool) -> None:
        self.shut_down.append(drain)
