"""The NVME tier's host as a real process: its copies, its faults, a disk that hangs under it, and its death at any moment."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from hexrt.memory.arena import create_host_arena, map_fd
from hexrt.protocol.framing import frame
from hexrt.protocol.host import (
    FIRST_SEGMENT,
    HOST,
    NVME,
    VERSION,
    Cancel,
    Copied,
    Copy,
    FromHost,
    Hello,
    HostFailed,
    Launch,
    Map,
    Piece,
    Ping,
    Ready,
    Stats,
    Unmap,
    Withdraw,
)
from tests.host_peer import EPOCH, START, HostPeer
from tests.seeds import seeds

pytestmark = pytest.mark.timeout(120)
MIB = 1 << 20
FILE_BYTES, HOST_BYTES = 64 * MIB, 24 * MIB
UNTOUCHED = 40 * MIB  # the probe at start stays below
PAGE = 360 << 10
HANGING = """
import os, sys
from dataclasses import replace
from hexrt.devices import disk, host
from hexrt.memory.arena import SYSTEM

def pwritev(fd, views, offset):
    if offset >= int(sys.argv[2]):
        os.close(os.open(sys.argv[1], os.O_RDONLY))  # waits until somebody opens the other end
    return os.pwritev(fd, views, offset)

disk.DiskProgram.calls = replace(SYSTEM, pwritev=pwritev)
host.main(sys.argv[3:])
"""

CALLS = 40  # fewer than a host makes until it has carried out the copies of its last test
DYING = """
import os, sys, threading
from dataclasses import replace
from hexrt.devices import disk, host
from hexrt.memory.arena import SYSTEM

lock, left = threading.Lock(), int(sys.argv[1])

