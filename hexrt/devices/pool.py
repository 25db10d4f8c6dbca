"""A worker of the CPU process pool: runs plain bodies one after the other, on the loop's own thread.

Owns the queue of what the daemon sent ahead. While a body runs nothing is read, so the daemon stops a running body by killing this
process; what is only queued is withdrawn by message, which is looked for between tasks at most once a millisecond.
"""

from __future__ import annotations

from collections import deque
from time import monotonic_ns
from typing import Any

import msgspec

from hexrt.devices.body import Bodies, describe
from hexrt.devices.host import HostProgram
from hexrt.devices.tensors import Output
from hexrt.errors import ErrorRecord
from hexrt.ops.registry import load_ops
from hexrt.protocol.host import Cancel, HostFailed, HostFinished, HostStarted, Launch, ToHost, Withdraw

POLL_NS = 1_000_000
FLUSH_NS = 500_000
NOT_BEGUN = ErrorRecord("dropped", "not begun")


class PoolProgram(HostProgram):
    def start(self) -> dict[str, Any]:
        self._bodies = Bodies(load_ops()[0], self.hello, self.hello.settings["max_output_bytes"], self.places)
        self._queue: deque[Launch] = deque()
        self._wanted: set[int] = set()  # commands whose output a queued Launch takes from here
        self._local: dict[int, Output] = {}
        self._broken: set[int] = set()  # commands whose local consumers are dropped
        self._running = False
        return {}

    def handle(self, message: ToHost) -> None:
        if isinstance(message, Launch):
            self._queue.append(message)
            for binding in message.bindings:
                if binding.local:
                    self._wanted.add(binding.local)
        elif isinstance(message, Withdraw | Cancel):
            self._withdraw(message.command, isinstance(message, Cancel))

    def _withdraw(self, command: int, tell: bool) -> None:
        for launch in self._queue:
            if launch.command == command:
                self._queue.remove(launch)
                self._broken.add(command)
                if tell:
                    now = monotonic_ns()
                    self.report(HostFailed(command, launch.attempt, now, now, NOT_BEGUN))
                return

    def frame_end(self) -> None:
        if not self._running:
            self._running = True
            try:
                self._run_queue()
            finally:
                self._running = False

    def _run_queue(self) -> None:
        queue, cell, report = self._queue, self.cell, self.report
        polled = flushed = monotonic_ns()
        while queue:
            launch = queue.popleft()
            command = launch.command
            start = monotonic_ns()
            if self._broken and any(b.local in self._broken for b in launch.bindings if b.local):
                self._broken.add(command)
                report(HostFailed(command, launch.attempt, start, start, NOT_BEGUN))
                continue
            if launch.report_start:
                report(HostStarted(command, launch.attempt, start))
                self.flush()
            cell[1] = cell[0] = command
            try:
                output = self._bodies.carry_out(launch, self._local)
            except BaseException as error:  # a body may raise anything, SystemExit too: border of a task
                end = monotonic_ns()
                self._broken.add(command)
                report(HostFailed(command, launch.attempt, start, end, describe(error)))
            else:
                end = monotonic_ns()
                if command in self._wanted:
                    self._local[command] = output
                report(HostFinished(command, launch.attempt, start, end, msgspec.Raw(output.raw), output.made))
            cell[0] = 0
            if end - flushed > FLUSH_NS:
                self.flush()
                flushed = end
            if end - polled > POLL_NS:
                self.poll()
                polled = end
        self._wanted.clear()
        self._local.clear()
        self._broken.clear()
        self.flush()
