"""The daemon's end of one real host process, spoken to by hand."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from hexrt.devices.host import CELL_BYTES
from hexrt.protocol.framing import FrameSplitter, frame
from hexrt.protocol.host import FromHost, ToHost
from tests.bodies import ROOT

EPOCH = 5
START = ("-m", "hexrt.devices.host")


class HostPeer:
    """Use as a context manager; leaving it closes the socket and waits until the process is gone."""

    def __init__(self, program: str, start: Sequence[str] = START, **popen: Any) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(100)
        cell = os.memfd_create("cell")
        os.ftruncate(cell, CELL_BYTES)
        self.cell = memoryview(mmap.mmap(cell, CELL_BYTES)).cast("Q")
        self.process = subprocess.Popen(
            [sys.executable, *start, program, str(theirs.fileno()), str(cell), str(os.getpid())],
            pass_fds=(theirs.fileno(), cell),
            cwd=ROOT,
            **popen,
        )
        theirs.close()
        os.close(cell)
        self._splitter = FrameSplitter(1 << 30)
        self._decoder = msgspec.msgpack.Decoder(tuple[int, list[FromHost]])
        self._reports = self._read()

    def send(self, *messages: ToHost) -> None:
        """All in one frame."""
        self.socket.sendall(frame(msgspec.msgpack.encode(messages)))

    def _read(self) -> Iterator[FromHost]:
        while data := self.socket.recv(1 << 20):
            for body in self._splitter.feed(data):
                epoch, reports = self._decoder.decode(body)
                assert epoch == EPOCH
                yield from reports

    def next(self) -> FromHost:
        """The next report; waits for it."""
        return next(self._reports)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
