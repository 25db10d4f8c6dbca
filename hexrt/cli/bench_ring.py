"""How fast bytes go through a ring from one process to another, beside one plain copy, and how long a small message is on its way.

A tensor: the producer fills a slot by one copy from memory of its own; the consumer takes the slot, looks at both ends and gives it back,
or sums up every byte in place, or copies all out as well. A round ends when all is given back. The limit is the producer's copy alone, of
the same bytes from the same sources to as many places as the ring had used. The tensors of a round are different memory, too much for a
cache, except where it says "cached": there they are one. A message: there and back, halved; beside it the same over a socketpair. Rounds
alternate. Messages have a core for each process where there are two: else the scheduler may keep both on one, which it only finds out by
load. Owns the processes that it starts, which are this module again.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Any

from hexrt.errors import WorkerDied
from hexrt.memory.ring import Ring, RingReader, RingWriter, wake_fd

TENSOR_BYTES, MESSAGE_BYTES = 1 << 20, 64
MOST = 4
TENSORS, DIFFERENT, MESSAGES, ROUNDS = 100, 32, 400, 15
WAIT_S = 10.0
"""Without a sign of the other process for so long, either gives up: the other is gone."""
STREAMS = (
    ("take", DIFFERENT, "in place"),
    ("take", 1, "in place, cached"),
    ("read", DIFFERENT, "summed up"),
    ("copy", DIFFERENT, "copied out"),
)
"""What the consumer does, how many different tensors there are, and how the row names both."""

Row = dict[str, Any]
Fds = tuple[int, int, int]


def measure(tensors: int = TENSORS, messages: int = MESSAGES, rounds: int = ROUNDS) -> list[Row]:
    """Rows of `hexrt bench`: MB/s of 1 MiB tensors for each kind of consumer, and microseconds of a 64-byte message one way."""
    return [*(_stream(*stream, tensors, rounds) for stream in STREAMS), _messages(messages, rounds)]


@contextmanager
def _ring(size: int) -> Iterator[Fds]:
    """The descriptors of a ring: its memory, and those that wake its reader and its writer."""
    with Ring.create(size, 64, MOST) as ring:
        filled, freed = wake_fd(), wake_fd()
        try:
            yield ring.fd, filled, freed
        finally:
            os.close(filled)
            os.close(freed)


@contextmanager
def _peer(role: str, *fds: int) -> Iterator[None]:
    """The other process, on any core that this one may use; it is gone in the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hexrt.cli.bench_ring", role, *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C is the command's, which ends this process
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


# --- tensors ------------------------------------------------------------------------------------------------------


def _stream(role: str, different: int, name: str, tensors: int, rounds: int) -> Row:
    made = [memoryview(bytearray([number % 256]) * TENSOR_BYTES) for number in range(min(different, tensors))]
    sources = [made[number % len(made)] for number in range(tensors)]
    ours, plain = [], []
    with _ring(MOST * TENSOR_BYTES) as fds:
        writer = RingWriter(*fds)
        with _peer(role, *fds):
            places = _produce(writer, sources)[1]  # takes the memory
            private = memoryview(bytearray(places * TENSOR_BYTES))
            for _ in range(rounds):
                plain.append(_copy(private, sources))
                ours.append(_produce(writer, sources)[0])
        writer.close()
    value, limit = (len(sources) * TENSOR_BYTES / statistics.median(seconds) / 1e6 for seconds in (ours, plain))
    note = f"limit: one copy of the same bytes in the producer, to {places} places in turn"
    return {"name": f"ring, 1 MiB {name}", "value": value, "unit": "MB/s", "limit": limit, "ratio": value / limit, "note": note}  # fmt: skip


def _produce(writer: RingWriter, sources: list[memoryview]) -> tuple[float, int]:
    """Seconds until the last is given back, and how many places of the ring were used."""
    offsets = set()
    start = time.perf_counter()
    for source in sources:
        slot = writer.wait_reserve(len(source), WAIT_S)
        slot.view[:] = source
        writer.commit(slot)
        offsets.add(slot.offset)
    writer.abort(writer.wait_reserve(writer.capacity_bytes, WAIT_S))
    return time.perf_counter() - start, len(offsets)


