"""Follows one run of the sandbox: reads what it prints, stops it at its limits, sees that nothing of it stays.

Owns the limits that rlimits cannot hold, since those do not add up over forks: the wall clock, the memory of all processes together, the
number of files, and how much is printed. Looks every 50 ms while the program runs; what is taken between two looks is bounded by the
rlimits of each process.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import hexrt.ops._sandbox_inside as inside
from hexrt.errors import TaskFailed

MIB = 1 << 20
MAX_FILES = 20_000  # in one tmpfs: its size cap does not count them
DRAIN_BYTES = 64 * MIB  # printed past this, the program is stopped
HEADER_BYTES = 4 * MIB
WATCH_S = 0.05
SETUP_S = 30.0  # for bwrap and the interpreter, on a busy machine; the program's own time begins afterwards
END_S = 10.0
PRIVATE = (inside.WORK, "/tmp")


@dataclass(frozen=True, slots=True)
class Limits:
    timeout_s: float = 10.0
    memory_bytes: int = 512 * MIB  # of one process's address space, and of all their own pages together
    processes: int = 32  # threads count
    disk_bytes: int = 64 * MIB  # of /box, and of /tmp
    output_bytes: int = 256 << 10  # of stdout, and of stderr
    result_bytes: int = 8 * MIB  # of the files under /box/out
    result_files: int = 100


@dataclass(slots=True)
class Outcome:
    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int = -signal.SIGKILL  # negative: the signal that ended it
    stopped: str = ""  # "time", "memory", "files", "output": what it was stopped for
    truncated: bool = False
    seconds: float = 0.0
    files: dict[str, bytes] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    error: str = ""  # the job could not be laid out
    started: bool = False  # the sandbox stood
    complete: bool = False  # the inside said how the program ended


def _tree(pid: int) -> Iterator[int]:
    """`pid` and its descendants; orphans belong to the sandbox's init, so none is missed but those born meanwhile."""
    waiting = [pid]
    while waiting:
        pid = waiting.pop()
        yield pid
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                waiting += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())


