"""The blocking face of the client.

Owns one connection. Used by one thread at a time. Does not connect again by itself.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from hexrt.client import calls
from hexrt.client.calls import Call, Outcome, Run
from hexrt.core import Durability, RunId, RunState
from hexrt.errors import Disconnected, from_record
from hexrt.memory.rights import receive, rights
from hexrt.paths import client_socket
from hexrt.protocol import messages as m
from hexrt.workflow.model import Workflow

T = TypeVar("T")


class Client:
    """A blocking connection; not for use by several threads at once.

    Where a call is interrupted (Ctrl-C) the connection is closed, since an answer may be half read; make a new Client then.
    An iterator that is given up half way (its `close`, or the end of a `for`) is ended at the daemon too.
    """

    def __init__(self, socket_path: str | os.PathLike[str] | None = None, timeout_s: float = calls.HANDSHAKE_S) -> None:
        """Connects. `timeout_s` holds for the handshake only. Raises Disconnected, saying what to do."""
        self.path = Path(socket_path) if socket_path else client_socket(os.environ)
        self._wire = calls.Wire()
        self._streams: dict[int, deque[m.FromDaemon]] = {}  # answers that came while another was waited for
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(os.fspath(self.path))
            with suppress(BrokenPipeError, ConnectionResetError):  # turned away: the reason is there to be read
                self._socket.sendall(self._wire.hello())
            self._wire.welcome(self._read_until(None))
            self._socket.settimeout(None)
        except OSError as error:
            self.close()
            calls.unreachable(self.path, error)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
        self._wire.close()

    def _read_until(self, number: int | None) -> m.FromDaemon:
        """The next message of that request; others are kept for the iterators they belong to, or dropped where nobody asks."""
        kept = self._streams.get(number) if number is not None else None
        if kept:
            return kept.popleft()
        found: deque[m.FromDaemon] = deque()
        while not found:
            data, fds = receive(self._socket, calls.READ_BYTES)
            if not data:
                raise calls.broken()
            for owner, message in self._wire.answers(data, fds):
                if owner is None and isinstance(message, m.Refused) and not found:
                    raise from_record(message.error)
                if owner == number:
                    found.append(message)
                elif owner in self._streams:
                    self._streams[owner].append(message)
        first = found.popleft()
        if found and kept is not None:
            kept.extend(found)
        return first

    def _guarded(self, step: Callable[[], T]) -> T:
        """Moves bytes; whatever breaks that off leaves the stream in the middle of something, and so closes it."""
        if self._socket.fileno() < 0:
            raise Disconnected("this connection to hexrtd is closed: make a new Client")
        try:
            return step()
        except OSError as error:
            self.close()
            raise calls.broken(error) from error
        except BaseException:
            self.close()
            raise

    def _send(self, call: Call[Any]) -> int:
        number, data, fd = self._wire.request(call)
        if fd < 0:
            self._guarded(lambda: self._socket.sendall(data))
            return number
        try:
            self._guarded(lambda: self._send_with(data, fd))
        finally:
            os.close(fd)
        return number

    def _send_with(self, data: bytes, fd: int) -> None:
        sent = self._socket.sendmsg((data,), (rights(fd),))
        self._socket.sendall(memoryview(data)[sent:])

    def _ask(self, call: Call[T]) -> T:
        number = self._send(call)
        return call.convert(self._guarded(lambda: self._read_until(number)))

    def _iterate(self, call: Call[T]) -> Iterator[T]:
        number = self._send(call)
        self._streams[number] = deque()
        ended = False
        try:
            while not ended:
                message = self._guarded(lambda: self._read_until(number))
                ended = isinstance(message, m.RunResult | m.Refused)
                yield call.convert(message)
        finally:
            del self._streams[number]
            if not ended and self._socket.fileno() >= 0:
                with suppress(Disconnected):  # then it is ended already
                    self._send(calls.forget(number))

    def submit(self, workflow: Workflow, durability: Durability = Durability.SYNC) -> RunId:
        """Returns once the run is as durable as `durability` asks."""
        return self._ask(calls.submit(workflow, durability))

    def run(self, workflow: Workflow, durability: Durability = Durability.SYNC) -> Outcome:
        """Submits and waits for the end. A failed run is returned, not raised: see Outcome.check."""
        return next(outcome for outcome in self._iterate(calls.run(workflow, durability)) if outcome is not None)

    def follow(
        self, workflow: Workflow, durability: Durability = Durability.SYNC
    ) -> Iterator[m.Accepted | m.Update | Outcome]:
        """Submits; yields Accepted, then what happens, and last the Outcome."""
        return self._iterate(calls.follow(workflow, durability))

    def watch(self, run: Run) -> Iterator[m.Update | Outcome]:
        """What happened in the run as far as it is kept, then what happens, and last the Outcome without outputs."""
        return self._iterate(calls.watch(run))

    def status(self, run: Run) -> m.RunStatus:
        return self._ask(calls.status(run))

    def list(self, state: RunState | None = None, limit: int = 100) -> tuple[m.RunSummary, ...]:
        """The newest runs that you may see."""
        return self._ask(calls.list_runs(state, limit))

    def result(self, run: Run, wait: bool = True) -> Outcome:
        """Without `wait`, raises BadRequest while the run goes on."""
        return self._ask(calls.result(run, wait))

    def cancel(self, run: Run, reason: str = "") -> None:
        """Returns once no work of the run goes on."""
        self._ask(calls.cancel(run, reason))

    def timeline(self, run: Run) -> m.RunTimeline:
        return self._ask(calls.timeline(run))

    def devices(self) -> tuple[m.DeviceStatus, ...]:
        return self._ask(calls.devices())

    def memory(self) -> m.MemoryReport:
        """The tiers of memory, what moves between them, and who holds the most; of others' runs only an admin is told."""
        return self._ask(calls.memory())

    def models(self) -> m.ModelList:
        """The models that LLM steps may name, where each is loaded, and what their weights take."""
        return self._ask(calls.models())

    def statistics(self) -> dict[str, float]:
        return self._ask(calls.statistics())

    def shutdown(self, drain: bool = True) -> None:
        """Asks the daemon to stop; with `drain`, once running steps have ended."""
        self._ask(calls.shutdown(drain))
