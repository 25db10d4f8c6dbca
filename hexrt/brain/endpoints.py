"""The models that servers answer for: which task is which request, and how many are with each server.

Owns one `llm.endpoint.EndpointEngine` for each served model, whose device is `endpoint:NAME`. An `llm.generate` step is one request that two
tasks share: prefill lasts until the first token, decode until the last. Who may begin is decided here, so that what a server does not take
yet stays in the brain's queue, in its order. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hexrt.brain.models import ModelSource
from hexrt.brain.sequences import Key, key_of
from hexrt.brain.view import Device
from hexrt.core import DeviceKind
from hexrt.errors import BadRequest, ErrorRecord, HexrtError, Unavailable
from hexrt.events import Emitted, Event, Started
from hexrt.llm.endpoint import Closed, EndpointEngine, EndpointOutcome, EndpointReport, Seen, request_of
from hexrt.llm.outcome import Emitted as Tokens
from hexrt.llm.outcome import Prefilled, Refused
from hexrt.llm.steps import DEFAULT, Tokenised, check_numerics
from hexrt.runtime.entities import Task
from hexrt.workflow.graph import Node

PREFIX = f"{DeviceKind.ENDPOINT}:"
PREFILLED = msgspec.msgpack.encode(Tokenised((), 0))
GENERATE = "llm.generate"
End = Callable[[Task, bytes, int, int], None]
Fail = Callable[[Task, ErrorRecord, int], None]


@dataclass(eq=False, slots=True)
class _Sequence:
    """One request. `task` is the one that runs; None between prefill and decode, when `early` holds what comes."""

    task: Task | None
    early: list[EndpointOutcome] = field(default_factory=list)


class Endpoints:
    def __init__(self, models: Mapping[str, ModelSource], emit: Callable[[Event], None], end: End, fail: Fail) -> None:
        """`end` and `fail` end a task and put out its event."""
        self._emit, self._end, self._fail = emit, end, fail
        self._devices = {name: PREFIX + name for name, source in models.items() if source.endpoint}
        first = next(iter(models), "")
        if DEFAULT not in models and first in self._devices:
            self._devices[DEFAULT] = self._devices[first]
        self._engines = {device: EndpointEngine(device[len(PREFIX) :]) for device in self._devices.values()}
        self._used_ns: dict[str, int] = {}
        self._live: dict[str, dict[Key, _Sequence]] = {device: {} for device in self._engines}

    # --- where a step goes ------------------------------------------------------------------------------------------

    def device_of(self, node: Node, part: int) -> str | None:
        """The device of the server that answers for this part of a step; None for a part that no server has to do with."""
        return self._devices.get(node.params.model) if node.op.parts[part].body is None else None  # type: ignore[attr-defined]

    def check(self, node: Node) -> None:
        """Raises BadRequest or Unavailable, naming the step, where its op, numerics or device do not go with who answers for its model."""
        params: Any = node.params
        device, wanted = self._devices.get(params.model), node.device or ""
        if device is None:
            if wanted.partition(":")[0] == DeviceKind.ENDPOINT:
                raise BadRequest(f"no server answers for the model {params.model!r}: it runs on a device here", f"steps.{node.id}.needs.device")  # fmt: skip
            return
        if wanted not in ("", device, DeviceKind.ENDPOINT):
            raise BadRequest(f"a server answers for the model {params.model!r}: the device can only be {device!r}", f"steps.{node.id}.needs.device")  # fmt: skip
        try:
            self._check_served(node)
        except HexrtError as error:
            raise type(error)(error.message, f"steps.{node.id}.{error.where}") from None

    @staticmethod
    def _check_served(node: Node) -> None:
        params: Any = node.params
        if node.op.name != GENERATE:
            raise Unavailable(f"a server answers for the model {params.model!r}, and keeps no prefix for {node.op.name}: use {GENERATE}", "params.model")  # fmt: skip
        check_numerics(params.numerics, params.model, False)

    def has(self, task: Task) -> bool:
        """Whether the task's request is with its server already."""
        device = self.device_of(task.step.node, task.op_part)
        return device is not None and key_of(task) in self._live[device]

    def can_begin(self, task: Task, device: Device) -> bool:
        """Whether the task may be placed there now. True for a device that is no server."""
        live = self._live.get(device.name)
        return live is None or len(live) < device.max_in_flight or key_of(task) in live

    # --- from the brain -----------------------------------------------------------------------------------------

    def start(self, task: Task, device: str, now_ns: int) -> bool:
        """A prefill or decode task was placed on `device`. False where that is no server."""
        if device in self._engines:
            self._start(task, device, now_ns)
        return device in self._engines

    def _start(self, task: Task, device: str, now_ns: int) -> None:
        step, node, live, key = task.step, task.step.node, self._live[device], key_of(task)
        self._emit(Started(task.run.id, node.index, task.part, task.attempt, device, now_ns))
        if (sequence := live.get(key)) is not None:
            sequence.task, early = task, sequence.early
            sequence.early = []
            for outcome in early:
                self._outcome(device, outcome, now_ns)
            return
        try:
            self._check_served(node)
            if self._devices.get(node.params.model) != device:  # type: ignore[attr-defined]
                raise Unavailable(f"no server at {device} answers for its model", "params.model")
            decode = step.tasks[key[2] + len(node.op.parts) - 1]
            request = request_of(node.params, step.tasks[key[2]].output, key, decode.text or [], decode.logprobs or [])
        except HexrtError as error:
            self._fail(task, error.record(), now_ns)
            return
        self._engines[device].add(request)
        live[key] = _Sequence(task)

    def stop(self, task: Task) -> None:
        """Lets go of the task's request at once, if it has one."""
        if task.device in self._engines:
            self._forget(task.device, key_of(task))

    def run_ended(self, run: bytes) -> None:
        for device, live in self._live.items():
            for key in [key for key in live if key[0] == run]:
                self._forget(device, key)

    def _forget(self, device: str, key: Key) -> None:
        if self._live[device].pop(key, None) is not None:
            self._engines[device].cancel(key)

    def decide(self, now_ns: int, devices: Mapping[str, Device], send: dict[str, list[Any]]) -> None:
        for name, engine in self._engines.items():
            if not engine.is_idle and name in devices:
                messages = engine.decide(now_ns, devices[name].next_command)
                if messages:
                    send.setdefault(name, []).extend(messages)

    # --- from the devices -----------------------------------------------------------------------------------------

    def report(self, device: Device, report: EndpointReport) -> None:
        if isinstance(report, Seen):
            device.facts = report.facts
            return
        self._used_ns[device.name] = report.at_ns
        for outcome in self._engines[device.name].reported(report):
            self._outcome(device.name, outcome, report.at_ns)

    def _outcome(self, device: str, outcome: EndpointOutcome, at_ns: int) -> None:
        key: Key = outcome.key  # type: ignore[assignment]
        sequence = self._live[device].get(key)
        if sequence is None:
            return
        task = sequence.task
        if task is None or (is_prefill(task) and not isinstance(outcome, Prefilled | Refused)):
            sequence.early.append(outcome)
        elif isinstance(outcome, Prefilled):
            if is_prefill(task):
                sequence.task = None
                self._end(task, PREFILLED, outcome.start_ns, outcome.end_ns)
        elif isinstance(outcome, Tokens):
            self._emit(Emitted(task.run.id, task.step.node.index, task.part, task.attempt, 0, (), outcome.text, at_ns, outcome.logprobs))  # fmt: skip
        elif isinstance(outcome, Closed):
            del self._live[device][key]
            self._end(task, outcome.output, task.start_ns or outcome.start_ns, outcome.end_ns)
        else:
            del self._live[device][key]
            self._fail(task, outcome.error, at_ns)

    # --- looking in -------------------------------------------------------------------------------------------------

    def used(self, device: str) -> tuple[int, int]:
        """When an endpoint last answered, 0 for never, and how many tokens it has answered."""
        engine = self._engines.get(device)
        return self._used_ns.get(device, 0), engine.statistics().answer_tokens if engine is not None else 0

    def statistics(self) -> dict[str, float]:
        return {
            f"{device}_{name}": float(value)
            for device, engine in self._engines.items()
            for name, value in msgspec.structs.asdict(engine.statistics()).items()
        }

    def check_integrity(self) -> None:
        for engine in self._engines.values():
            engine.check_integrity()


def is_prefill(task: Task) -> bool:
    return task.step.node.op.parts[task.op_part].name == "prefill"