def _own_bytes(pid: int) -> int:
    """Memory of the tree that is no file's: resident less shared, summed."""
    pages = 0
    for each in _tree(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            _, resident, shared = Path(f"/proc/{each}/statm").read_text().split()[:3]
            pages += int(resident) - int(shared)
    return pages * resource.getpagesize()


def _most_files(pid: int) -> int:
    """Files in the fullest tmpfs that the program can write."""
    most = 0
    for path in (*PRIVATE, "/dev/shm"):
        with contextlib.suppress(OSError):
            state = os.statvfs(f"/proc/{pid}/root{path}")
            most = max(most, state.f_files - state.f_ffree)
    return most


def is_plain_name(name: object) -> bool:
    """True for a printable relative path with `/` between its parts, none of them `.`, `..`, empty or too long."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > 1_000:
        return False
    parts = name.split("/")
    return len(parts) <= inside.DEPTH and all(p not in ("", ".", "..") and len(p.encode()) <= 255 for p in parts)


class Watch:
    """One run from the start of bwrap to the end of its last process."""

    def __init__(self, process: subprocess.Popen[bytes], result_fd: int, limits: Limits) -> None:
        self.outcome = Outcome()
        self.init = 0  # pid of the sandbox's first process
        self.init_fd = -1
        self._process = process
        self._exit_fd = os.pidfd_open(process.pid)  # before anything could reap it
        self._limits = limits
        self._begun = time.monotonic()
        self._allowed_s = SETUP_S
        assert process.stdout is not None and process.stderr is not None
        self._streams: dict[int, bytearray] = {
            process.stdout.fileno(): bytearray(),
            process.stderr.fileno(): bytearray(),
        }
        self._caps = dict.fromkeys(self._streams, limits.output_bytes)
        self._streams[result_fd] = bytearray()
        self._caps[result_fd] = HEADER_BYTES + limits.result_bytes
        self._printed = 0
        self._result_fd = result_fd

    def began(self, info_fd: int) -> None:
        """Takes what bwrap says of its child on `info_fd`, in several writes. Nothing runs on without a watch over it."""
        info = b""
        while b"}" not in info and (part := os.read(info_fd, 4096)):
            info += part
        try:
            self.init = int(json.loads(info)["child-pid"])
        except (ValueError, KeyError):
            self._process.kill()
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self.init_fd = os.pidfd_open(self.init)
        for pid in _tree(self.init):  # out of memory, the kernel is to choose these first
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/oom_score_adj").write_text("1000")

    def follow(self) -> None:
        """Reads the streams until all are closed or bwrap has exited, and stops the program at its limits."""
        poll = select.poll()
        for fd in self._streams:
            os.set_blocking(fd, False)
            poll.register(fd, select.POLLIN)
        poll.register(self._exit_fd, select.POLLIN)
        open_fds, checked, ended = set(self._streams), time.monotonic(), False
        while open_fds and not ended:
            for fd, _ in poll.poll(WATCH_S * 1000):
                if fd == self._exit_fd:
                    ended = True
                elif not self._read(fd):
                    poll.unregister(fd)
                    open_fds.discard(fd)
            now = time.monotonic()
            if now - checked >= WATCH_S or self._printed > DRAIN_BYTES:
                checked = now
                self._check(now)

    def _read(self, fd: int) -> bool:
        """Takes in what has arrived, up to 1 MiB; False where there is nothing to read."""
        try:
            data = os.read(fd, MIB)
        except BlockingIOError:
            return False
        kept, cap = self._streams[fd], self._caps[fd]
        if fd == self._result_fd and not kept:
            self._begun, self._allowed_s = time.monotonic(), self._limits.timeout_s
        if fd != self._result_fd:
            self._printed += len(data)
            self.outcome.truncated |= len(data) > cap - len(kept)
        kept += data[: cap - len(kept)]
        return bool(data)

    def _check(self, now: float) -> None:
        if self.outcome.stopped:
            return
        if now - self._begun > self._allowed_s:
            self._stop("time")
        elif not self._streams[self._result_fd]:
            return  # until the sandbox stands, its root is the machine's own, whose files are none of the program's
        elif self._printed > DRAIN_BYTES:
            self._stop("output")
        elif self.init and _own_bytes(self.init) > self._limits.memory_bytes:
            self._stop("memory")
        elif self.init and _most_files(self.init) > MAX_FILES:
            self._stop("files")

    def _stop(self, why: str) -> None:
        self.outcome.stopped = why
        self.outcome.seconds = time.monotonic() - self._begun
        self._kill()

    def _kill(self) -> None:
        """Kills the sandbox's init, and with it every process of its namespace; bwrap then reaps it and exits."""
        if self.init_fd < 0:
            self._process.kill()
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.init_fd, signal.SIGKILL)

    def end(self) -> None:
        """Returns once no process of the sandbox runs. Raises TaskFailed if the kernel does not end them."""
        self._kill()
        try:
            self._process.wait(END_S)
            gone = self.init_fd < 0 or self._init_is_gone()
        except subprocess.TimeoutExpired:
            self._process.kill()
            gone = False
        finally:
            for fd in (self._exit_fd, self.init_fd):
                if fd >= 0:
                    os.close(fd)
        if not gone:
            raise TaskFailed(f"the program's processes did not end within {END_S:.0f} s of being killed")

    def _init_is_gone(self) -> bool:
        """Waits for the init, which ends after all of its namespace; bwrap may have exited before it."""
        poll = select.poll()
        poll.register(self.init_fd, select.POLLIN)
        return bool(poll.poll(END_S * 1000))

    def settle(self) -> Outcome:
        """After `end`: the outcome, with what the inside reported where that is whole."""
        for fd in self._streams:
            while self._read(fd):
                pass
        outcome = self.outcome
        outcome.stdout, outcome.stderr, report = (bytes(kept) for kept in self._streams.values())
        outcome.started, report = report[:1] == inside.HELLO, report[1:]
        if not outcome.started:
            outcome.exit_code = self._process.returncode
        try:
            size = int.from_bytes(report[:8], "little")
            header = json.loads(report[8 : 8 + size]) if report else {}
            outcome.error = str(header.get("error", ""))
            if outcome.stopped or "status" not in header:
                return outcome
            outcome.exit_code = os.waitstatus_to_exitcode(int(header["status"]))
            outcome.seconds, at = float(header["seconds"]), 8 + size
            for name, length in header["files"]:
                if not is_plain_name(name) or int(length) < 0:
                    raise ValueError(name)
                outcome.files[name] = report[at : at + int(length)]
                at += int(length)
            outcome.left_out = [str(line) for line in header["left_out"]]
            outcome.complete = at == len(report)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            outcome.complete = False
        return outcome
