"""The listening socket: bound under a lock on its path, or handed over by the service manager.

Owns the socket file and its lock file, and removes both at `close`. At most one daemon holds a path; what a dead one left behind is
cleared away. Used by the daemon's start and end only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from hexrt.errors import BadRequest, Unavailable

MAX_PATH_BYTES = 107  # what sockaddr_un holds
BACKLOG = 512
FIRST_INHERITED_FD = 3


class Listener:
    """A listening socket that does not block. `path` is None where it was handed over: then nothing is removed at the end."""

    __slots__ = ("sock", "path", "_inode", "_lock")

    def __init__(self, sock: socket.socket, path: Path | None = None, lock: _Lock | None = None) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.path = path
        self._inode = os.lstat(path).st_ino if path is not None else 0
        self._lock = lock

    def close(self) -> None:
        """May be called again."""
        self.sock.close()
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.lstat(self.path).st_ino == self._inode:
                    os.unlink(self.path)
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class _Lock:
    """An flock on a file beside the socket; the file goes away with the lock."""

    __slots__ = ("_fd", "_path")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = self._acquire()
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())

    def _acquire(self) -> int:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_ino == os.stat(self._path).st_ino:
                    return fd  # else the holder before us has just removed this very file: take the lock on a new one
            except BlockingIOError:
                holder = os.read(fd, 32).decode("ascii", "replace").strip()
                os.close(fd)
                raise Unavailable(
                    f"another hexrtd{f' (pid {holder})' if holder else ''} serves this socket: stop it, or give --socket another path",
                    "daemon.socket",
                ) from None
            except FileNotFoundError:
                os.close(fd)
                continue
            os.close(fd)

    def release(self) -> None:
        os.unlink(self._path)
        os.close(self._fd)


def bind(path: Path) -> Listener:
    """Listens on `path`, mode 0660; its directory is made (0700) where it is missing. Raises BadRequest or Unavailable, saying what to do."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise BadRequest(
            f"the path is longer than the {MAX_PATH_BYTES} bytes a socket may have: choose a shorter one",
            "daemon.socket",
        )
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
        lock = _Lock(path.with_name(path.name + ".lock"))
    except OSError as error:
        raise Unavailable(
            f"cannot make the socket {path}: {error.strerror}; choose another --socket", "daemon.socket"
        ) from error
    try:
        _clear(path)
        sock = _bound(path)
    except OSError as error:
        lock.release()
        raise Unavailable(
            f"cannot make the socket {path}: {error.strerror}; choose another --socket", "daemon.socket"
        ) from error
    except BaseException:
        lock.release()
        raise
    return Listener(sock, path, lock)


def _clear(path: Path) -> None:
    """Removes the socket of a daemon that died. Called with the lock held."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise BadRequest(f"{path} exists and is no socket: move it away, or choose another --socket", "daemon.socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        code = probe.connect_ex(os.fspath(path))
    if code in (0, errno.EAGAIN):
        raise Unavailable(
            "another program listens on this socket: stop it, or give --socket another path", "daemon.socket"
        )
    os.unlink(path)


def _bound(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(
            sock.fileno(), 0o660
        )  # the file gets this mode less the umask: never, not even for a moment, a wider one
        sock.bind(os.fspath(path))
        os.chmod(path, 0o660)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def inherited(environ: Mapping[str, str]) -> Listener | None:
    """The socket that the service manager listens on for us (LISTEN_PID, LISTEN_FDS), None where there is none.

    Nothing is bound, locked or removed then. Raises BadRequest where what was handed over is not one listening Unix stream socket.
    """
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    if environ.get("LISTEN_FDS") != "1":
        raise BadRequest(
            f"one socket is expected from the service manager, not {environ.get('LISTEN_FDS')!r}", "LISTEN_FDS"
        )
    return from_fd(FIRST_INHERITED_FD)


def from_fd(fd: int) -> Listener:
    """A listener on a descriptor that this process was given; owned from now on where it is a socket."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise BadRequest(f"descriptor {fd} is no socket: {error.strerror}", "LISTEN_FDS") from error
    listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM or not listening:
        sock.close()
        raise BadRequest(f"descriptor {fd} is not a listening Unix stream socket", "LISTEN_FDS")
    sock.set_inheritable(False)
    return Listener(sock)
