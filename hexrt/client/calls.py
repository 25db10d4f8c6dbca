"""What both faces of the client share: requests, what their answers become, and the bytes of a connection.

Owns the schema as a client sees it: each kind of call is said once, as a `Call`. Moves no bytes itself.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, Self, TypeVar

import msgspec

import hexrt
from hexrt import values
from hexrt.client.tensors import Gathered, Received
from hexrt.core import Durability, RunId, RunState
from hexrt.errors import BadRequest, Disconnected, ErrorRecord, InvariantViolation, TaskFailed, from_record
from hexrt.memory.rights import close_all
from hexrt.protocol import messages as m
from hexrt.protocol.framing import FrameSplitter, frame
from hexrt.workflow.model import Workflow
from hexrt.workflow.sendable import check_sendable

READ_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 30
HANDSHAKE_S = 10.0
T = TypeVar("T")
UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
_plain = msgspec.msgpack.Encoder()
_TENSORS = _plain.encode("tensors")
Run = RunId | bytes | str
"""A run's id: 16 bytes, or 32 hex digits."""


class Outputs(Mapping[str, Any]):
    """A run's outputs by name, each decoded when it is first asked for. Tensors are read-only NumPy arrays.

    Large ones are views of memory that the daemon handed over: no copy is made, and it is unmapped once no array of it is left.
    """

    def __init__(self, raw: Mapping[str, msgspec.Raw], memory: Received | None = None) -> None:
        self._raw = raw
        self._memory = memory
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._decoded:
            tensors = self._memory.content if self._memory is not None else None
            self._decoded[name] = values.decode(self._raw[name], tensors)
        return self._decoded[name]

    def only(self, name: str) -> Outputs:
        """This output alone. Raises KeyError."""
        return Outputs({name: self._raw[name]}, self._memory)

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def __repr__(self) -> str:
        return f"Outputs({', '.join(self._raw)})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `errors` holds the failed and skipped steps by id. `watch` gives it without outputs."""

    run: RunId
    state: RunState
    outputs: Outputs
    errors: Mapping[str, ErrorRecord]

    def check(self) -> Self:
        """Raises the error of the first failed step unless the run succeeded."""
        if self.state is not RunState.SUCCEEDED:
            for step, error in self.errors.items():
                raise from_record(msgspec.structs.replace(error, where=error.where or step))
            raise TaskFailed(f"the run was {self.state}")
        return self


