"""Who is at the other end of a connected Unix socket, as the kernel recorded it when they connected.

Owns no state. What it returns cannot be forged by the peer, and does not change when the peer later drops or gains rights.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from array import array

from hexrt.core import Peer

CREDENTIALS = struct.Struct("3i")
SO_PEERGROUPS = 59
SMALL_BYTES = 1024  # the most that socket.getsockopt gives


def peer_of(sock: socket.socket) -> Peer:
    """Raises OSError where the socket is not a connected Unix socket."""
    pid, uid, gid = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return Peer(uid, gid, _peer_groups(sock), pid)


def _peer_groups(sock: socket.socket) -> tuple[int, ...]:
    """The supplementary groups, of which a process may have 65,536."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, SMALL_BYTES)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        raw = _long_option(sock.fileno(), SO_PEERGROUPS)
    return tuple(array("I", raw))


def _long_option(fd: int, option: int) -> bytes:
    """A socket option of any length: the kernel puts the length it needs where it refuses a buffer as too short."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_uint32(0)
    content = ctypes.create_string_buffer(0)
    while libc.getsockopt(fd, socket.SOL_SOCKET, option, content, ctypes.byref(size)) != 0:
        code = ctypes.get_errno()
        if code != errno.ERANGE or size.value <= len(content):
            raise OSError(code, os.strerror(code))
        content = ctypes.create_string_buffer(size.value)
    return content.raw[: size.value]