def _copy(target: memoryview, sources: list[memoryview]) -> float:
    parts = cycle(target[at : at + TENSOR_BYTES] for at in range(0, len(target), TENSOR_BYTES))
    start = time.perf_counter()
    for part, source in zip(parts, sources, strict=False):
        part[:] = source
    return time.perf_counter() - start


def _consume(role: str, fds: Fds) -> None:
    reader = RingReader(*fds)
    private = memoryview(bytearray(TENSOR_BYTES))
    if role == "read":
        import numpy as np
    while (taken := reader.wait_take(WAIT_S)) is not None:
        assert taken.view[0] == taken.view[-1]
        if role == "read":
            np.add.reduce(np.frombuffer(taken.view, np.uint64))
        elif role == "copy":
            private[:] = taken.view
        reader.release(taken.slot)


# --- messages -----------------------------------------------------------------------------------------------------


def _messages(messages: int, rounds: int) -> Row:
    ours: list[float] = []
    plain: list[float] = []
    here, there = socket.socketpair()
    cores = sorted(os.sched_getaffinity(0))
    with here, there, _ring(4096) as out, _ring(4096) as back:
        here.settimeout(WAIT_S)
        writer, reader = RingWriter(*out), RingReader(*back)
        try:
            os.sched_setaffinity(0, {cores[-1]})
            with _peer("echo", *out, *back), _peer("socket", there.fileno()):
                os.sched_setaffinity(0, {cores[0]})
                for attempt in range(rounds + 1):
                    took = _ask_socket(here, messages), _ask_ring(writer, reader, messages)
                    if attempt:
                        plain += took[0]
                        ours += took[1]
        finally:
            os.sched_setaffinity(0, cores)
        writer.close()
        reader.close()
    value, limit = statistics.median(ours), statistics.median(plain)
    slow = statistics.quantiles(ours, n=10)[-1]
    note = f"9 of 10 within {slow:.1f} us; limit: the same over a socketpair"
    return {"name": "ring, 64 B one way", "value": value, "unit": "us", "limit": limit, "ratio": value / limit, "note": note}  # fmt: skip


def _ask_ring(writer: RingWriter, reader: RingReader, times: int) -> list[float]:
    """Microseconds one way of each message."""
    message, took = bytes(MESSAGE_BYTES), []
    for _ in range(times):
        start = time.perf_counter_ns()
        _put(writer, message)
        if _get(reader) is None:
            raise WorkerDied("the other process of the measurement is gone")
        took.append((time.perf_counter_ns() - start) / 2e3)
    return took


def _ask_socket(sock: socket.socket, times: int) -> list[float]:
    message, took = bytes(MESSAGE_BYTES), []
    for _ in range(times):
        start = time.perf_counter_ns()
        sock.sendall(message)
        if not sock.recv(MESSAGE_BYTES):
            raise WorkerDied("the other process of the measurement is gone")
        took.append((time.perf_counter_ns() - start) / 2e3)
    return took


def _put(writer: RingWriter, message: bytes) -> None:
    slot = writer.wait_reserve(len(message), WAIT_S)
    slot.view[:] = message
    writer.commit(slot)


def _get(reader: RingReader) -> bytes | None:
    taken = reader.wait_take(WAIT_S)
    if taken is None:
        return None
    message = bytes(taken.view)
    reader.release(taken.slot)
    return message


def _echo(out: Fds, back: Fds) -> None:
    reader, writer = RingReader(*out), RingWriter(*back)
    while (message := _get(reader)) is not None:
        _put(writer, message)


def _echo_socket(fd: int) -> None:
    with socket.socket(fileno=fd) as sock:
        sock.settimeout(WAIT_S)
        with suppress(TimeoutError, ConnectionError):
            while message := sock.recv(MESSAGE_BYTES):
                sock.sendall(message)


def main(arguments: list[str]) -> None:
    """The processes that this module starts of itself."""
    role, *rest = arguments
    fds = list(map(int, rest))
    if role == "echo":
        _echo((fds[0], fds[1], fds[2]), (fds[3], fds[4], fds[5]))
    elif role == "socket":
        _echo_socket(fds[0])
    else:
        _consume(role, (fds[0], fds[1], fds[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
