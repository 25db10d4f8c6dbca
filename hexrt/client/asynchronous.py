"""The asyncio face of the client.

Owns one connection. Used on the loop it was entered on, by any number of tasks. Does not connect again by
itself. What a slow reader of `watch` has not taken yet is kept in this process's memory.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from hexrt.client import calls
from hexrt.client.calls import Call, Outcome, Run
from hexrt.client.pipe import Pipe
from hexrt.core import Durability, RunId, RunState
from hexrt.errors import Disconnected, HexrtError, from_record
from hexrt.paths import client_socket
from hexrt.protocol import messages as m
from hexrt.workflow.model import Workflow

T = TypeVar("T")


class _Exchange:
    """An open request. `ended` says that no further answer will come."""

    __slots__ = ("ended", "inbox")

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[m.FromDaemon | HexrtError] = asyncio.Queue()
        self.ended = False

    async def next(self) -> m.FromDaemon:
        message = await self.inbox.get()
        if isinstance(message, HexrtError):
            self.ended = True
            raise message
        return message


class AsyncClient:
    """`async with AsyncClient() as client`: many calls may be open at once. A call that is cancelled is ended at the daemon too.

    An iterator that is left half way should be closed (`contextlib.aclosing`), or the daemon goes on sending until it is collected.
    """

    def __init__(self, socket_path: str | os.PathLike[str] | None = None, timeout_s: float = calls.HANDSHAKE_S) -> None:
        """Connects only when entered. `timeout_s` holds for the handshake."""
        self.path = Path(socket_path) if socket_path else client_socket(os.environ)
        self._timeout_s = timeout_s
        self._wire = calls.Wire()
        self._exchanges: dict[int, _Exchange] = {}
        self._pipe: Pipe | None = None
        self._gone: HexrtError | None = None

    async def __aenter__(self) -> Self:
        """Raises Disconnected, saying what to do."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._shake_hands(sock)
        except OSError as error:
            sock.close()
            calls.unreachable(self.path, error)
        except BaseException:
            sock.close()
            raise
        self._pipe = Pipe(asyncio.get_running_loop(), sock, self._on_data, self._on_end)
        return self

    async def _shake_hands(self, sock: socket.socket) -> None:
        """On the bare socket: a daemon that turns a client away has closed it, and a stream would not give its reason."""
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, os.fspath(self.path))
        with suppress(BrokenPipeError, ConnectionResetError):
            await loop.sock_sendall(sock, self._wire.hello())
        while data := await loop.sock_recv(sock, calls.READ_BYTES):
            for _, message in self._wire.answers(data):
                self._wire.welcome(message)
                return
        raise calls.broken()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Calls that are open raise Disconnected."""
        if self._pipe is not None:
            self._end(Disconnected("this connection to hexrtd is closed: make a new AsyncClient"))

    def _on_data(self, data: bytes, fds: tuple[int, ...]) -> None:
        try:
            for owner, message in self._wire.answers(data, fds):
                if owner is None and isinstance(message, m.Refused):
                    raise from_record(message.error)
                if owner is not None and owner in self._exchanges:
                    self._exchanges[owner].inbox.put_nowait(message)
        except HexrtError as error:
            self._end(error)

    def _on_end(self, error: OSError | None) -> None:
        self._end(calls.broken(error))

    def _end(self, gone: HexrtError) -> None:
        if self._gone is None:
            self._gone = gone
            for exchange in self._exchanges.values():
                exchange.inbox.put_nowait(gone)
        if self._pipe is not None:
            self._pipe.close()
        self._wire.close()

    @contextmanager
    def _exchange(self, call: Call[Any]) -> Iterator[_Exchange]:
        pipe = self._pipe
        if pipe is None or self._gone is not None:
            raise self._gone or Disconnected("this AsyncClient is not connected: use `async with`")
        number, data, fd = self._wire.request(call)
        self._exchanges[number] = exchange = _Exchange()
        pipe.send(data, fd)
        try:
            yield exchange
        finally:
            del self._exchanges[number]
            if not exchange.ended and self._gone is None:
                pipe.send(self._wire.request(calls.forget(number))[1])

    async def _sent(self) -> None:
        """Waits while the daemon takes no more; if it is gone, the answer says so better than the write."""
        if self._pipe is not None:
            await self._pipe.drain()

    async def _ask(self, call: Call[T]) -> T:
        with self._exchange(call) as exchange:
            await self._sent()
            message = await exchange.next()
            exchange.ended = True
            return call.convert(message)

    async def _iterate(self, call: Call[T]) -> AsyncIterator[T]:
        with self._exchange(call) as exchange:
            await self._sent()
            while not exchange.ended:
                message = await exchange.next()
                exchange.ended = isinstance(message, m.RunResult | m.Refused)
                yield call.convert(message)

    async def submit(self, workflow: Workflow, durability: Durability = Durability.SYNC) -> RunId:
        """Returns once the run is as durable as `durability` asks."""
        return await self._ask(calls.submit(workflow, durability))

    async def run(self, workflow: Workflow, durability: Durability = Durability.SYNC) -> Outcome:
        """Submits and waits for the end. A failed run is returned, not raised: see Outcome.check."""
        call = calls.run(workflow, durability)
        with self._exchange(call) as exchange:
            await self._sent()
            outcome = None
            while outcome is None:
                message = await exchange.next()
                exchange.ended = not isinstance(message, m.Accepted)
                outcome = call.convert(message)
            return outcome

    def follow(
        self, workflow: Workflow, durability: Durability = Durability.SYNC
    ) -> AsyncIterator[m.Accepted | m.Update | Outcome]:
        """Submits; yields Accepted, then what happens, and last the Outcome."""
        return self._iterate(calls.follow(workflow, durability))

    def watch(self, run: Run) -> AsyncIterator[m.Update | Outcome]:
        """What happened in the run as far as it is kept, then what happens, and last the Outcome without outputs."""
        return self._iterate(calls.watch(run))

    async def status(self, run: Run) -> m.RunStatus:
        return await self._ask(calls.status(run))

    async def list(self, state: RunState | None = None, limit: int = 100) -> tuple[m.RunSummary, ...]:
        """The newest runs that you may see."""
        return await self._ask(calls.list_runs(state, limit))

    async def result(self, run: Run, wait: bool = True) -> Outcome:
        """Without `wait`, raises BadRequest while the run goes on."""
        return await self._ask(calls.result(run, wait))

    async def cancel(self, run: Run, reason: str = "") -> None:
        """Returns once no work of the run goes on."""
        await self._ask(calls.cancel(run, reason))

    async def timeline(self, run: Run) -> m.RunTimeline:
        return await self._ask(calls.timeline(run))

    async def devices(self) -> tuple[m.DeviceStatus, ...]:
        return await self._ask(calls.devices())

    async def memory(self) -> m.MemoryReport:
        """The tiers of memory, what moves between them, and who holds the most; of others' runs only an admin is told."""
        return await self._ask(calls.memory())

    async def models(self) -> m.ModelList:
        """The models that LLM steps may name, where each is loaded, and what their weights take."""
        return await self._ask(calls.models())

    async def statistics(self) -> dict[str, float]:
        return await self._ask(calls.statistics())

    async def shutdown(self, drain: bool = True) -> None:
        """Asks the daemon to stop; with `drain`, once running steps have ended."""
        await self._ask(calls.shutdown(drain))
