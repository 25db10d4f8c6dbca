"""One end of the socketpair between the daemon and a device host, on a running loop.

Owns the socket, and the file descriptors that arrived until they are taken. Frames go out in order; what the socket does not take at once
is kept and sent when it can be. Used from the loop's thread only. Promises nothing about delivery once the other end is gone: `on_close`
is called once, with the reason.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from hexrt.errors import BadRequest, InvariantViolation
from hexrt.memory.rights import CLOEXEC, TRUNCATED, received_fds
from hexrt.protocol.framing import HEADER, FrameSplitter

SOCKET_BYTES = 1 << 20
READ_BYTES = 1 << 16
"""At first. A read that fills it is followed by one of SOCKET_BYTES; memory for that is dear (13 us), so it is not taken every time."""
INT_BYTES = 4
MAX_FDS = 253
"""The kernel's limit for one message."""


class Channel:
    __slots__ = (
        "_control_bytes", "_fds", "_loop", "_on_close", "_on_frames", "_read_bytes", "_socket", "_splitter", "_unsent",
        "closed",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        max_frame_bytes: int,
        on_frames: Callable[[list[bytes]], None],
        on_close: Callable[[str], None],
        takes_fds: bool = False,
    ) -> None:
        """Without `takes_fds` the kernel drops file descriptors that come in."""
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        self._loop = loop
        self._socket = sock
        self._splitter = FrameSplitter(max_frame_bytes)
        self._on_frames = on_frames
        self._on_close = on_close
        self._read_bytes = READ_BYTES
        self._control_bytes = socket.CMSG_SPACE(MAX_FDS * INT_BYTES) if takes_fds else 0
        self._fds: deque[int] = deque()
        # Bytes in the order of sending; the descriptors of a piece, our own duplicates, go with its first byte.
        self._unsent: deque[tuple[bytearray, list[int]]] = deque()
        self.closed = False
        loop.add_reader(sock.fileno(), self.read_nowait)

    @property
    def unsent_bytes(self) -> int:
        return sum(len(data) for data, _ in self._unsent)

    def take_fd(self) -> int:
        """The next file descriptor that came, now the caller's. Raises InvariantViolation where none is left."""
        if not self._fds:
            raise InvariantViolation("a message came without its file descriptor")
        return self._fds.popleft()

    def read_nowait(self) -> None:
        """Hands on the frames that have arrived; returns at once when there are none."""
        if self.closed:
            return
        try:
            data = self._receive_with_fds() if self._control_bytes else self._socket.recv(self._read_bytes)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(f"read failed: {error.strerror}")
            return
        if not data:
            self.close("the other end is gone")
            return
        self._read_bytes = READ_BYTES if len(data) < READ_BYTES else SOCKET_BYTES
        try:
            frames = list(self._splitter.feed(data))
        except BadRequest as error:
            self.close(str(error))
            return
        if frames:
            self._on_frames(frames)

    def _receive_with_fds(self) -> bytes:
        data, control, flags, _ = self._socket.recvmsg(self._read_bytes, self._control_bytes, CLOEXEC)
        if control:
            self._fds.extend(received_fds(control))
        if flags & TRUNCATED:
            raise OSError(0, "file descriptors were cut off: too many are open")
        return data

    def send(self, body: bytes, fds: Sequence[int] = ()) -> None:
        """Sends one frame, now as far as the socket takes it. Does nothing on a closed channel. `fds` arrive with it and stay the caller's."""
        if self.closed:
            return
        data = HEADER.pack(len(body)) + body
        if self._unsent:
            self._keep(data, fds)
            return
        try:
            sent = socket.send_fds(self._socket, [data], list(fds)) if fds else self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self.close(f"write failed: {error.strerror}")
            return
        if sent < len(data):
            self._keep(memoryview(data)[sent:], fds if not sent else ())
            self._loop.add_writer(self._socket.fileno(), self._write_on)

    def _keep(self, data: bytes | memoryview, fds: Sequence[int]) -> None:
        if fds or not self._unsent:
            self._unsent.append((bytearray(data), [os.dup(fd) for fd in fds]))
        else:
            self._unsent[-1][0].extend(data)

    def _write_on(self) -> None:
        data, fds = self._unsent[0]
        try:
            sent = socket.send_fds(self._socket, [data], fds) if fds else self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(f"write failed: {error.strerror}")
            return
        close_all(fds)
        del data[:sent]
        if not data:
            self._unsent.popleft()
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
        close_all(self._fds)
        for _, kept in self._unsent:
            close_all(kept)
        self._on_close(reason)


def close_all(fds: deque[int] | list[int]) -> None:
    """Closes file descriptors and empties their list."""
    for fd in fds:
        os.close(fd)
    fds.clear()
