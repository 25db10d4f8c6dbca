"""Places ready tasks: by priority and remaining critical path, on the device that would finish them first.

Owns the queues of ready tasks, one for each set of devices that may run them. `Brain.decide` changes the run table only by `place`.
A task stays queued until its best device can take it, so that the choice is made as late as possible. Pure; the clock is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from hexrt.brain.engines import Engines
from hexrt.brain.queue import ReadyQueue
from hexrt.brain.staging import Staging
from hexrt.brain.view import Class, Device, class_of
from hexrt.core import DeviceKind, TaskState
from hexrt.errors import BadRequest, ErrorRecord, HexrtError, TaskFailed, Unavailable
from hexrt.events import Event, Failed, Started
from hexrt.memory.keeper import DISK
from hexrt.ops.spec import by_input_bytes
from hexrt.runtime.entities import Run, Task, Tensor
from hexrt.runtime.holding import size_of
from hexrt.runtime.state import RunTable
from hexrt.scheduling.cost import CostModel, Estimate
from hexrt.scheduling.rank import upward_ranks
from hexrt.values import NIL, handles, pick
from hexrt.workflow.graph import ITEM, InputRef, Node, TaskGraph

READY, WAITING = TaskState.READY, TaskState.WAITING
POOL = DeviceKind.POOL
LAUNCH = 1  # the tag of protocol.host.Launch, sent as a plain tuple for speed
SHORT_NS = 200_000
"""Tasks expected to be shorter are sent without a report of their start, and ahead of their single predecessor's end."""
PICK_BYTES = 4096
"""Outputs larger than this are cut to the referenced part before they are sent."""
MAX_LAUNCH_BYTES = 512 << 20
"""Of one task's inputs: half of what a message to a host may have."""

FIRST = 1 << 40
"""Priority of what is with a server already."""


