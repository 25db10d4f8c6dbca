"""A real NPU host process, spoken to as the daemon speaks to it."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from hexrt.devices.host import CELL_BYTES
from hexrt.protocol.framing import FrameSplitter, frame
from hexrt.protocol.host import VERSION, FromHost, Hello, Ready, ToHost
from tests.bodies import MAX_OUTPUT_BYTES, MODELS, ROOT

EPOCH = 5


class NpuHost:
    """Use as a context manager; leaving it closes the socket and waits until the process is gone."""

    def __init__(self, state: Path, **npu: Any) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(100)
        cell = os.memfd_create("cell")
        os.ftruncate(cell, CELL_BYTES)
        self.cell = memoryview(mmap.mmap(cell, CELL_BYTES)).cast("Q")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hexrt.devices.host", "npu", str(theirs.fileno()), str(cell), str(os.getpid())],
            pass_fds=(theirs.fileno(), cell),
            cwd=ROOT,
        )
        theirs.close()
        os.close(cell)
        self._splitter = FrameSplitter(1 << 30)
        self._decoder = msgspec.msgpack.Decoder(tuple[int, list[FromHost]])
        self._reports = self._read()
        settings = {"max_output_bytes": MAX_OUTPUT_BYTES, "ops": {}, "npu": npu}
        self.send(Hello(VERSION, EPOCH, "npu:0", str(state), str(MODELS), settings))
        ready = self.next()
        assert isinstance(ready, Ready)
        self.ready = ready

    def send(self, *messages: ToHost) -> None:
        """All in one frame."""
        self._socket.sendall(frame(msgspec.msgpack.encode(messages)))

    def _read(self) -> Iterator[FromHost]:
        while data := self._socket.recv(1 << 20):
            for body in self._splitter.feed(data):
                epoch, reports = self._decoder.decode(body)
                assert epoch == EPOCH
                yield from reports

    def next(self) -> FromHost:
        """The next report; waits for it."""
        return next(self._reports)

    def __enter__(self) -> NpuHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
