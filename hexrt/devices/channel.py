"""One end of the socketpair between the daemon and a device host, on a running loop.

Owns the socket. Frames go out in order; what the socket does not take at once is kept and sent when it can be. Used from the loop's
thread only. Promises nothing about delivery once the other end is gone: `on_close` is called once, with the reason.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from hexrt.errors import BadRequest
from hexrt.protocol.framing import HEADER, FrameSplitter

READ_BYTES = 1 << 20


class Channel:
    __slots__ = ("_loop", "_on_close", "_on_frames", "_socket", "_splitter", "_unsent", "closed")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        max_frame_bytes: int,
        on_frames: Callable[[list[bytes]], None],
        on_close: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, READ_BYTES)
        self._loop = loop
        self._socket = sock
        self._splitter = FrameSplitter(max_frame_bytes)
        self._on_frames = on_frames
        self._on_close = on_close
        self._unsent = bytearray()
        self.closed = False
        loop.add_reader(sock.fileno(), self.read_nowait)

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent)

    def read_nowait(self) -> None:
        """Hands on the frames that have arrived; returns at once when there are none."""
        if self.closed:
            return
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(f"read failed: {error.strerror}")
            return
        if not data:
            self.close("the other end is gone")
            return
        try:
            frames = list(self._splitter.feed(data))
        except BadRequest as error:
            self.close(str(error))
            return
        if frames:
            self._on_frames(frames)

    def send(self, body: bytes) -> None:
        """Sends one frame, now as far as the socket takes it. Does nothing on a closed channel."""
        if self.closed:
            return
        data = HEADER.pack(len(body)) + body
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self.close(f"write failed: {error.strerror}")
            return
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._loop.add_writer(self._socket.fileno(), self._write_on)

    def _write_on(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(f"write failed: {error.strerror}")
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._socket.fileno())

    def close(self, reason: str) -> None:
        if self.closed:
            return
        self.closed = True
        fd = self._socket.fileno()
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)
        self._socket.close()
        self._on_close(reason)