@dataclass(slots=True)
class Commands:
    """What one turn is to carry out: messages by device, launches that wait for their Started to be durable, tasks to stop, and events.

    `places` is where tensors lie that these launches read, by device.
    """

    send: dict[str, list[Any]] = field(default_factory=dict)
    gated: list[tuple[str, Any, Started, Run]] = field(default_factory=list)
    stop: list[Task] = field(default_factory=list)
    places: dict[str, set[int]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


class Brain:
    def __init__(self, table: RunTable, cost: CostModel, engines: Engines) -> None:
        self.table = table
        self.cost = cost
        self.engines = engines
        engines.expected_ns = lambda run, step: self._expected_ns(run.steps[step].node)
        self.staging = Staging(engines.keeper, table.holding)
        self.devices: dict[str, Device] = {}
        self._by_class: dict[Class, list[Device]] = {}
        self._queues: dict[Class, ReadyQueue] = {}
        self._queue_of: dict[tuple[int, int, str | None], ReadyQueue] = {}  # by op, part and device
        self.paused = False  # places nothing while it is set

    def add_device(self, device: Device) -> None:
        self.devices[device.name] = device
        self._by_class.clear()

    def check_runnable(self, graph: TaskGraph) -> None:
        """Raises BadRequest or Unavailable, naming the step, where some part of it has no device that could ever run it."""
        seen: set[tuple[str, str | None, Class]] = set()
        for node in graph.nodes:
            last = self._class_of(node, len(node.op.parts) - 1)
            if node.op.parts[-1].body is None:
                self.engines.endpoints.check(node)
                self.engines.loading.check(node, self.engines.keeper, [d.name for d in self._devices(last)])
            if (node.op.name, node.device, last) not in seen:
                seen.add((node.op.name, node.device, last))
                for part in range(len(node.op.parts)):
                    self._check_part(node, self._class_of(node, part))

    def _class_of(self, node: Node, part: int) -> Class:
        return class_of(node, part, self.engines.endpoints.device_of(node, part))

    def _check_part(self, node: Node, queue_class: Class) -> None:
        devices, kinds = self._devices(queue_class), queue_class[0]
        if not devices:
            there = ", ".join(d.name for d in self.devices.values() if d.kind in kinds) or "none"
            wanted = node.device or " or ".join(kinds)
            raise BadRequest(
                f"needs a device {wanted}; of its kinds there is here: {there}", f"steps.{node.id}.needs.device"
            )
        if all(d.lost for d in devices):
            why = "; ".join(f"{d.name}: {d.lost}" for d in devices)
            raise Unavailable(f"its device cannot be had ({why}); see `hexrt devices`", f"steps.{node.id}")

    @property
    def queued(self) -> int:
        return sum(queue.count for queue in self._queues.values())

    def decide(self, now_ns: int) -> Commands:
        """One turn: takes over what became ready, places what can be placed, and passes on what must stop."""
        table, out = self.table, Commands()
        for run in table.submitted:
            if len(run.steps) > 1:
                self._rank(run)
        table.submitted.clear()
        keeping = self.engines.keeping
        for task in table.fresh:
            self._queue(task)
            if keeping and task.run.id in keeping:
                self.engines.look_ahead(task.run, now_ns)
        table.fresh.clear()
        if self.staging.again:
            for task in self.staging.take_again():
                self._queue(task)
        if not self.paused:
            self._place_queues(now_ns, out)
        if table.stop:
            stop = [t for t in table.stop if t.state is TaskState.PLACED or t.state is TaskState.RUNNING]
            table.stop.clear()
            self.engines.stop([t for t in stop if self.engines.owns(t)], now_ns)
            out.stop = [t for t in stop if not self.engines.owns(t)]
        self.engines.endpoints.decide(now_ns, self.devices, out.send)
        self.engines.decide(now_ns, self.devices, out.send, out.events)
        if self.staging.lost:
            out.events += self.staging.lost
            self.staging.lost.clear()
        if self.engines.keeper.traffic.places:
            out.places.setdefault(DISK, set()).update(self.engines.keeper.traffic.take_places())
        if table.holding.refused:
            out.events += table.holding.refused
            table.holding.refused.clear()
        return out

    def _rank(self, run: Run) -> None:
        if run.graph is None:
            return
        memo: dict[tuple[str, str | None], float] = {}

        def cost_ns(node: Node) -> float:
            key = node.op.name, self.engines.endpoints.device_of(node, len(node.op.parts) - 1)
            if key not in memo:
                memo[key] = self._expected_ns(node)
            return memo[key]

        for step, rank in zip(run.steps, upward_ranks(run.graph, cost_ns), strict=True):
            step.rank = rank

    def _expected_ns(self, node: Node) -> float:
        """What a step takes on the best of its devices, whatever the size of its inputs."""
        parts = range(len(node.op.parts))
        names = [tuple({d.cost_name for d in self._devices(self._class_of(node, part))}) for part in parts]
        return float(sum(self.cost.best_ns(node.op.name, part, names[part], 0) for part in parts))

    def _queue(self, task: Task) -> None:
        if task.state is not READY:
            return
        step = task.step
        node = step.node
        served = self.engines.endpoints.device_of(node, task.op_part)
        key = id(node.op), task.op_part, served or node.device  # ops live as long as the daemon
        queue = self._queue_of.get(key)
        if queue is None:
            queue = self._queue_of[key] = self._queues.setdefault(class_of(node, task.op_part, served), ReadyQueue())
        priority = FIRST if served and self.engines.endpoints.has(task) else node.priority
        queue.push((-priority, -step.rank), task)

    def _devices(self, queue_class: Class) -> list[Device]:
        """The devices that may run a class: of its kinds, and as the step insists."""
        found = self._by_class.get(queue_class)
        if found is None:
            kinds, only = queue_class
            found = [d for d in self.devices.values() if d.kind in kinds and (only in (d.name, d.kind.value) or (only is None and d.kind is not DeviceKind.ENDPOINT))]  # fmt: skip
            found.sort(key=lambda d: d.cost_name)
            self._by_class[queue_class] = found
        return found

    def _place_queues(self, now_ns: int, out: Commands) -> None:
        """Places the most urgent task of all queues, then the next, until each queue's head must wait."""
        active = [(queue_class, queue) for queue_class, queue in self._queues.items() if queue.count]
        while active:
            first = min(active, key=lambda entry: entry[1].urgency) if len(active) > 1 else active[0]
            queue_class, queue = first
            if not self._place_queue(queue_class, queue, now_ns, out, len(active) > 1) or not queue.count:
                active.remove(first)

    def _place_queue(self, queue_class: Class, queue: ReadyQueue, now_ns: int, out: Commands, only_head: bool) -> bool:
        """Places tasks of one queue in their order, all or only the first; False where its head must wait."""
        devices = self._devices(queue_class)
        ready = [d for d in devices if d.ready]
        if not ready:
            if all(d.lost for d in devices):
                while queue.count:
                    self._refuse(queue.pop(), queue_class, devices, now_ns, out)
            return False
        while queue.count:
            task = queue.first()
            if task.state is not READY:  # cancelled or skipped since it was queued
                queue.pop()
                self.staging.let_go(task)
                continue
            if task.step.node.op.parts[task.op_part].body is None:
                if not self.engines.endpoints.can_begin(task, ready[0]):
                    return False
                queue.pop()
                self._place_engine(task, ready, now_ns)
            else:
                device, estimate = self._best(task, ready)
                predicted_ns = int(estimate.mean_ns)
                if not device.can_take(predicted_ns):
                    return False
                queue.pop()
                task.learn = estimate.observe
                self._launch(task, device, predicted_ns, now_ns, out)
            if only_head:
                break
        return True

    def _best(self, task: Task, ready: list[Device]) -> tuple[Device, Estimate]:
        """The device on which the task would end first, what is in flight there included."""
        op, part = task.step.node.op.name, task.op_part
        work = task.work = self._work(task)
        best = ready[0]
        name = best.cost_name
        best_estimate = estimate = self.cost.estimate(op, part, name, work)
        mean_ns = estimate.mean_ns
        best_ns = best.backlog_ns + mean_ns
        for device in ready:  # sorted by cost_name: workers of one pool share an estimate
            if device.cost_name is not name:
                name = device.cost_name
                estimate = self.cost.estimate(op, part, name, work)
                mean_ns = estimate.mean_ns
            finish_ns = device.backlog_ns + mean_ns
            if finish_ns < best_ns:
                best, best_ns, best_estimate = device, finish_ns, estimate
        return best, best_estimate

    def _place_engine(self, task: Task, ready: list[Device], now_ns: int) -> None:
        """LLM parts go to the engine of a device, which batches them: to the one that has the pages or gets them soonest, with the fewest sequences."""
        before, engines = task.step.tasks[task.part - 1].device if task.op_part else "", self.engines
        device = next((d for d in ready if d.name == before), None)
        if device is None:
            device = (
                ready[0]
                if len(ready) == 1
                else min(ready, key=lambda d: (engines.bring_ns(task, d.name), len(d.window)))
            )
        task.work = self._work(task)
        estimate = self.cost.estimate(task.step.node.op.name, task.op_part, device.cost_name, task.work)
        task.learn = estimate.observe
        self._place(task, device, int(estimate.mean_ns), now_ns)
        self.engines.start(task, device.name, now_ns)

    def _refuse(self, task: Task, queue_class: Class, devices: list[Device], now_ns: int, out: Commands) -> None:
        self.staging.let_go(task)
        kinds, only = queue_class
        wanted = only or " or ".join(kinds)
        why = "; ".join(f"{d.name}: {d.lost}" for d in devices) or "none is configured"
        error = ErrorRecord(
            "unavailable", f"no device {wanted} to run on ({why}); see `hexrt devices`", task.step.node.id
        )
        out.events.append(Failed(task.run.id, task.step.node.index, task.part, task.attempt, "", now_ns, now_ns, error))

    def _work(self, task: Task) -> int:
        node = task.step.node
        size = len(node.inputs)
        if node.op.work is by_input_bytes and not node.refs and not task.run.tensors:
            return size
        if task.run.tensors:
            size = size_of(task.run, node.inputs)
        for ref in node.refs:
            raw = task.item if ref.step == ITEM else task.run.steps[ref.step].output
            size += size_of(task.run, raw) if raw is not None else 0
        return node.op.work(node.params, size)

    def _launch(self, task: Task, device: Device, predicted_ns: int, now_ns: int, out: Commands) -> None:
        node = task.step.node
        try:
            bindings = self._bindings(task) if node.refs or task.op_part else ()
            tensors = tensors_read(task, bindings) if task.run.tensors else ()
            if (
                bindings
                and (size := sum(len(b[2]) for b in bindings) + sum(t.bytes for t in tensors)) > MAX_LAUNCH_BYTES
            ):
                raise TaskFailed(
                    f"its inputs have {size} bytes, more than the {MAX_LAUNCH_BYTES} that one task can be given"
                )
            if tensors:
                self.staging.check_fits(tensors)
        except HexrtError as error:
            self.staging.let_go(task)
            out.events.append(Failed(task.run.id, node.index, task.part, task.attempt, device.name, now_ns, now_ns, ErrorRecord(error.kind, error.message, node.id)))  # fmt: skip
            return
        if tensors and not self.staging.is_ready(task, tensors, now_ns):
            return
        short = predicted_ns < SHORT_NS and node.idempotent
        message = self._send(task, device, predicted_ns, now_ns, bindings, tensors, not short, out)
        if not node.idempotent:
            started = Started(task.run.id, node.index, task.part, task.attempt, device.name, now_ns)
            out.gated.append((device.name, message, started, task.run))
            return
        sent = out.send.setdefault(device.name, [])
        sent.append(message)
        if short and device.kind is POOL and len(node.op.parts) == 1 and node.map is None:
            self._look_ahead(task, device, now_ns, sent, out)

    def _send(self, task: Task, device: Device, predicted_ns: int, now_ns: int, bindings: tuple[Any, ...], tensors: tuple[Tensor, ...], report_start: bool, out: Commands) -> tuple[Any, ...]:  # fmt: skip
        """Places the task and makes its Launch."""
        node, run = task.step.node, task.run
        command = self._place(task, device, predicted_ns, now_ns)
        launch = (
            LAUNCH, command, task.attempt, node.op.name, task.op_part, run.id, node.id, run.uid, node.timeout_ns / 1e9,
            node.params_raw, node.inputs, bindings, report_start,
        )  # fmt: skip
        if not tensors:
            return launch
        self.table.holding.pin(task, tensors)
        out.places.setdefault(device.name, set()).update(tensor.place for tensor in tensors)
        offset = self.staging.offset
        return (*launch, tuple((t.handle, t.place, t.offset if t.page < 0 else offset(t), t.bytes) for t in tensors))

    def _place(self, task: Task, device: Device, predicted_ns: int, now_ns: int) -> int:
        device.command = command = device.command + 1
        self.table.place(task, device.name, command, now_ns, predicted_ns)
        device.window[command] = task
        device.backlog_ns += predicted_ns
        return command

    def _look_ahead(self, task: Task, device: Device, now_ns: int, sent: list[Any], out: Commands) -> None:
        """Sends on to the same worker the steps that wait for `task` alone: a chain then costs no wake-up a step."""
        while True:
            successors = task.step.node.successors
            if len(successors) != 1:
                return
            step = task.run.steps[successors[0]]
            node = step.node
            if (
                len(node.predecessors) != 1
                or step.state is not WAITING
                or node.map is not None
                or not node.idempotent
                or node.device is not None
                or node.priority < task.step.node.priority
                or len(node.op.parts) != 1
                or POOL not in node.op.parts[0].kinds
            ):
                return
            next_task = step.tasks[0]
            work = node.op.work(node.params, size_of(task.run, node.inputs))
            estimate = self.cost.estimate(node.op.name, 0, device.cost_name, work)
            predicted = int(estimate.mean_ns)
            if next_task.state is not WAITING or predicted >= SHORT_NS or not device.can_take(predicted):
                return
            local = task.command
            bindings: tuple[Any, ...] = tuple((ref.to, ref.path, NIL, local) for ref in node.refs) or (
                ((), (), NIL, local),
            )
            next_task.work, next_task.learn = work, estimate.observe
            # Those of the steps before it are in the worker's own ring.
            tensors = tensors_read(next_task, ()) if task.run.tensors else ()
            sent.append(self._send(next_task, device, predicted, now_ns, bindings, tensors, False, out))
            task = next_task

    def _bindings(self, task: Task) -> tuple[Any, ...]:
        steps = task.run.steps
        bindings = [
            self._binding(task.run, ref, task.item if ref.step == ITEM else steps[ref.step].output)
            for ref in task.step.node.refs
        ]
        if task.op_part:
            bindings.append((("previous",), (), task.step.tasks[task.part - 1].output or NIL, 0))
        return tuple(bindings)

    @staticmethod
    def _binding(run: Run, ref: InputRef, raw: msgspec.Raw | None) -> tuple[Any, ...]:
        value = raw if raw is not None else NIL
        if ref.path and size_of(run, value) > PICK_BYTES:
            return ref.to, (), pick(value, ref.path), 0
        return ref.to, ref.path, value, 0


def tensors_read(task: Task, bindings: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """What the launch of a task needs of its run's tensors. Raises TaskFailed where its inputs name one that the run does not have."""
    known, found = task.run.tensors or {}, {}
    for value in (task.step.node.inputs, *(binding[2] for binding in bindings)):
        for handle in handles(value):
            tensor = known.get(handle)
            if tensor is None:
                raise TaskFailed(f"its inputs name tensor {handle}, which this run does not have")
            found[handle] = tensor
    return tuple(found.values())
