"""One client's socket: frames in, answers out.

Owns the socket and the bytes in both directions. Used from the loop's thread only. Answers go out once a loop turn in as few writes as
the socket takes. While a client does not read, answers to its requests are held back unencoded and it is not read from; a client that
lets what was pushed to it pile up above the cap is cut off. Promises nothing about delivery: `on_close` is called once, with the reason.

File descriptors: one may come with a frame's first byte, in a `sendmsg` that begins with that frame, and one may go with an answer. While
the client leaves MOST_UNREAD of them unread, further ones are not even made. Whatever is not taken or sent is closed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

import msgspec

from hexrt.errors import BadRequest
from hexrt.memory.rights import ANCILLARY_BYTES, CLOEXEC, TRUNCATED, close_all, received_fds, rights
from hexrt.protocol.framing import HEADER, FrameSplitter
from hexrt.protocol.messages import FromDaemon, Refused
from hexrt.server.drained import Drained, unread_bytes

READ_BYTES = 1 << 16
READ_ON_BYTES = 1 << 20  # in the middle of a large frame
STALLED_SWEEPS = 3
TOGETHER_S = 0.001
"""How long an answer waits for the one that is to follow it: a short run then wakes its client once."""

MOST_UNREAD = 16
"""File descriptors, and with them results' memory, that wait for one client to read them."""

_encoder = msgspec.msgpack.Encoder()


class Attached(msgspec.Struct, frozen=True, gc=False):
    """An answer that may bring a file descriptor. `make` is called when it is about to be encoded, never raises, and gives -1 for none."""

    make: Callable[[], tuple[FromDaemon, int]]


Answer = FromDaemon | Attached


class ConnectionLimits(msgspec.Struct, frozen=True):
    max_frame_bytes: int
    max_unsent_bytes: int
    max_in_flight: int = 256  # requests of one client that are not fully answered


