"""File descriptors on their way over a Unix socket.

Owns nothing: what comes is the caller's to close. Light to import, for clients that pass none.
"""

from __future__ import annotations

import errno
import os
import socket
from array import array
from collections.abc import Iterable

CLOEXEC, TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)  # to reckon with an IntFlag takes 5 us
ANCILLARY_BYTES = socket.CMSG_LEN(4)
"""Room for one file descriptor; of more, all but the first are closed by the kernel, and the message is marked MSG_CTRUNC."""


def rights(fd: int) -> tuple[int, int, bytes]:
    """The ancillary data that sends `fd` along."""
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", (fd,)).tobytes()


def receive(sock: socket.socket, size: int) -> tuple[bytes, tuple[int, ...]]:
    """What came, and the file descriptor that came with it, if any, the caller's to close. Raises OSError, and where one was lost."""
    data, ancillary, flags, _ = sock.recvmsg(size, ANCILLARY_BYTES, CLOEXEC)
    if not ancillary and not flags & TRUNCATED:
        return data, ()
    fds = received_fds(ancillary)
    if flags & TRUNCATED:
        close_all(fds)
        raise OSError(errno.EMFILE, "a file descriptor was lost: this process may have no more files open")
    return data, fds


def received_fds(ancillary: Iterable[tuple[int, int, bytes]]) -> tuple[int, ...]:
    """What came as SCM_RIGHTS, the caller's to close."""
    fds = array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return tuple(fds)


def close_all(fds: Iterable[int]) -> None:
    """Those below 0 are none."""
    for fd in fds:
        if fd >= 0:
            os.close(fd)
