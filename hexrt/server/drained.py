"""Says when the other end of a Unix stream socket has read, though the socket would have taken more all the while.

Owns an epoll of its own. Used from the loop's thread only, and closed before the socket. An event may come without a cause.
"""

from __future__ import annotations

import asyncio
import fcntl
import select
import socket
import struct
import termios
from collections.abc import Callable


def unread_bytes(sock: socket.socket) -> int:
    """0 once the other end has read all that was sent; the kernel's own overhead counts."""
    size: int = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0]
    return size


class Drained:
    """Calls back each time the other end has taken something, while it is open. The edges that a loop's own epoll does not show."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, on_read: Callable[[], None]) -> None:
        self._loop = loop
        self._on_read = on_read
        self._epoll = select.epoll()
        self._epoll.register(sock.fileno(), select.EPOLLOUT | select.EPOLLET)
        loop.add_reader(self._epoll.fileno(), self._taken)

    def _taken(self) -> None:
        self._epoll.poll(0)
        self._on_read()

    def close(self) -> None:
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
