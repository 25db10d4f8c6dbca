"""The server: takes in clients on a listening socket and keeps one session for each.

Owns the sessions, the tasks of their requests and one timer. Used from the loop's thread only. After `close` no socket, file, task or
timer of it is left. What the requests mean is the backend's.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from msgspec.structs import replace

from hexrt.errors import Overloaded
from hexrt.protocol.framing import frame
from hexrt.protocol.messages import Refused
from hexrt.server.backend import Backend
from hexrt.server.connection import ConnectionLimits
from hexrt.server.identity import peer_of
from hexrt.server.listen import Listener
from hexrt.server.session import Session, Surroundings

log = logging.getLogger("hexrt.server")
ACCEPTED_A_TURN = 64
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
EXHAUSTED_PAUSE_S = 0.5
SWEEPS_A_LIMIT = 2
SEND_REST_S = 2.0  # how long, at the end, for what clients have not read yet


class ServerLimits(msgspec.Struct, frozen=True):
    """`half_frame_s`: how long a frame or a handshake may stay unfinished, and an answer unread by a client that ends or asks on."""

    connection: ConnectionLimits
    max_clients: int
    half_frame_s: float


class Server:
    """Serves from `start` to `close`. `on_bug` hears of errors that are neither a HexrtError nor the client's."""

    def __init__(
        self, backend: Backend, limits: ServerLimits, on_bug: Callable[[Exception], None] | None = None
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._on_bug = on_bug
        self._sessions: dict[Session, int] = {}  # -> sweeps without a handshake
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: Listener | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._accept_timer: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None

    @property
    def clients(self) -> int:
        return len(self._sessions)

    @property
    def open_requests(self) -> int:
        return sum(session.open_requests for session in self._sessions)

    @property
    def unsent_bytes(self) -> int:
        return sum(session.connection.unsent_bytes for session in self._sessions)

    def start(self, listener: Listener) -> None:
        """Takes clients from now on; called on the running loop. The listener is owned and closed by the server."""
        self._loop = asyncio.get_running_loop()
        self._surroundings = Surroundings(self._loop, self._backend, self._spawn, self._report_bug, self._forget)
        self._listener = listener
        self._loop.add_reader(listener.sock.fileno(), self._accept)

    def set_limits(self, limits: ServerLimits) -> None:
        """Holds from now on; the frame cap of a connected client stays what it was told."""
        self._limits = limits
        for session in self._sessions:
            told = session.connection.limits.max_frame_bytes
            session.connection.limits = replace(limits.connection, max_frame_bytes=told)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(ACCEPTED_A_TURN):
            try:
                sock, _address = self._listener.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                log.warning("cannot take in a client: %s", error.strerror)
                self._loop.remove_reader(self._listener.sock.fileno())
                self._accept_timer = self._loop.call_later(EXHAUSTED_PAUSE_S, self._accept_again)
                return
            self._take_in(sock)

    def _accept_again(self) -> None:
        self._accept_timer = None
        if self._listener is not None:
            self._loop.add_reader(self._listener.sock.fileno(), self._accept)

    def _take_in(self, sock: socket.socket) -> None:
        if len(self._sessions) >= self._limits.max_clients:
            error = Overloaded(
                f"{len(self._sessions)} clients are connected, as many as limits.max_clients allows: try again later"
            )
            _turn_away(sock, error)
            return
        try:
            peer = peer_of(sock)
        except OSError as error:
            log.warning("a client without an identity: %s", error.strerror)
            sock.close()
            return
        self._sessions[Session(sock, peer, self._limits.connection, self._surroundings)] = 0
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(self._limits.half_frame_s / SWEEPS_A_LIMIT, self._sweep)

    def _sweep(self) -> None:
        """Cuts off who leaves a frame, a handshake or an owed answer half way. Runs while there are clients."""
        for session in list(self._sessions):
            if session.is_stuck():
                session.connection.close("a frame stayed unfinished, or an answer unread, for too long")
            elif not session.greeted:
                self._sessions[session] += 1
                if self._sessions[session] > SWEEPS_A_LIMIT:
                    session.connection.close("no handshake came")
        self._sweep_timer = None
        if self._sessions:
            self._sweep_timer = self._loop.call_later(self._limits.half_frame_s / SWEEPS_A_LIMIT, self._sweep)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _report_bug(self, error: Exception) -> None:
        if self._on_bug is not None:
            self._on_bug(error)

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session, None)
        if not self._sessions and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    async def close(self) -> None:
        """Takes no more clients, refuses what is open, ends its tasks, and gives clients a moment to read the rest. May be called again."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.sock.fileno())
            self._listener.close()
            self._listener = None
        for timer in (self._sweep_timer, self._accept_timer):
            if timer is not None:
                timer.cancel()
        for session in list(self._sessions):
            session.end()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._sessions:
            self._emptied = self._loop.create_future()
            await asyncio.wait([self._emptied], timeout=SEND_REST_S)
        for session in list(self._sessions):
            session.connection.close("the daemon stops")


def _turn_away(sock: socket.socket, error: Overloaded) -> None:
    """One attempt to say why; a client that cannot even take that is closed all the same."""
    with sock:
        sock.setblocking(False)
        try:
            sock.send(frame(msgspec.msgpack.encode(Refused(None, error.record()))))
        except OSError as failure:
            log.debug("a client turned away was not told: %s", failure.strerror)