class Delivered(m.RunResult, frozen=True, tag="run_result"):
    """A result as it came, with the memory of its tensors."""

    memory: Any = None  # Received | None


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request, made when its number is known, and what its answers are turned into."""

    request: Callable[[int], m.Request]
    convert: Callable[[m.FromDaemon], T]


def run_key(run: Run) -> RunId:
    """Raises BadRequest where `run` cannot be an id."""
    with suppress(ValueError):
        key = bytes.fromhex(run) if isinstance(run, str) else bytes(run)
        if len(key) == 16:
            return RunId(key)
    raise BadRequest(f"{run!r} is not a run's id: give its 32 hex digits", "run")


def _expect(kind: type[T], message: m.FromDaemon) -> T:
    if isinstance(message, kind):
        return message
    if isinstance(message, m.Refused):
        raise from_record(message.error)
    raise InvariantViolation(f"hexrtd answered with {type(message).__name__} where {kind.__name__} was due")


def _outcome(message: m.FromDaemon) -> Outcome:
    result = _expect(m.RunResult, message)
    memory = result.memory if isinstance(result, Delivered) else None
    return Outcome(RunId(result.run), result.state, Outputs(result.outputs, memory), result.errors)


def _event(message: m.FromDaemon) -> m.Accepted | m.Update | Outcome:
    return message if isinstance(message, m.Accepted | m.Update) else _outcome(message)


def _news(message: m.FromDaemon) -> m.Update | Outcome:
    return message if isinstance(message, m.Update) else _outcome(message)


def submit(workflow: Workflow, durability: Durability) -> Call[RunId]:
    return Call(lambda n: m.Submit(n, workflow, durability), lambda a: RunId(_expect(m.Accepted, a).run))


def run(workflow: Workflow, durability: Durability) -> Call[Outcome | None]:
    return Call(
        lambda n: m.Submit(n, workflow, durability, "result"),
        lambda a: None if isinstance(a, m.Accepted) else _outcome(a),
    )


def follow(workflow: Workflow, durability: Durability) -> Call[m.Accepted | m.Update | Outcome]:
    return Call(lambda n: m.Submit(n, workflow, durability, "events"), _event)


def watch(run: Run) -> Call[m.Update | Outcome]:
    key = run_key(run)
    return Call(lambda n: m.Watch(n, key), _news)


def status(run: Run) -> Call[m.RunStatus]:
    key = run_key(run)
    return Call(lambda n: m.Status(n, key), lambda a: _expect(m.RunStatus, a))


def list_runs(state: RunState | None, limit: int) -> Call[tuple[m.RunSummary, ...]]:
    return Call(lambda n: m.List(n, state, limit), lambda a: _expect(m.RunList, a).runs)


def result(run: Run, wait: bool) -> Call[Outcome]:
    key = run_key(run)
    return Call(lambda n: m.Result(n, key, wait), _outcome)


def cancel(run: Run, reason: str) -> Call[None]:
    key = run_key(run)
    return Call(lambda n: m.Cancel(n, key, reason), _done)


def timeline(run: Run) -> Call[m.RunTimeline]:
    key = run_key(run)
    return Call(lambda n: m.Timeline(n, key), lambda a: _expect(m.RunTimeline, a))


def devices() -> Call[tuple[m.DeviceStatus, ...]]:
    return Call(m.Devices, lambda a: _expect(m.DeviceList, a).devices)


def memory() -> Call[m.MemoryReport]:
    return Call(m.Memory, lambda a: _expect(m.MemoryReport, a))


def models() -> Call[m.ModelList]:
    return Call(m.Models, lambda a: _expect(m.ModelList, a))


def statistics() -> Call[dict[str, float]]:
    return Call(m.Statistics, lambda a: _expect(m.StatisticsReport, a).values)


def shutdown(drain: bool) -> Call[None]:
    return Call(lambda n: m.Shutdown(n, drain), _done)


def forget(target: int) -> Call[None]:
    return Call(lambda n: m.Forget(n, target), _done)


def _done(message: m.FromDaemon) -> None:
    _expect(m.Done, message)


class Wire:
    """The bytes of a connection, whoever moves them: numbers and encodes requests, cuts and decodes answers."""

    __slots__ = ("_decoder", "_encoder", "_fds", "_gathered", "_max_bytes", "_numbers", "_splitter")

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._splitter = FrameSplitter(MAX_ANSWER_BYTES)
        self._decoder = msgspec.msgpack.Decoder(m.FromDaemon)
        self._gathered = Gathered()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._gathered.hook)
        self._max_bytes = 1 << 16
        self._fds: deque[int] = deque()  # that came, in the order of the answers they belong to

    def hello(self) -> bytes:
        return frame(msgspec.msgpack.encode(m.ClientHello((m.VERSION,), f"hexrt {hexrt.__version__}")))

    def welcome(self, message: m.FromDaemon) -> None:
        self._max_bytes = _expect(m.Welcome, message).max_frame_bytes

    def request(self, call: Call[Any]) -> tuple[int, bytes, int]:
        """The number, the frame, and the file descriptor that goes with its first byte, to be closed once sent; -1 for none.

        Raises BadRequest where the request cannot be sent.
        """
        number = next(self._numbers)
        request = call.request(number)
        gathered = self._gathered
        gathered.clear()
        try:
            body = self._encoder.encode(request)
        except UNSENDABLE as error:
            if isinstance(request, m.Submit):
                check_sendable(request.workflow)
            raise BadRequest(f"the value cannot be sent: {error}", "workflow") from None
        fd = -1
        if gathered:
            tensors, fd = gathered.pack()
            # Where they lie is known only now: the same map with one entry more, and that is the last of Submit's.
            body = bytes((body[0] + 1,)) + body[1:] + _TENSORS + _plain.encode(tensors)
        if len(body) > self._max_bytes:
            close_all((fd,))
            raise BadRequest(
                f"the request has {len(body)} bytes and hexrtd takes {self._max_bytes} (limits.max_frame_mib)"
            )
        return number, frame(body), fd

    def answers(self, data: bytes, fds: Sequence[int] = ()) -> Iterator[tuple[int | None, m.FromDaemon]]:
        """The messages that `data` completes, with the request they belong to, None for all. Raises Disconnected at nonsense.

        `fds` came with `data`, and are closed by this object.
        """
        if fds:
            self._fds.extend(fds)
        try:
            for body in self._splitter.feed(data):
                message = self._decoder.decode(body)
                if isinstance(message, m.RunResult) and message.tensors:
                    message = self._delivered(message)
                yield getattr(message, "request", None), message
        except (msgspec.MsgspecError, RecursionError, BadRequest) as error:
            raise Disconnected(f"what answers is no hexrtd of this version ({error})") from None

    def _delivered(self, result: m.RunResult) -> Delivered:
        if not self._fds:
            raise Disconnected(
                "a result came without the memory of its tensors: too many files may be open in this process"
            )
        memory = Received(self._fds.popleft(), result.tensors)
        return Delivered(
            result.request, result.run, result.state, result.outputs, result.errors, result.tensors, memory=memory
        )

    def close(self) -> None:
        """Lets go of what came and belongs to no answer."""
        close_all(self._fds)
        self._fds.clear()


def unreachable(path: Path, error: OSError) -> NoReturn:
    if isinstance(error, PermissionError):
        text = "you may not use it: ask for its group, or start a hexrtd of your own"
    elif isinstance(error, TimeoutError):
        text = "it does not answer"
    elif isinstance(error, FileNotFoundError | ConnectionRefusedError):
        text = "is hexrtd running? Start it, or name its socket by --socket or HEXRT_SOCKET"
    else:
        text = error.strerror or str(error)
    raise Disconnected(f"cannot reach hexrtd at {path}: {text}") from error


def broken(error: OSError | None = None) -> Disconnected:
    why = f" ({error.strerror})" if error is not None and error.strerror else ""
    return Disconnected(f"the connection to hexrtd broke{why}: runs it had accepted go on; connect again to see them")
