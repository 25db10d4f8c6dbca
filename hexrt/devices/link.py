"""The daemon's end of a host process: spawns it, talks to it, stops it.

Owns the process, its channel and the cell that says what it runs. One link is one life of a host, one host epoch; a new life is a new
link. Nothing is left behind by `close`: the process group is killed and reaped. Call from the loop's thread, which must be the main
thread (the parent-death signal follows the spawning thread).
"""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hexrt.devices.channel import Channel
from hexrt.devices.host import CELL_BYTES, ENVIRON
from hexrt.protocol.host import FromHost, Hello, Map, Unmap

MAX_FRAME_BYTES = 1 << 30
STDERR_TAIL = 4096


class HostLink:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        program: str,
        hello: Hello,
        on_reports: Callable[[HostLink, list[FromHost]], None],
        on_death: Callable[[HostLink, str], None],
        environ: dict[str, str],
    ) -> None:
        self.device = hello.device
        self.epoch = hello.host_epoch
        self.mapped: set[int] = set()
        """The places that this life of the host was told to map."""
        self._loop = loop
        self._on_reports = on_reports
        self._on_death = on_death
        self._decoder = msgspec.msgpack.Decoder(tuple[int, list[FromHost]])
        self._encoder = msgspec.msgpack.Encoder()
        self._stderr = bytearray()
        self._dead = False
        ours, theirs = socket.socketpair()
        cell_fd = os.memfd_create("hexrt-cell", os.MFD_CLOEXEC)
        try:
            os.ftruncate(cell_fd, CELL_BYTES)
            self._map = mmap.mmap(cell_fd, CELL_BYTES)
            self._cell = memoryview(self._map).cast("Q")
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hexrt.devices.host", program, str(theirs.fileno()), str(cell_fd), str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(), cell_fd), start_new_session=True, env=ENVIRON.get(program, {}) | environ,
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(cell_fd)
        assert self._process.stderr is not None
        self._stderr_fd = self._process.stderr.fileno()
        os.set_blocking(self._stderr_fd, False)
        loop.add_reader(self._stderr_fd, self._read_stderr)
        self.channel = Channel(loop, ours, MAX_FRAME_BYTES, self._on_frames, self._on_close)
        self.send([hello])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running_command(self) -> int:
        """The command whose body runs at this moment (0: none), as the host wrote it in shared memory."""
        return self._cell[0] if not self._dead else 0

    def send(self, messages: list[Any], fds: Sequence[int] = ()) -> None:
        """`fds`: one for each Map among the messages, in their order; they stay the caller's."""
        body = self._encoder.encode(messages)
        if len(body) <= MAX_FRAME_BYTES:
            self.channel.send(body, fds)
        else:
            for message in messages:
                self.channel.send(self._encoder.encode([message]), fds)
                fds = ()

    def map(self, place: int, fd: int, size: int, writable: bool = False, ring: bool = False) -> None:
        """Gives the host `size` bytes of a file as a place, before whatever is sent from now on."""
        self.send([Map(place, size, writable, ring)], (fd,))
        self.mapped.add(place)

    def unmap(self, place: int) -> None:
        self.send([Unmap(place)])
        self.mapped.discard(place)

    def _on_frames(self, frames: list[bytes]) -> None:
        for body in frames:
            try:
                epoch, reports = self._decoder.decode(body)
            except msgspec.MsgspecError as error:
                self.channel.close(f"sent what cannot be read: {error}")
                return
            if epoch == self.epoch:
                self._on_reports(self, reports)

    def _read_stderr(self) -> None:
        try:
            data = os.read(self._stderr_fd, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._stderr_fd)
            return
        self._stderr += data
        del self._stderr[:-STDERR_TAIL]

    def kill(self) -> None:
        """Ends the host and whatever it started, at once; `on_death` follows. Nothing for one that is dead, whose number may be another's now."""
        if self._dead:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _on_close(self, reason: str) -> None:
        if self._dead:
            return
        self._last_command, self._last_begun = self._cell[0], self._cell[1]
        self._reap()
        status = self._process.returncode
        how = signal.Signals(-status).name if status is not None and status < 0 else f"exit status {status}"
        said = self._stderr.decode(errors="replace").strip().splitlines()
        tail = f": {said[-1][:300]}" if said and status != -signal.SIGKILL else ""
        self._on_death(self, f"{how}{tail}")

    @property
    def last_command(self) -> int:
        """What a dead host was running when it died."""
        return self._last_command

    @property
    def last_begun(self) -> int:
        """The newest command that a dead host had begun. Only of the pool, whose workers begin commands in order of their numbers."""
        return self._last_begun

    def _reap(self) -> None:
        self.kill()
        self._dead = True
        self._process.wait()
        self._read_stderr()
        self._loop.remove_reader(self._stderr_fd)
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._cell.release()
        self._map.close()

    def close(self) -> None:
        """Ends the host without a call of `on_death`."""
        if not self._dead:
            self._reap()
            self.channel.close("closed")