class Connection:
    """Frame bodies are given to `on_frames`; `on_bad_frame` gets the error that made the stream unreadable."""

    __slots__ = (
        "_drained", "_fd", "_flush_due", "_flush_later", "_frames", "_held", "_loop", "_on_bad_frame", "_on_close", "_on_frames", "_passed",
        "_passing", "_paused", "_sent", "_socket", "_splitter", "_stalled", "_unfinished_fd", "_unsent", "_watched", "_writing", "closed",
        "ending", "limits",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        limits: ConnectionLimits,
        on_frames: Callable[[list[bytes]], None],
        on_bad_frame: Callable[[BadRequest], None],
        on_close: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        self.limits = limits
        self.closed = False
        self.ending = False  # nothing more is read; closed as soon as all is sent
        self._loop = loop
        self._socket = sock
        self._splitter = FrameSplitter(limits.max_frame_bytes)
        self._on_frames = on_frames
        self._on_bad_frame = on_bad_frame
        self._on_close = on_close
        self._unsent = bytearray()
        self._held: deque[tuple[Answer, Callable[[], object] | None]] = deque()
        self._fd = -1  # that came with the frame which is being handed on
        self._unfinished_fd = -1  # that came with the frame which is not whole yet
        self._passing: deque[tuple[int, int]] = deque()  # (bytes sent before it, file descriptor)
        self._passed = 0  # since the client had last read everything
        self._drained: Drained | None = None
        self._flush_due = False
        self._flush_later: asyncio.TimerHandle | None = None
        self._paused = False  # not read from
        self._writing = False  # waits until the socket takes more
        self._frames = 0  # seen
        self._sent = 0  # bytes
        self._watched = (0, 0)
        self._stalled = 0
        loop.add_reader(sock.fileno(), self._read)

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent)

    def _read(self) -> None:
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                READ_ON_BYTES if self._splitter.pending_bytes else READ_BYTES, ANCILLARY_BYTES, CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(f"read failed: {error.strerror}")
            return
        if not data:
            self.close("the client is gone")
            return
        broken = None
        fds: tuple[int, ...] = ()
        if ancillary or flags & TRUNCATED:
            fds = received_fds(ancillary)
            if flags & TRUNCATED or len(fds) > 1:
                close_all(fds)
                self._on_bad_frame(BadRequest("a message brings one file descriptor at most", "tensors"))
                return
        bodies: list[bytes] = []
        try:
            bodies.extend(self._splitter.feed(data))  # keeps those before a broken one
        except BadRequest as error:
            broken = error
        if fds or self._unfinished_fd >= 0:
            self._hand_on(bodies, fds)
        elif bodies:
            self._frames += len(bodies)
            self._on_frames(bodies)
        if broken is not None and not self.ending:
            self._on_bad_frame(broken)

    def _hand_on(self, bodies: list[bytes], fds: tuple[int, ...]) -> None:
        """A file descriptor belongs to the last frame that begins in what was read with it: no read goes on beyond its `sendmsg`."""
        brought = {}
        if self._unfinished_fd >= 0:
            brought[0], self._unfinished_fd = self._unfinished_fd, -1
        for fd in fds:
            owner = len(bodies) if self._splitter.pending_bytes or not bodies else len(bodies) - 1
            if owner in brought:
                close_all((fd, *brought.values()))
                self._on_bad_frame(BadRequest("a message brings one file descriptor at most", "tensors"))
                return
            brought[owner] = fd
        self._frames += len(bodies)
        for i, body in enumerate(bodies):
            self._fd = brought.pop(i, -1)
            self._on_frames([body])
            if self._fd >= 0:
                self.drop_fd()
                if not self.ending:
                    self._on_bad_frame(
                        BadRequest("a file descriptor came with a message that names no tensors", "tensors")
                    )
        if self.closed or self.ending:
            close_all(brought.values())
        elif brought:
            self._unfinished_fd = brought[len(bodies)]

    def take_fd(self) -> int:
        """What came with the frame that is being handed on, the caller's to close; -1 if nothing did."""
        fd, self._fd = self._fd, -1
        return fd

    def drop_fd(self) -> None:
        if self._fd >= 0:
            os.close(self.take_fd())

    def answer(self, message: Answer, then: Callable[[], object] | None = None, more_follows: bool = False) -> None:
        """Sends a message that some request waits for; `then` is called once it is encoded, perhaps later. Does nothing once it ends.

        With `more_follows` it may go out together with the next one, within TOGETHER_S.
        """
        if self.closed or self.ending:
            return
        if self._held or not self._can_take() or (isinstance(message, Attached) and not self._may_pass()):
            if not self.closed:
                self._held.append((message, then))
                self._pause()
            return
        self._append(message, more_follows)
        if then is not None:
            then()

    def push(self, message: FromDaemon) -> None:
        """Sends a message that nobody asked for just now. Never raises; a client that does not read is closed, a little later."""
        if self.closed or self.ending:
            return
        if self._can_take():
            self._append(message)
        elif not self.closed:
            self._abandon("the client does not read what it watches")

    def _append(self, message: Answer, more_follows: bool = False) -> None:
        fd = -1
        if isinstance(message, Attached):
            message, fd = message.make()
        at = len(self._unsent)
        self._unsent += b"\0\0\0\0"
        try:
            _encoder.encode_into(message, self._unsent, -1)
        except BaseException:
            del self._unsent[at:]
            close_all((fd,))
            raise
        size = len(self._unsent) - at - 4
        if size > self.limits.max_frame_bytes:
            del self._unsent[at + 4 :]
            close_all((fd,))
            fd = -1
            error = BadRequest(
                f"the answer has {size} bytes, more than the {self.limits.max_frame_bytes} of limits.max_frame_mib: return less, or raise it"
            )
            number = getattr(message, "request", None)
            _encoder.encode_into(Refused(number, error.record()), self._unsent, -1)
            size = len(self._unsent) - at - 4
        HEADER.pack_into(self._unsent, at, size)
        if fd >= 0:
            self._passing.append((self._sent + at, fd))
        if more_follows:
            if self._flush_later is None:
                self._flush_later = self._loop.call_later(TOGETHER_S, self._flush)
        elif not self._flush_due and not self._writing:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._flush_later is not None:
            self._flush_later.cancel()
            self._flush_later = None
        if not self._writing:
            self._write()

    def _can_take(self) -> bool:
        """Whether a further message may be encoded, once the socket has taken what it can."""
        if len(self._unsent) > self.limits.max_unsent_bytes and not self._writing:
            self._write()
        return not self.closed and len(self._unsent) <= self.limits.max_unsent_bytes

    def _write(self) -> None:
        if self.closed:
            return
        if self._unsent:
            try:
                while self._passing and self._send_passing():
                    pass
                if self._unsent and not self._passing:
                    sent = self._socket.send(self._unsent)
                    self._sent += sent
                    del self._unsent[:sent]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                self._abandon(f"write failed: {error.strerror}")
                return
        if self._unsent:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._socket.fileno(), self._write_on)
        elif self._writing:
            self._writing = False
            self._loop.remove_writer(self._socket.fileno())

    def _send_passing(self) -> bool:
        """Sends what comes before the next file descriptor, or else that with what follows. True where the socket took all of it."""
        at, fd = self._passing[0]
        before = at - self._sent
        end = before or (self._passing[1][0] - self._sent if len(self._passing) > 1 else len(self._unsent))
        with memoryview(self._unsent) as unsent, unsent[:end] as part:
            if before:
                sent = self._socket.send(part)
            else:
                sent = self._socket.sendmsg((part,), (rights(fd),))
        self._sent += sent
        del self._unsent[:sent]
        if not before:
            self._passing.popleft()
            self._passed += 1
            os.close(fd)
        return sent == end and bool(self._unsent)

    def _may_pass(self) -> bool:
        """Whether a further file descriptor may be sent; if not, what is held back goes on once the client has read what it has."""
        if len(self._passing) + self._passed < MOST_UNREAD:
            return True
        if not self._passing and not unread_bytes(self._socket):
            self._passed = 0
            return True
        if self._drained is None:
            self._drained = Drained(self._loop, self._socket, self._write_on)
        return False

    def _write_on(self) -> None:
        self._write()
        while self._held and not self.closed and len(self._unsent) <= self.limits.max_unsent_bytes:
            if isinstance(self._held[0][0], Attached) and not self._may_pass():
                break
            message, then = self._held.popleft()
            self._append(message)
            if then is not None:
                then()
        if self.closed or self._held:
            return
        self._close_drained()
        if self._paused and not self.ending:
            self._paused = False
            self._loop.add_reader(self._socket.fileno(), self._read)
        if self.ending and not self._unsent:
            self.close("ended")

    def _pause(self) -> None:
        if not self._paused and not self.ending:
            self._paused = True
            self._loop.remove_reader(self._socket.fileno())

    def end(self) -> None:
        """Reads no more, and closes when all answers so far are sent."""
        if self.ending or self.closed:
            return
        self._pause()
        self.ending = True
        if not self._writing:
            self._write()
        if not self.closed and not self._unsent and not self._held:
            self.close("ended")

    def is_stuck(self) -> bool:
        """Asked by a sweep, twice in a time limit: whether a frame stayed unfinished, or an answer untouched, for the limit or up to half as much again."""
        mark = (self._frames, self._sent)
        owing = bool(self._held) or (self.ending and bool(self._unsent))
        waiting = self._splitter.pending_bytes > 0 and not self._paused
        moved = mark[0] != self._watched[0] if waiting else mark[1] != self._watched[1]
        self._watched = mark
        self._stalled = self._stalled + 1 if (owing or waiting) and not moved else 0
        return self._stalled >= STALLED_SWEEPS

    def _abandon(self, reason: str) -> None:
        """Closes from within a call of somebody who may be looping over its watchers: they learn of it in the next turn."""
        self._shut()
        self._loop.call_soon(self._on_close, reason)

    def close(self, reason: str) -> None:
        """At once; what is unsent is lost. May be called again."""
        if not self.closed:
            self._shut()
            self._on_close(reason)

    def _shut(self) -> None:
        self.closed = True
        fd = self._socket.fileno()
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)
        self._close_drained()
        self._socket.close()
        self._unsent.clear()
        self._held.clear()
        close_all((self._fd, self._unfinished_fd, *(fd for _, fd in self._passing)))
        self._fd = self._unfinished_fd = -1
        self._passing.clear()

    def _close_drained(self) -> None:
        if self._drained is not None:
            self._drained.close()
            self._drained = None
