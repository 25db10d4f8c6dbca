"""A running server on a real socket, and a client that may send anything."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from hexrt.protocol import messages as m
from hexrt.protocol.framing import FrameSplitter, frame
from hexrt.server.connection import ConnectionLimits
from hexrt.server.listen import bind
from hexrt.server.server import Server, ServerLimits
from tests.memory_backend import MemoryBackend

HELLO = m.ClientHello((m.VERSION,), "test")
TEST_S = 30.0  # a loop that waits in C does not hear the alarm of a test timeout
_decoder = msgspec.msgpack.Decoder(m.FromDaemon)


def limits(
    max_frame: int = 1 << 20,
    max_unsent: int = 1 << 20,
    in_flight: int = 256,
    clients: int = 64,
    half_frame_s: float = 30.0,
) -> ServerLimits:
    return ServerLimits(ConnectionLimits(max_frame, max_unsent, in_flight), clients, half_frame_s)


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test on the loop that the daemon uses."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        uvloop.run(asyncio.wait_for(test(*args, **kwargs), TEST_S))

    return run


@dataclass
class Serving:
    path: Path
    backend: MemoryBackend
    server: Server
    bugs: list[Exception]


@asynccontextmanager
async def serving(path: Path, with_limits: ServerLimits | None = None) -> AsyncIterator[Serving]:
    bugs: list[Exception] = []
    backend = MemoryBackend()
    server = Server(backend, with_limits or limits(), bugs.append)
    server.start(bind(path))
    try:
        yield Serving(path, backend, server, bugs)
    finally:
        await server.close()


def open_files() -> int:
    """Of this process: server and clients together."""
    return len(os.listdir("/proc/self/fd"))


def step(id: str = "a", op: str = "noop", **fields: Any) -> dict[str, Any]:
    return {"id": id, "op": op, **fields}


def workflow(*steps: dict[str, Any], name: str = "w") -> dict[str, Any]:
    return {"name": name, "steps": list(steps or (step(),))}


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class RawClient:
    """Sends bytes as they are given and reads messages one at a time. `fds` are the descriptors that came, to be closed here or by the test."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._splitter = FrameSplitter(1 << 30)
        self._read: list[m.FromDaemon] = []
        self.fds: list[int] = []

    async def send(self, *messages: Any) -> None:
        await self.send_bytes(b"".join(frame(msgspec.msgpack.encode(message)) for message in messages))

    async def send_bytes(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def send_with(self, message: Any, *fds: int) -> None:
        """One message in a `sendmsg` of its own, with descriptors, which stay the caller's."""
        data = frame(msgspec.msgpack.encode(message))
        sent = socket.send_fds(self.sock, [data], fds)
        await self.send_bytes(data[sent:])

    async def _receive(self) -> bytes:
        """Also what the loop's own `sock_recv` would throw away."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                data, fds, flags, _ = socket.recv_fds(self.sock, 1 << 16, 253, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                ready = loop.create_future()
                loop.add_reader(self.sock.fileno(), _settle, ready)
                try:
                    await ready
                finally:
                    loop.remove_reader(self.sock.fileno())
            else:
                self.fds += fds
                assert not flags & socket.MSG_CTRUNC
                return data

    async def next(self) -> m.FromDaemon | None:
        """The next message, None at the end of the connection."""
        while not self._read:
            try:
                data = await self._receive()
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._read.extend(_decoder.decode(body) for body in self._splitter.feed(data))
        return self._read.pop(0)

    async def ask(self, message: Any) -> m.FromDaemon | None:
        await self.send(message)
        return await self.next()

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


@asynccontextmanager
async def connected(path: Path, hello: bool = True) -> AsyncIterator[RawClient]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    client = RawClient(sock)
    try:
        await asyncio.get_running_loop().sock_connect(sock, str(path))
        if hello:
            assert isinstance(await client.ask(HELLO), m.Welcome)
        yield client
    finally:
        client.close()
