"""The program of a device host: `python -m hexrt.devices.host PROGRAM SOCKET_FD CELL_FD`.

Owns the process: it dies with the daemon (parent-death signal, and end of file on the socket). `HostProgram` is the port that every
device kind implements; its methods run on the loop's thread. Reports are collected and sent once a loop turn, or by `flush`.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import mmap
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import uvloop

from hexrt.devices.channel import Channel
from hexrt.devices.places import Places
from hexrt.errors import HexrtError, InvariantViolation
from hexrt.protocol.host import VERSION, FromHost, Hello, Map, Ping, Ready, Stats, ToHost, Unmap

PROGRAMS = {
    "pool": "hexrt.devices.pool:PoolProgram",
    "cpu": "hexrt.devices.cpu:CpuProgram",
    "npu": "hexrt.devices.npu:NpuProgram",
    "disk": "hexrt.devices.disk:DiskProgram",
}
ENVIRON = {"cpu": {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x10000"}}
"""Of a program's process, where the daemon's own says nothing else. glibc copies past the caches from this many bytes on; by itself it
does so from some hundred MiB on, and a page of 360 KiB is copied at 7.8 GB/s instead of 12.5 (2 cores, 16 MiB of L3)."""
PR_SET_PDEATHSIG = 1
CELL_BYTES = 4096


class HostProgram:
    """What a device kind does with its messages.

    `cell` is one u64 in memory shared with the daemon: the command that is running now, 0 for none. If the process dies, the daemon
    blames that command's task. In the pool the u64 after it is the newest command that was begun.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, hello: Hello, report: Callable[[FromHost], None], flush: Callable[[], None], poll: Callable[[], None], cell: memoryview) -> None:  # fmt: skip
        self.loop = loop
        self.hello = hello
        self.report = report  # loop thread only; others go through loop.call_soon_threadsafe
        self.flush = flush
        self.poll = poll  # takes in what has arrived, without waiting; may call `handle` and `frame_end`
        self.cell = cell
        self.places = Places()

    def start(self) -> dict[str, Any]:
        """Prepares the device; returns the facts of Ready."""
        return {}

    def handle(self, message: ToHost) -> None:
        """Takes one message; must not wait."""
        raise NotImplementedError

    def mapped(self, message: Map) -> None:
        """The daemon has mapped a place, which `places` has by now. Unmap is carried out without a word."""

    def frame_end(self) -> None:
        """All messages of what had arrived were handled."""

    def stop(self) -> None:
        """The daemon is gone or wants this host gone: let go of everything; the process exits afterwards."""


class Host:
    """The loop around one HostProgram."""

    def __init__(self, program: str, sock: socket.socket, cell: memoryview) -> None:
        self._loop = asyncio.get_running_loop()
        self._program_name = program
        self._program: HostProgram | None = None
        self._cell = cell
        self._decoder = msgspec.msgpack.Decoder(list[ToHost])
        self._encoder = msgspec.msgpack.Encoder()
        self._reports: list[FromHost] = []
        self._epoch = 0
        self._flush_due = False
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._channel = Channel(self._loop, sock, 1 << 30, self._on_frames, self._on_close, takes_fds=True)

    def _on_frames(self, frames: list[bytes]) -> None:
        for body in frames:
            for message in self._decoder.decode(body):
                if self._program is None:
                    self._begin(message)
                elif type(message) is Ping:
                    self.report(Stats({}))
                elif type(message) is Map:
                    self._program.places.map(message, self._channel.take_fd())
                    self._program.mapped(message)
                elif type(message) is Unmap:
                    self._program.places.unmap(message.place)
                else:
                    self._program.handle(message)
        if self._program is not None:
            self._program.frame_end()

    def _begin(self, hello: ToHost) -> None:
        if not isinstance(hello, Hello) or hello.version != VERSION:
            raise InvariantViolation(f"the daemon speaks another host protocol than {VERSION}")
        self._epoch = hello.host_epoch
        module, _, name = PROGRAMS[self._program_name].partition(":")
        make = getattr(importlib.import_module(module), name)
        self._program = make(self._loop, hello, self.report, self.flush, self._channel.read_nowait, self._cell)
        try:
            facts = self._program.start()
        except HexrtError as error:
            print(error, file=sys.stderr, flush=True)  # the daemon shows it as the reason why the device is not there
            os._exit(70)
        gc.collect()
        gc.freeze()
        self.report(Ready(VERSION, os.getpid(), facts))
        self.flush()

    def report(self, message: FromHost) -> None:
        self._reports.append(message)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self._flush_due = False
        if self._reports:
            reports, self._reports = self._reports, []
            self._channel.send(self._encoder.encode((self._epoch, reports)))

    def _on_close(self, reason: str) -> None:
        if self._program is not None:
            self._program.stop()
        if not self.ended.done():
            self.ended.set_result(reason)


def die_with_parent(parent: int) -> None:
    """Asks the kernel for SIGKILL when the thread that spawned this process ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _die_of_bug(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An error that nobody caught: the daemon is better served by a dead host, which it replaces and reports, than by a silent one."""
    error = context.get("exception")
    if error is not None:
        traceback.print_exception(error)
    print(f"{context.get('message')}: {error!r}", file=sys.stderr, flush=True)
    os._exit(70)


async def _serve(program: str, sock: socket.socket, cell: memoryview) -> None:
    asyncio.get_running_loop().set_exception_handler(_die_of_bug)
    await Host(program, sock, cell).ended


def main(arguments: list[str]) -> None:
    program, socket_fd, cell_fd, parent = arguments[0], int(arguments[1]), int(arguments[2]), int(arguments[3])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the daemon's to handle
    cell = memoryview(mmap.mmap(cell_fd, CELL_BYTES)).cast("Q")
    os.close(cell_fd)
    sock = socket.socket(fileno=socket_fd)
    uvloop.run(_serve(program, sock, cell))
    os._exit(0)  # threads that still compute have nobody left to report to


if __name__ == "__main__":
    main(sys.argv[1:])
