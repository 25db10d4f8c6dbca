"""The `io` device: network waits as asyncio tasks in the daemon's own loop, spoken to like a host.

Owns the tasks it starts. A body that is run here must be `async def` and must not compute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import Any

import msgspec

from hexrt.devices.body import Bodies, describe
from hexrt.errors import ErrorRecord
from hexrt.protocol.host import Cancel, FromHost, HostFailed, HostFinished, HostStarted, Launch, Withdraw


class IoDevice:
    def __init__(self, bodies: Bodies, on_report: Callable[[FromHost], None]) -> None:
        self._bodies = bodies
        self._report = on_report
        self._tasks: dict[int, asyncio.Task[FromHost]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[Launch | Cancel | Withdraw])

    def send(self, messages: list[Any]) -> None:
        for message in self._decoder.decode(self._encoder.encode(messages)):
            if isinstance(message, Launch):
                start = monotonic_ns()
                task = asyncio.get_running_loop().create_task(self._run(message, start))
                self._tasks[message.command] = task
                task.add_done_callback(partial(self._ended, message, start))
                self._report(HostStarted(message.command, message.attempt, start))
            else:
                running = self._tasks.get(message.command)
                if running is not None:
                    running.cancel()

    async def _run(self, launch: Launch, start_ns: int) -> FromHost:
        try:
            given = self._bodies.given(launch)
            run, context, params, inputs = self._bodies.prepare(launch, given=given)
            output = self._bodies.encode(await run(context, params, inputs), given)
        except Exception as error:  # border of a task
            return HostFailed(launch.command, launch.attempt, start_ns, monotonic_ns(), describe(error))
        return HostFinished(
            launch.command, launch.attempt, start_ns, monotonic_ns(), msgspec.Raw(output.raw), output.made
        )

    def _ended(self, launch: Launch, start_ns: int, task: asyncio.Task[FromHost]) -> None:
        del self._tasks[launch.command]
        if task.cancelled():
            error = ErrorRecord("cancelled", "cancelled while it ran")
            self._report(HostFailed(launch.command, launch.attempt, start_ns, monotonic_ns(), error))
        else:
            self._report(task.result())

    async def close(self) -> None:
        """Cancels what runs and waits until it has ended."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*list(self._tasks.values()), return_exceptions=True)