def around(real):
    def call(fd, views, offset):
        global left
        with lock:
            left -= 1
            if left == 0:
                if int(sys.argv[2]):
                    real(fd, [view[: len(view) // 8192 * 4096] for view in views], offset)
                os.kill(os.getpid(), 9)
        return real(fd, views, offset)
    return call

disk.DiskProgram.calls = replace(SYSTEM, preadv=around(os.preadv), pwritev=around(os.pwritev))
host.main(sys.argv[3:])
"""


class DiskHost(HostPeer):
    def __init__(self, folder: Path, *script: str, nvme_bytes: int = FILE_BYTES) -> None:
        super().__init__("disk", ("-c", *script) if script else START, stderr=subprocess.PIPE)
        memory = {"nvme_path": str(folder / "pages"), "nvme_bytes": nvme_bytes, "host_bytes": HOST_BYTES}
        self.send(Hello(VERSION, EPOCH, "nvme", str(folder), "", {"memory": memory}))

    def ready(self) -> Ready:
        found = self.next()
        assert isinstance(found, Ready)
        return found

    def map(self, place: int, fd: int, size: int, writable: bool = True) -> None:
        socket.send_fds(self.socket, [frame(msgspec.msgpack.encode([Map(place, size, writable)]))], [fd])

    def rest(self) -> list[FromHost]:
        """All that it says until it is gone."""
        return list(self._reports)

    def copied(self) -> Copied:
        found = self.next()
        assert isinstance(found, Copied), found
        return found

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        finally:
            assert self.process.stderr is not None
            self.process.stderr.close()


class Shared:
    """HOST memory as the daemon has it."""

    def __init__(self) -> None:
        self.fd, _ = create_host_arena(HOST_BYTES)
        self.memory = map_fd(self.fd, HOST_BYTES, True)

    def fill(self, seed: int) -> bytes:
        data = random.Random(seed).randbytes(PAGE) * (HOST_BYTES // PAGE)
        self.memory[: len(data)] = data
        for page in range(HOST_BYTES // PAGE):  # no two pages alike
            self.memory[page * PAGE] = page
        return bytes(self.memory)


@pytest.fixture
def shared() -> Iterator[Shared]:
    made = Shared()
    yield made
    os.close(made.fd)


@pytest.fixture
def host(tmp_path: Path, shared: Shared) -> Iterator[DiskHost]:
    with DiskHost(tmp_path) as made:
        made.ready()
        made.map(HOST, shared.fd, HOST_BYTES)
        yield made


def test_it_says_what_it_opened_and_how_fast_it_is(tmp_path: Path) -> None:
    with DiskHost(tmp_path) as host:
        facts = host.ready().facts
        assert facts["backend"] == "threads" and facts["bytes"] == FILE_BYTES and facts["depth"] >= 1
        assert facts["direct"] is True or facts["why"]
        assert min(facts[name] for name in ("read_bytes_per_s", "write_bytes_per_s", "latency_ns")) > 0
        assert os.listdir(tmp_path) == []


def test_pages_go_to_the_file_and_back_and_on_to_a_segment(host: DiskHost, shared: Shared) -> None:
    data, segment = shared.fill(1), Shared()
    host.map(FIRST_SEGMENT, segment.fd, HOST_BYTES)
    host.send(Copy(1, (Piece(HOST, 0, NVME, 5 * PAGE // 4096 * 4096, PAGE, 20),)))
    stored = host.copied()
    assert stored.sums == tuple(xxh3_64_intdigest(data[n * PAGE : (n + 1) * PAGE]) for n in range(20))
    shared.memory[:] = bytes(HOST_BYTES)
    host.send(Copy(2, (Piece(NVME, 5 * PAGE // 4096 * 4096, HOST, PAGE, PAGE, 20, stored.sums),)))
    assert (host.copied().faults, shared.memory[PAGE : 21 * PAGE] == data[: 20 * PAGE]) == ((), True)
    host.send(Copy(3, (Piece(HOST, PAGE, FIRST_SEGMENT, 64, 20 * PAGE, 1),)), Unmap(FIRST_SEGMENT))
    assert host.copied().bytes == 20 * PAGE and segment.memory[64 : 64 + 20 * PAGE] == data[: 20 * PAGE]
    assert host.cell[0] == 0
    os.close(segment.fd)


def test_a_byte_flipped_on_the_disk_under_it_is_a_fault_of_that_page(host: DiskHost, shared: Shared) -> None:
    shared.fill(2)
    host.send(Copy(1, (Piece(HOST, 0, NVME, UNTOUCHED, PAGE, 10),)))
    sums = host.copied().sums
    descriptors = Path(f"/proc/{host.process.pid}/fd")
    (page_file,) = (descriptor for descriptor in descriptors.iterdir() if descriptor.stat().st_size == FILE_BYTES)
    plain = os.open(page_file, os.O_RDWR)
    at = UNTOUCHED + 7 * PAGE + 1234
    os.pwrite(plain, bytes([os.pread(plain, 1, at)[0] ^ 128]), at)
    os.fsync(plain)
    os.close(plain)
    host.send(Copy(2, (Piece(NVME, UNTOUCHED, HOST, 0, PAGE, 10, sums),)))
    assert [(fault.page, fault.kind) for fault in host.copied().faults] == [(7, "checksum")]


def test_what_it_cannot_do_fails_by_name_and_it_goes_on(host: DiskHost, shared: Shared) -> None:
    nil = msgspec.Raw(b"\xc0")
    host.send(
        Copy(1, (Piece(HOST, 0, NVME, 100, 4096, 1),)),
        Copy(2, (Piece(HOST, 0, 77, 0, 4096, 1),)),
        Launch(3, 1, "noop", 0, b"r" * 16, "s", 0, 1.0, nil, nil),
        Copy(4, (Piece(HOST, 0, NVME, 0, 4096, 1),)),
    )
    failed = [host.next() for _ in range(3)]
    assert [(f.command, f.error.kind) for f in failed if isinstance(f, HostFailed)] == [(1, "bad_request"), (2, "not_found"), (3, "unavailable")]  # fmt: skip
    assert host.copied().command == 4


def test_a_disk_that_hangs_leaves_its_loop_alive_and_what_waits_can_be_taken_back(
    tmp_path: Path, shared: Shared
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with DiskHost(tmp_path, HANGING, str(fifo), str(UNTOUCHED)) as host:
        host.ready()
        host.map(HOST, shared.fd, HOST_BYTES)
        stuck = Copy(1, (Piece(HOST, 0, NVME, UNTOUCHED, 4 * MIB, 6),))  # more requests than there are threads
        host.send(stuck, Copy(2, (Piece(HOST, 0, HOST, MIB, 100, 1),)), Ping())
        kinds = {type(host.next()), type(host.next())}
        assert kinds == {Copied, Stats}  # of the move in memory
        waiting = [Copy(command, (Piece(HOST, 0, NVME, 0, 4096, 1),)) for command in (3, 4, 5)]
        host.send(*waiting, Cancel(3), Withdraw(4), Cancel(99), Ping())
        failed, pong = host.next(), host.next()
        assert isinstance(failed, HostFailed) and (failed.command, failed.error.kind) == (3, "cancelled")
        assert isinstance(pong, Stats) and host.cell[0] == 1
        host.send(Cancel(1), Withdraw(1), Ping())  # it has begun, so it ends as any other
        assert isinstance(host.next(), Stats)
        other_end = os.open(fifo, os.O_WRONLY)
        reports = [host.copied(), host.copied()]
        os.close(other_end)
        assert {report.command: len(report.sums) for report in reports} == {1: 6, 5: 1}
        host.send(Ping())
        assert isinstance(host.next(), Stats) and host.cell[0] == 0


def test_it_can_be_ended_while_its_disk_hangs(tmp_path: Path, shared: Shared) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with DiskHost(tmp_path, HANGING, str(fifo), str(UNTOUCHED)) as host:
        host.ready()
        host.map(HOST, shared.fd, HOST_BYTES)
        host.send(Copy(1, (Piece(HOST, 0, NVME, UNTOUCHED, MIB, 1),)), Ping())
        assert isinstance(host.next(), Stats)
    assert host.process.returncode == 0 and os.listdir(tmp_path) == ["fifo"]


@pytest.mark.parametrize("size, said", [(1 << 50, "lower memory.nvme_mib"), (4097, "multiple of 4096")])
def test_without_a_file_it_says_why_and_copies_in_memory_alone(tmp_path: Path, shared: Shared, size: int, said: str) -> None:  # fmt: skip
    with DiskHost(tmp_path, nvme_bytes=size) as host:
        facts = host.ready().facts
        assert (facts["backend"], facts["bytes"]) == ("none", 0)
        assert said in facts["why"] and str(tmp_path) not in facts["why"]
        host.map(HOST, shared.fd, HOST_BYTES)
        host.send(Copy(1, (Piece(HOST, 0, HOST, 8192, 4096, 1),)), Copy(2, (Piece(HOST, 0, NVME, 0, 4096, 1),)))
        done, refused = sorted((host.next(), host.next()), key=lambda report: report.command)
        assert isinstance(done, Copied) and not done.faults
        assert isinstance(refused, HostFailed)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("seed", seeds(4, 2 * CALLS))
def test_killed_at_any_call_it_leaves_nothing_and_the_next_one_starts_clean(tmp_path: Path, shared: Shared, seed: int) -> None:  # fmt: skip
    nth, half = divmod(random.Random(0).sample(range(2 * CALLS), 2 * CALLS)[seed], 2)
    data, dev_shm = shared.fill(seed), sorted(os.listdir("/dev/shm"))
    with DiskHost(tmp_path, DYING, str(nth + 1), str(half)) as host:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            host.map(HOST, shared.fd, HOST_BYTES)
            host.send(*(Copy(n, (Piece(HOST, 0, NVME, UNTOUCHED, PAGE, 30),)) for n in range(1, 7)))
            host.rest()
        assert host.process.wait(timeout=30) == -signal.SIGKILL
    assert os.listdir(tmp_path) == [] and sorted(os.listdir("/dev/shm")) == dev_shm
    assert shared.memory[: 30 * PAGE] == data[: 30 * PAGE]
    with DiskHost(tmp_path) as host:
        host.ready()
        host.map(HOST, shared.fd, HOST_BYTES)
        host.send(Copy(1, (Piece(NVME, UNTOUCHED, HOST, 30 * PAGE, PAGE, 30, (xxh3_64_intdigest(bytes(PAGE)),) * 30),)))
        assert host.copied().faults == ()  # nothing of the life before
