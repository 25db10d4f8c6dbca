"""Functions that `map.python` steps of the tests call: some behave, most do not."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import Any


def double(value: int) -> int:
    return 2 * value


def pid() -> int:
    return os.getpid()


def mark(value: str, path: str, wait_s: float = 0.0) -> str:
    """Leaves a mark outside hexrt, in one write."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, f"{value}\n".encode())
    os.close(fd)
    if wait_s:
        threading.Event().wait(wait_s)
    return value


def raise_error() -> None:
    raise ValueError("what a pity")


def raise_unprintable() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    raise Odd


def unsendable() -> Any:
    return threading.Lock()


def recursive() -> list[Any]:
    knot: list[Any] = []
    knot.append(knot)
    return knot


def huge() -> bytes:
    return bytes(40 << 20)


def print_a_gibibyte() -> str:
    block = "x" * (1 << 20)
    for _ in range(1024):
        sys.stdout.write(block)
        sys.stderr.write(block)
    return "printed"


def fork_and_leave() -> int:
    """The child outlives the step unless somebody ends it."""
    child = os.fork()
    if child == 0:
        threading.Event().wait(600)
        os._exit(0)
    return child


def sleep_for_ever() -> None:
    threading.Event().wait()


def spin() -> None:
    while True:
        pass


def kill_own_worker() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    ctypes.string_at(0)


def leave_by_exit() -> None:
    sys.exit(3)


def leave_hard() -> None:
    os._exit(5)


def say_bye_on_the_socket() -> None:
    """Closes every descriptor, the one to the daemon too."""
    os.closerange(3, 256)


def count(value: int) -> list[int]:
    return list(range(value))


def block(value: int) -> bytes:
    return bytes(value)
