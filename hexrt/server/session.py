"""One client's conversation: the handshake, then requests, each answered under its number while others go on.

Owns which of the client's requests are open. The connection's border: whatever a backend raises becomes an answer here. A client that
goes away ends its watches and waits; its submits, cancels and shutdowns are carried through, and its runs go on.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

import hexrt
from hexrt.core import Peer, RunId
from hexrt.errors import BadRequest, Disconnected, HexrtError, InvariantViolation, Overloaded
from hexrt.memory.passed import ClientMemory, Export, client_memory
from hexrt.protocol import messages as m
from hexrt.server.backend import Backend
from hexrt.server.connection import Attached, Connection, ConnectionLimits
from hexrt.server.eager import begin
from hexrt.server.refusals import UNREADABLE, bad_frame, request_number

log = logging.getLogger("hexrt.server")
T = TypeVar("T")
_decoder = msgspec.msgpack.Decoder(m.FromClient)


class Surroundings(msgspec.Struct, frozen=True):
    """What a session is given by its server. `spawn` runs a task that outlives the session if need be; `on_bug` hears of errors of ours."""

    loop: asyncio.AbstractEventLoop
    backend: Backend
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    on_bug: Callable[[Exception], None]
    on_close: Callable[[Session], None]


def _nothing() -> None:
    """How to stop a request that is carried through."""


class Session:
    """Begins to read at once. `close` ends it; the server's `on_close` is told once."""

    __slots__ = ("connection", "greeted", "peer", "_backend", "_open", "_surroundings")

    def __init__(self, sock: socket.socket, peer: Peer, limits: ConnectionLimits, surroundings: Surroundings) -> None:
        self.peer = peer
        self.greeted = False
        self._surroundings = surroundings
        self._backend = surroundings.backend
        self._open: dict[int, Callable[[], object]] = {}  # request number -> how to stop it
        self.connection = Connection(surroundings.loop, sock, limits, self._on_frames, self._end_with, self._on_close)

    @property
    def open_requests(self) -> int:
        return len(self._open)

    # --- what comes in ------------------------------------------------------------------------------------------

    def _on_frames(self, bodies: list[bytes]) -> None:
        for body in bodies:
            if self.connection.ending or self.connection.closed:
                return
            try:
                message = _decoder.decode(body)
            except UNREADABLE as error:
                self._on_undecodable(body, bad_frame(error))
                continue
            if self.greeted and not isinstance(message, m.ClientHello):
                self._take(message)
            else:
                self._greet(message)

    def _on_undecodable(self, body: bytes, error: BadRequest) -> None:
        self.connection.drop_fd()
        number = request_number(body) if self.greeted else None
        if number is None or number in self._open:
            self._end_with(error)
        else:
            self._refuse(number, error)

    def _greet(self, hello: m.FromClient) -> None:
        if not isinstance(hello, m.ClientHello) or self.greeted:
            self._end_with(BadRequest("the first message, and only that, must be a hello", "type"))
        elif m.VERSION not in hello.versions:
            spoken = ", ".join(map(str, hello.versions[:10])) or "none"
            self._end_with(
                BadRequest(
                    f"hexrtd {hexrt.__version__} speaks protocol version {m.VERSION}, the client {spoken}: install the same hexrt for both",
                    "versions",
                )
            )
        else:
            self.greeted = True
            limits = self.connection.limits
            self.connection.answer(m.Welcome(m.VERSION, hexrt.__version__, limits.max_frame_bytes))

    def _take(self, request: m.Request) -> None:
        number = request.request
        if number in self._open:
            self._end_with(BadRequest(f"request number {number} is in use: each open request needs its own", "request"))
            return
        if len(self._open) >= self.connection.limits.max_in_flight and not isinstance(request, m.Forget):
            text = f"{len(self._open)} requests of this connection are open: wait for some to be answered"
            self._refuse(number, Overloaded(text))
            return
        try:
            _HANDLERS[type(request)](self, request)
        except Exception as error:
            self._fail(number, error)

    # --- requests -----------------------------------------------------------------------------------------------

    def _submit(self, request: m.Submit) -> None:
        work: Coroutine[Any, Any, RunId]
        if request.tensors:
            work = self._submit_with(request, self._memory(request.tensors))
        else:
            work = self._backend.submit(self.peer, request.workflow, request.durability, request.follow == "result")
        self._carry_through(request.request, work, partial(self._accepted, request.request, request.follow))

    def _memory(self, tensors: tuple[m.Tensor, ...]) -> ClientMemory:
        fd = self.connection.take_fd()
        if fd < 0:
            raise BadRequest("no file descriptor came with the message that names them", "tensors")
        return client_memory(fd, tensors)

    async def _submit_with(self, request: m.Submit, memory: ClientMemory) -> RunId:
        try:
            awaits_end = request.follow == "result"
            return await self._backend.submit(self.peer, request.workflow, request.durability, awaits_end, memory)
        finally:
            memory.close()

    def _accepted(self, number: int, follow: str, run: RunId) -> None:
        if follow == "none":
            self._answer(m.Accepted(number, run))
            return
        self.connection.answer(m.Accepted(number, run), more_follows=follow == "result")
        if follow == "result":
            self._open[number] = _nothing
            stop = self._backend.when_ended(self.peer, run, partial(self._ended, number))
            if number in self._open:
                self._open[number] = stop
        else:
            self._follow(number, run, self._result_after_events)

    def _ended(self, number: int, result: m.RunResult | Export) -> None:
        if number in self._open:
            self._reply(number, result)

    def _result_after_events(self, number: int, last: m.RunResult) -> None:
        if number in self._open:
            self._open[number] = _nothing
            self._surroundings.loop.call_soon(self._fetch_result, number, RunId(last.run))

    def _fetch_result(self, number: int, run: RunId) -> None:
        if number in self._open:
            try:
                self._wait(number, self._backend.result(self.peer, run, True))
            except Exception as error:
                self._fail(number, error)

    def _watch(self, request: m.Watch) -> None:
        self._follow(request.request, RunId(request.run), self._watched_to_the_end)

    def _watched_to_the_end(self, number: int, last: m.RunResult) -> None:
        self._answer(replace(last, request=number))

    def _follow(self, number: int, run: RunId, at_end: Callable[[int, m.RunResult], None]) -> None:
        self._open[number] = _nothing
        stop = self._backend.watch(self.peer, run, partial(self._push, number, at_end))
        if self._open.get(number) is _nothing and not self.connection.closed:
            self._open[number] = stop
        else:  # the past was all there is, or more than the client takes
            stop()

    def _push(self, number: int, at_end: Callable[[int, m.RunResult], None], message: m.Update | m.RunResult) -> None:
        if number not in self._open:
            return
        if isinstance(message, m.RunResult):
            at_end(number, message)
        else:
            self.connection.push(replace(message, request=number))

    def _cancel(self, request: m.Cancel) -> None:
        work = self._backend.cancel(self.peer, RunId(request.run), request.reason)
        self._carry_through(request.request, work, partial(self._done, request.request))

    def _shutdown(self, request: m.Shutdown) -> None:
        work = self._backend.shutdown(self.peer, request.drain)
        self._carry_through(request.request, work, partial(self._done, request.request))

    def _done(self, number: int, _: None) -> None:
        self._answer(m.Done(number))

    def _status(self, request: m.Status) -> None:
        self._wait(request.request, self._backend.status(self.peer, RunId(request.run)))

    def _list(self, request: m.List) -> None:
        self._wait(request.request, self._backend.list_runs(self.peer, request.state, request.limit))

    def _result(self, request: m.Result) -> None:
        self._wait(request.request, self._backend.result(self.peer, RunId(request.run), request.wait))

    def _timeline(self, request: m.Timeline) -> None:
        self._wait(request.request, self._backend.timeline(self.peer, RunId(request.run)))

    def _devices(self, request: m.Devices) -> None:
        self._answer(replace(self._backend.devices(), request=request.request))

    def _memory_report(self, request: m.Memory) -> None:
        self._answer(replace(self._backend.memory(self.peer), request=request.request))

    def _models(self, request: m.Models) -> None:
        self._answer(replace(self._backend.models(self.peer), request=request.request))

    def _statistics(self, request: m.Statistics) -> None:
        self._answer(replace(self._backend.statistics(), request=request.request))

    def _forget(self, request: m.Forget) -> None:
        stop = self._open.pop(request.target, None)
        if stop is not None:
            stop()
        self._answer(m.Done(request.request))

    # --- answers ------------------------------------------------------------------------------------------------

    def _wait(
        self, number: int, work: Coroutine[Any, Any, m.RunStatus | m.RunList | m.RunResult | m.RunTimeline | Export]
    ) -> None:
        """Answers with what the work returns; a client that goes away cancels it."""
        task = self._run(number, work, partial(self._reply, number))
        if task is not None:
            self._open[number] = task.cancel

    def _carry_through(self, number: int, work: Coroutine[Any, Any, T], then: Callable[[T], None]) -> None:
        self._open[number] = _nothing
        self._run(number, work, then)

    def _run(self, number: int, work: Coroutine[Any, Any, T], then: Callable[[T], None]) -> asyncio.Task[None] | None:
        value, rest = begin(work)
        if rest is None:
            then(value)  # type: ignore[arg-type]
            return None
        return self._surroundings.spawn(self._later(number, rest, then))

    async def _later(self, number: int, rest: Any, then: Callable[[T], None]) -> None:
        try:
            value = await rest
            if number in self._open:
                then(value)
        except Exception as error:
            if number in self._open or not isinstance(error, HexrtError):
                self._fail(number, error)

    def _reply(self, number: int, answer: m.RunStatus | m.RunList | m.RunResult | m.RunTimeline | Export) -> None:
        if isinstance(answer, Export):
            self._open.setdefault(number, _nothing)
            attached = Attached(partial(self._made, number, answer))
            self.connection.answer(attached, partial(self._open.pop, number, None))
        else:
            self._answer(replace(answer, request=number))

    def _made(self, number: int, export: Export) -> tuple[m.FromDaemon, int]:
        try:
            result, fd = export.make()
        except Exception as error:
            return m.Refused(number, self._named(error).record()), -1
        return replace(result, request=number), fd

    def _answer(self, message: m.FromDaemon) -> None:
        """The last answer of its request, which is open until this is encoded."""
        number: int = message.request  # type: ignore[union-attr, assignment]
        self._open.setdefault(number, _nothing)
        self.connection.answer(message, partial(self._open.pop, number, None))

    def _refuse(self, number: int, error: HexrtError) -> None:
        self._answer(m.Refused(number, error.record()))

    def _fail(self, number: int, error: Exception) -> None:
        named = self._named(error)
        if not self.connection.closed:
            self._refuse(number, named)

    def _named(self, error: Exception) -> HexrtError:
        if isinstance(error, HexrtError):
            return error
        log.error("a request failed by an error of hexrt's own", exc_info=error)
        self._surroundings.on_bug(error)
        return InvariantViolation(f"an error inside hexrtd ({type(error).__name__}): see its log, and report it")

    def _end_with(self, error: HexrtError) -> None:
        self.connection.answer(m.Refused(None, error.record()))
        self.connection.end()

    # --- the end ------------------------------------------------------------------------------------------------

    def is_stuck(self) -> bool:
        """See Connection.is_stuck; asked by the server's sweep."""
        return self.connection.is_stuck()

    def end(self) -> None:
        """The daemon stops: what is still open is refused."""
        if self._open:
            self._end_with(Disconnected("hexrtd is stopping; connect again when it is back"))
        else:
            self.connection.end()

    def _on_close(self, reason: str) -> None:
        log.debug("client uid %d pid %d: %s", self.peer.uid, self.peer.pid, reason)
        stops = list(self._open.values())
        self._open.clear()
        for stop in stops:
            stop()
        self._surroundings.on_close(self)


_HANDLERS: dict[type, Callable[[Session, Any], None]] = {
    m.Submit: Session._submit,
    m.Cancel: Session._cancel,
    m.Status: Session._status,
    m.List: Session._list,
    m.Watch: Session._watch,
    m.Result: Session._result,
    m.Timeline: Session._timeline,
    m.Devices: Session._devices,
    m.Memory: Session._memory_report,
    m.Models: Session._models,
    m.Statistics: Session._statistics,
    m.Forget: Session._forget,
    m.Shutdown: Session._shutdown,
}
