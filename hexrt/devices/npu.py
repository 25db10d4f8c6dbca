"""The host of an NPU: bodies that run ONNX Runtime sessions, behind one bounded queue that one thread serves.

Owns the choice of the execution provider, the queue and the thread. Where no NPU is to be had the CPU provider serves the queue, and the
facts of Ready say so. A running body is cancelled through ONNX Runtime where it computes there; else it ends, and its result is dropped.
"""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic_ns
from typing import Any

import msgspec

from hexrt.devices.body import Bodies, describe
from hexrt.devices.host import HostProgram
from hexrt.devices.npu_provider import choose_provider
from hexrt.devices.onnx import Execution
from hexrt.devices.tensors import Output
from hexrt.errors import Cancelled, ErrorRecord, Overloaded, Unavailable
from hexrt.ops.registry import load_ops
from hexrt.protocol.host import (
    Cancel,
    Chunk,
    Copy,
    FromHost,
    HostFailed,
    HostFinished,
    HostStarted,
    Launch,
    LoadModel,
    ToHost,
    UnloadModel,
    Withdraw,
)

MAX_QUEUED = 256


class NpuProgram(HostProgram):
    def start(self) -> dict[str, Any]:
        settings = self.hello.settings
        self._target, facts = choose_provider(settings.get("npu", {}))
        self._bodies = Bodies(load_ops()[0], self.hello, settings["max_output_bytes"], self.places)
        self._changed = threading.Condition()  # guards what follows, down to the thread
        self._queue: deque[Launch] = deque()
        self._arrived: list[
            Launch
        ] = []  # of the frame that is being handled: a consumer may be in the same frame as its producer
        self._running: tuple[int, Execution] | None = None
        self._stopped = False
        self._wanted: set[int] = set()  # commands whose output a Launch takes from here
        self._local: dict[int, Output] = {}
        self._broken: set[int] = set()  # commands whose local consumers are dropped
        self._thread = threading.Thread(target=self._serve, name="npu", daemon=True)
        self._thread.start()
        return facts

    def handle(self, message: ToHost) -> None:
        if isinstance(message, Launch):
            self._arrived.append(message)
        elif isinstance(message, Withdraw):
            self._take_out(message.command)
        elif isinstance(message, Cancel):
            self._cancel(message.command)
        elif isinstance(message, Chunk | Copy | LoadModel | UnloadModel):
            self._refuse(message.command, 0, Unavailable("this device runs no language models").record())

    def frame_end(self) -> None:
        arrived, self._arrived = self._arrived, []
        with self._changed:
            for launch in arrived:
                if len(self._queue) < MAX_QUEUED:
                    self._queue.append(launch)
                    self._wanted.update(binding.local for binding in launch.bindings if binding.local)
                else:
                    self._broken.add(launch.command)
                    full = Overloaded(f"the device's queue holds {MAX_QUEUED} tasks: try again later")
                    self._refuse(launch.command, launch.attempt, full.record())
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._queue.clear()
            if self._running is not None:
                self._running[1].cancel()
            self._changed.notify()

    def _refuse(self, command: int, attempt: int, error: ErrorRecord) -> None:
        now = monotonic_ns()
        self.report(HostFailed(command, attempt, now, now, error))

    def _take_out(self, command: int) -> Launch | None:
        """Forgets a launch that has not begun. None where it has."""
        with self._changed:
            for queue in (self._queue, self._arrived):
                for launch in queue:
                    if launch.command == command:
                        queue.remove(launch)
                        self._broken.add(command)
                        return launch
        return None

    def _cancel(self, command: int) -> None:
        launch = self._take_out(command)
        if launch is not None:
            self._refuse(command, launch.attempt, Cancelled("cancelled before it began").record())
            return
        with self._changed:
            if self._running is not None and self._running[0] == command:
                self._running[1].cancel()

    # --- on the thread ------------------------------------------------------------------------------------------

    def _next(self) -> tuple[Launch, Execution] | None:
        """Waits for work. None once the host stops."""
        with self._changed:
            self._running = None
            self.cell[0] = 0
            while True:
                while self._queue:
                    launch = self._queue.popleft()
                    if self._broken and any(b.local in self._broken for b in launch.bindings if b.local):
                        self._broken.add(launch.command)
                        continue
                    execution = Execution(self._target)
                    self._running = launch.command, execution
                    self.cell[0] = launch.command
                    return launch, execution
                self._wanted.clear()
                self._local.clear()
                self._broken.clear()
                if self._stopped:
                    return None
                self._changed.wait()

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            report = self._run(*work)
            if not self._stopped:
                self.loop.call_soon_threadsafe(self.report, report)

    def _run(self, launch: Launch, execution: Execution) -> FromHost:
        command, attempt = launch.command, launch.attempt
        start = monotonic_ns()
        if launch.report_start:
            self.loop.call_soon_threadsafe(self.report, HostStarted(command, attempt, start))
        try:
            with execution:
                output = self._bodies.carry_out(launch, self._local)
        except BaseException as error:  # a body may raise anything: border of a task
            failure = describe(error)
        else:
            if not execution.cancelled:
                with self._changed:
                    if command in self._wanted:
                        self._local[command] = output
                return HostFinished(command, attempt, start, monotonic_ns(), msgspec.Raw(output.raw), output.made)
        if execution.cancelled:  # whatever the body made of it
            failure = Cancelled("cancelled while it ran").record()
        with self._changed:
            self._broken.add(command)
        return HostFailed(command, attempt, start, monotonic_ns(), failure)
