"""One connected Unix socket on a running loop that file descriptors can cross, which asyncio's streams cannot take.

Owns the socket, and the descriptors that are not sent yet. Used from the loop's thread only.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from hexrt.memory.rights import close_all, receive, rights

READ_BYTES = 1 << 16
MANY_BYTES = 1 << 16
"""Unsent, at which `drain` waits."""


class Pipe:
    """`on_data` is given what came, and the descriptors that came with it, which it closes; `on_end` the reason why nothing more will come."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_data: Callable[[bytes, tuple[int, ...]], None],
        on_end: Callable[[OSError | None], None],
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._on_data = on_data
        self._on_end = on_end
        self._unsent: deque[tuple[memoryview, int]] = deque()  # a descriptor, or -1, goes with the first byte
        self._unsent_bytes = 0
        self._waiting: list[asyncio.Future[None]] = []
        self.closed = False
        loop.add_reader(sock.fileno(), self._read)

    def _read(self) -> None:
        try:
            data, fds = receive(self._socket, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        if data:
            self._on_data(data, fds)
        else:
            self._end(None)

    def send(self, data: bytes, fd: int = -1) -> None:
        """Now as far as the socket takes it. `fd` is closed once it is sent, or cannot be."""
        if self.closed:
            close_all((fd,))
            return
        self._unsent.append((memoryview(data), fd))
        self._unsent_bytes += len(data)
        if len(self._unsent) == 1:
            self._write()
            if self._unsent:
                self._loop.add_writer(self._socket.fileno(), self._write_on)

    def _write(self) -> None:
        try:
            while self._unsent:
                data, fd = self._unsent[0]
                sent = self._socket.sendmsg((data,), (rights(fd),)) if fd >= 0 else self._socket.send(data)
                close_all((fd,))
                self._unsent_bytes -= sent
                self._unsent[0] = (data[sent:], -1)
                if sent == len(data):
                    self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:  # the daemon is gone: what it had sent before says why, and is still to be read
            self._drop_unsent()

    def _write_on(self) -> None:
        self._write()
        if not self._unsent:
            self._loop.remove_writer(self._socket.fileno())
        if self._unsent_bytes < MANY_BYTES:
            self._wake()

    async def drain(self) -> None:
        """Waits while the daemon takes no more."""
        if self._unsent_bytes >= MANY_BYTES:
            done = self._loop.create_future()
            self._waiting.append(done)
            await done

    def _wake(self) -> None:
        for each in self._waiting:
            if not each.done():
                each.set_result(None)
        self._waiting.clear()

    def _drop_unsent(self) -> None:
        close_all(fd for _, fd in self._unsent)
        self._unsent.clear()
        self._unsent_bytes = 0
        self._wake()

    def _end(self, error: OSError | None) -> None:
        self.close()
        self._on_end(error)

    def close(self) -> None:
        """At once; what is unsent is lost. May be called again."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._drop_unsent()
