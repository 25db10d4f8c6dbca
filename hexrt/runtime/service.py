"""What the socket's server calls: submit, cancel, status, result, watch and the rest, for one daemon.

Owns who may see what, the watches, and which ended runs are still in memory. Implements `hexrt.server.backend.Backend`. Loop thread only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from hexrt.brain.decide import Brain
from hexrt.clock import Clock
from hexrt.config import Limits
from hexrt.core import Durability, Peer, RunId, RunState
from hexrt.errors import BadRequest, NotFound, Overloaded
from hexrt.events import CancelRequested, DeadlinePassed, Submitted
from hexrt.memory.passed import ClientMemory, Export
from hexrt.protocol.messages import (
    DeviceList,
    MemoryReport,
    ModelList,
    RunList,
    RunResult,
    RunStatus,
    RunTimeline,
    StatisticsReport,
    Update,
)  # fmt: skip
from hexrt.runtime.answers import past_of, result_of, result_of_ended, status_of, summary_of, timeline_of, update_of
from hexrt.runtime.deadlines import Deadlines
from hexrt.runtime.entities import Change, Run, Task
from hexrt.runtime.machine import devices_of, memory_of
from hexrt.runtime.models import models_of
from hexrt.runtime.owner import Owner
from hexrt.runtime.passing import Results, check_tensors, recordable
from hexrt.runtime.room import Room, tasks_of
from hexrt.runtime.state import RunTable
from hexrt.runtime.store import Store
from hexrt.runtime.store_records import EndedRun
from hexrt.runtime.tensors import Tensors
from hexrt.workflow.graph import TaskGraph
from hexrt.workflow.model import Workflow

Push = Callable[[Update | RunResult], None]
TICK_S = 0.05


@dataclass(eq=False, slots=True)
class Watch:
    push: Push
    number: int = 0


class Service:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        table: RunTable,
        brain: Brain,
        store: Store,
        clock: Clock,
        limits: Limits,
        admin_gids: tuple[int, ...],
        check: Callable[[Workflow], Generator[None, None, TaskGraph]],
        on_shutdown: Callable[[bool], None],
        tensors: Tensors,
        arena: Mapping[str, Any],
    ) -> None:
        self._loop = loop
        self._table = table
        self._brain = brain
        self._store = store
        self._clock = clock
        self.limits = limits
        self.admin_gids = admin_gids
        self._check = check
        self._on_shutdown = on_shutdown
        self._tensors = tensors
        self._arena = arena
        self._results = Results(table, store, tensors)
        self.owner = Owner(loop, table, brain, store, clock, tensors, self._changed, self._ended, self._closed)
        self._watches: dict[bytes, list[Watch]] = {}
        self._waiting: dict[bytes, list[Callable[[], None]]] = {}
        self._room = Room(table, lambda run: loop.call_soon(self._forget, run))
        self._deadlines = Deadlines()
        self._tick: asyncio.TimerHandle | None = None
        self._submitting = 0
        self.draining = False
        self._still: asyncio.Future[None] | None = None
        self._started_ns = clock.now_ns()

    # --- submission ---------------------------------------------------------------------------------------------

    async def submit(
        self,
        peer: Peer,
        workflow: Workflow,
        durability: Durability,
        awaits_end: bool,
        memory: ClientMemory | None = None,
    ) -> RunId:
        if self.draining:
            raise Overloaded("the daemon is shutting down; submit again once it is back")
        limits, table = self.limits, self._table
        tasks = tasks_of(workflow)
        self._room.check(tasks, 0, self._submitting, limits)
        if self._store.is_behind() and durability is not Durability.NONE:
            raise Overloaded("the disk is behind with what is to be recorded; try again later")
        self._submitting += 1
        try:
            graph = await self._checked(workflow)
            check_tensors(graph, memory, limits.max_run_mib << 20)
            self._brain.check_runnable(graph)
            size = graph.bytes + (memory.bytes if memory is not None else 0)
            self._room.check(tasks, size, self._submitting - 1, limits)  # others came in meanwhile
            if memory is not None and durability is not Durability.NONE:
                workflow = await recordable(workflow, memory)
        finally:
            self._submitting -= 1
        run = RunId(os.urandom(16))
        now_ns = self._clock.now_ns()
        table.prepared[run] = graph
        if memory is not None:
            self._tensors.take(run, memory)
        self.owner.take(Submitted(run, peer.uid, peer.gid, durability, self._clock.wall_ns(), now_ns, workflow))
        self._note_deadlines(run, graph, now_ns)
        found = table.runs.get(run)
        if found is not None:
            if not awaits_end:
                self._store.hasten(self.owner.gate_of(found))
            await self._settled(found)
        return run

    async def _checked(self, workflow: Workflow) -> TaskGraph:
        slices = self._check(workflow)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                graph: TaskGraph = end.value
                return graph
            await asyncio.sleep(0)

    def _note_deadlines(self, run: bytes, graph: TaskGraph, submitted_ns: int) -> None:
        self._deadlines.add(run, graph, submitted_ns, self._table.runs)
        self.keep_time()

    def resume(self) -> None:
        """After a replay: deadlines count on from what is left of them."""
        for run in self._table.runs.values():
            if run.graph is not None and not run.ended_ns:
                self._note_deadlines(run.id, run.graph, run.submitted_ns)
        self.owner.wake()

    def keep_time(self) -> None:
        """Keeps the timer for timeouts and deadlines going while any run is open."""
        if self._tick is None:
            self._tick = self._loop.call_later(TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        self._tick = None
        now_ns = self._clock.now_ns()
        for at_ns, run, step in self._deadlines.due(now_ns):
            self.owner.post(DeadlinePassed(run, step, at_ns))
        if self.owner.fleet is not None:
            self.owner.fleet.check_timeouts(now_ns)
        if 0 < self._brain.engines.holds_until_ns() <= now_ns:
            self.owner.wake()
        if self._table.open_runs:
            self.keep_time()
        else:
            self._deadlines.clear()

    # --- one run ------------------------------------------------------------------------------------------------

    def _is_admin(self, peer: Peer) -> bool:
        return peer.uid in (0, os.getuid()) or peer.gid in self.admin_gids or any(g in self.admin_gids for g in peer.groups)  # fmt: skip

    def _run(self, peer: Peer, run: bytes) -> Run | None:
        """The run if it is in memory and the peer may see it; None if it may be in the store."""
        found = self._table.runs.get(run)
        if found is not None and found.uid != peer.uid and not self._is_admin(peer):
            raise NotFound("there is no such run; see `hexrt list`", run.hex())
        return found

    def _past(self, peer: Peer, run: bytes) -> EndedRun:
        found = self._store.find_run(run)
        if found is None or (found.summary.uid != peer.uid and not self._is_admin(peer)):
            raise NotFound("there is no such run; see `hexrt list`", run.hex())
        return found

    async def _settled(self, run: Run) -> None:
        """Waits until what is known of the run now may be shown."""
        await self._on_disk(self.owner.gate_of(run))

    async def _on_disk(self, gate: int) -> None:
        if gate > self._store.committed:
            done = self._loop.create_future()
            self.owner.after(gate, lambda: None if done.done() else done.set_result(None))
            await done

    async def cancel(self, peer: Peer, run: RunId, reason: str) -> None:
        found = self._run(peer, run)
        if found is None:
            self._past(peer, run)
            return
        if not found.ended_ns:
            now_ns = self._clock.now_ns()
            self.owner.post(CancelRequested(run, peer.uid, self._clock.wall_ns(), now_ns, reason))
        await self._end_of(found)

    async def _end_of(self, run: Run) -> None:
        if run.ended_ns:
            await self._settled(run)
            return
        done = self._loop.create_future()
        self._waiting.setdefault(run.id, []).append(lambda: None if done.done() else done.set_result(None))
        await done

    async def status(self, peer: Peer, run: RunId) -> RunStatus:
        found = self._run(peer, run)
        if found is None:
            past = self._past(peer, run)
            return RunStatus(0, past.summary, past.steps)
        await self._settled(found)
        if found.id not in self._table.runs:  # it ended and was let go of meanwhile
            return await self.status(peer, run)
        return status_of(found, self._clock.now_ns(), self._waits_for)

    def _waits_for(self, task: Task) -> str:
        return self._brain.engines.waits_for(task) or self._brain.staging.waits_for(task)

    async def list_runs(self, peer: Peer, state: RunState | None, limit: int) -> RunList:
        """Newest first: what is in memory, and of the store what is not."""
        uid = None if self._is_admin(peer) else peer.uid
        now_ns = self._clock.now_ns()
        here = {
            run.id: summary_of(run, now_ns)
            for run in self._table.runs.values()
            if (uid is None or run.uid == uid) and (state is None or run.state == state)
        }
        await self._on_disk(max((self.owner.gate_of(self._table.runs[run]) for run in here), default=0))
        past = [s for s in self._store.list_runs(uid, state, limit) if s.run not in here]
        newest = sorted([*here.values(), *past], key=lambda s: s.submitted_wall_ns, reverse=True)
        return RunList(0, tuple(newest[:limit]))

    async def result(self, peer: Peer, run: RunId, wait: bool) -> RunResult | Export:
        found = self._run(peer, run)
        if found is None:
            return result_of_ended(self._past(peer, run))
        if not found.ended_ns and not wait:
            raise BadRequest("the run has not ended; wait for it, or see `hexrt status`", found.id.hex())
        await self._end_of(found)
        if found.id not in self._table.runs:
            return result_of_ended(self._past(peer, run))
        return self._results.answer(found)

    def when_ended(self, peer: Peer, run: RunId, push: Callable[[RunResult | Export], None]) -> Callable[[], None]:
        found = self._run(peer, run)
        if found is None:
            push(result_of_ended(self._past(peer, run)))
            return lambda: None

        def tell() -> None:
            push(self._results.answer(found))

        if found.ended_ns and self.owner.gate_of(found) <= self._store.committed:
            tell()
            return lambda: None
        waiting = self._waiting.setdefault(run, [])
        waiting.append(tell)
        return lambda: waiting.remove(tell) if tell in waiting else None

    async def timeline(self, peer: Peer, run: RunId) -> RunTimeline:
        found = self._run(peer, run)
        if found is None:
            return self._past(peer, run).timeline
        await self._settled(found)
        if found.id not in self._table.runs:
            return self._past(peer, run).timeline
        return timeline_of(found)

    # --- watching -----------------------------------------------------------------------------------------------

    def watch(self, peer: Peer, run: RunId, push: Push) -> Callable[[], None]:
        found = self._run(peer, run)
        if found is None:
            past = self._past(peer, run)
            push(RunResult(0, run, past.summary.state, {}, past.errors))
            return lambda: None
        watch = Watch(push)
        watches = self._watches.setdefault(run, [])

        def begin() -> None:
            for change in past_of(found):
                watch.number += 1
                push(update_of(change, watch.number))
            if found.ended_ns:
                push(RunResult(0, run, found.state, {}, result_of(found).errors))
            elif not stopped:
                found.watched = True
                watches.append(watch)

        stopped: list[bool] = []

        def stop() -> None:
            stopped.append(True)
            if watch in watches:
                watches.remove(watch)
                found.watched = bool(watches)

        self.owner.after(self.owner.gate_of(found), begin)
        return stop

    def _changed(self, changes: list[Change]) -> None:
        for change in changes:
            for watch in self._watches.get(change.run.id, ()):
                watch.number += 1
                watch.push(update_of(change, watch.number))

    def _ended(self, run: Run) -> None:
        """The run has ended, and that may be shown."""
        watches = self._watches.pop(run.id, None)
        if watches:
            last = RunResult(0, run.id, run.state, {}, result_of(run).errors)
            for watch in list(watches):
                watch.push(last)
            watches.clear()
        for act in self._waiting.pop(run.id, ()):
            act()

    def _closed(self, run: Run) -> None:
        self._room.keep(run, self.limits)

    def _forget(self, run: Run) -> None:
        self._table.forget(run)
        self._tensors.collect()

    # --- the daemon ---------------------------------------------------------------------------------------------

    def devices(self) -> DeviceList:
        return devices_of(self._brain)

    def memory(self, peer: Peer) -> MemoryReport:
        uid = None if self._is_admin(peer) else peer.uid
        return memory_of(self._brain, self._table.runs.values(), self._arena, uid)

    def models(self, peer: Peer) -> ModelList:
        return models_of(self._brain, self._clock.now_ns(), self._is_admin(peer))

    def statistics(self) -> StatisticsReport:
        table, store = self._table, self._store
        return StatisticsReport(
            0,
            {
                "open_runs": float(table.open_runs),
                "open_tasks": float(table.open_tasks),
                "queued_tasks": float(self._brain.queued),
                "kept_runs": float(self._room.kept),
                "deadlines": float(len(self._deadlines)),
                "held_bytes": float(table.holding.held_bytes),
                "turns": float(self.owner.turns),
                "store_pending_bytes": float(store.pending_bytes),
                "store_committed": float(store.committed),
                "uptime_s": (self._clock.now_ns() - self._started_ns) / 1e9,
            }
            | {f"done_{d.name}": float(d.done) for d in self._brain.devices.values()}
            | self._tensors.statistics()
            | self._brain.engines.statistics(),
        )

    async def shutdown(self, peer: Peer, drain: bool) -> None:
        if peer.uid not in (0, os.getuid()):
            raise BadRequest("only root and the daemon's own user may shut it down", "shutdown")
        self._on_shutdown(drain)

    async def drain(self, at_most_s: float) -> None:
        """Places nothing more and waits until what runs has ended. New runs are refused from now on."""
        self.draining = self._brain.paused = True
        self._still = still = self._loop.create_future()
        self.owner.when_still = self.hurry
        self.owner.wake()
        await asyncio.wait([still], timeout=at_most_s)

    def hurry(self) -> None:
        """Ends a drain now."""
        if self._still is not None and not self._still.done():
            self._still.set_result(None)

    def close(self) -> None:
        """Stops the timer and closes what has ended; who still waits is the server's to turn away."""
        self.owner.close_ended()
        if self._tick is not None:
            self._tick.cancel()
