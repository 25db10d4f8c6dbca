"""File descriptors between the daemon and a host: they come in the order of their messages, and none is left behind."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from hexrt.devices.channel import Channel
from hexrt.devices.link import HostLink
from hexrt.errors import InvariantViolation
from hexrt.protocol.host import FIRST_SEGMENT, VERSION, FromHost, Hello, Map, Ping

pytestmark = pytest.mark.timeout(60)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def memfd(content: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, content)
    return fd


class Pair:
    """Two channels. `take` is called for each frame that the second receives."""

    def __init__(self, takes_fds: bool, take: Callable[[Pair, bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        self.closed: list[str] = []
        self.enough = loop.create_future()
        self.here = Channel(loop, ours, 1 << 26, lambda frames: None, lambda reason: None)
        self._take = take
        self.there = Channel(loop, theirs, 1 << 26, self.on_frames, self.on_close, takes_fds)

    def on_frames(self, frames: list[bytes]) -> None:
        for frame in frames:
            self._take(self, frame)

    def end(self) -> None:
        if not self.enough.done():
            self.enough.set_result(None)

    def on_close(self, reason: str) -> None:
        self.closed.append(reason)
        self.end()

    def close(self) -> None:
        self.here.close("closed")
        self.there.close("closed")


@pytest.mark.parametrize("filler_bytes", [0, 3000, 3 << 20])
async def test_descriptors_come_in_the_order_of_their_messages_however_much_waits(filler_bytes: int) -> None:
    before, found = open_fds(), []

    def take(pair: Pair, frame: bytes) -> None:
        if not frame.strip(b"."):
            return
        count, number = frame.split()
        for _ in range(int(count)):
            fd = pair.there.take_fd()
            assert not os.get_inheritable(fd)
            found.append(os.pread(fd, 10, 0))
            os.close(fd)
        if number == b"last":
            pair.end()

    pair = Pair(True, take)
    expected = []
    for number in range(40):
        count = number % 3
        names = [b"%d.%d" % (number, i) for i in range(count)]
        fds = [memfd(name) for name in names]
        pair.here.send(b"%d %d" % (count, number), fds)
        pair.here.send(b"." * filler_bytes)
        for fd in fds:
            os.close(fd)  # at once: what waits is the channel's own
        expected += names
    pair.here.send(b"0 last")
    assert (pair.here.unsent_bytes > 0) == (filler_bytes > 10_000)
    await pair.enough
    assert found == expected
    assert pair.here.unsent_bytes == 0
    pair.close()
    assert open_fds() == before


async def test_a_message_without_its_descriptor_is_an_error_that_says_so() -> None:
    def take(pair: Pair, frame: bytes) -> None:
        with pytest.raises(InvariantViolation, match="without its file descriptor"):
            pair.there.take_fd()
        pair.end()

    pair = Pair(True, take)
    pair.here.send(b"map")
    await pair.enough
    pair.close()


async def test_closing_lets_go_of_what_was_not_taken_and_of_what_was_not_sent() -> None:
    before = open_fds()
    pair = Pair(True, lambda pair, frame: pair.end())
    fds = [memfd(b"x") for _ in range(4)]
    pair.here.send(b"first", fds)
    await pair.enough
    for _ in range(4):
        pair.here.send(b"." * (4 << 20), fds)
    assert open_fds() > before + 8 + 2
    for fd in fds:
        os.close(fd)
    pair.close()
    assert open_fds() == before


async def test_an_end_that_wants_no_descriptors_is_left_none() -> None:
    pair = Pair(False, lambda pair, frame: pair.end())
    before = open_fds()
    fd = memfd(b"x")
    pair.here.send(b"first", [fd])
    os.close(fd)
    await pair.enough
    assert open_fds() == before
    pair.close()


async def test_descriptors_that_were_cut_off_close_the_channel_by_name() -> None:
    pair = Pair(True, lambda pair, frame: None)
    fd = memfd(b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 3, hard))
    try:
        pair.here.send(b"first", [fd] * 250)
        pair.there.read_nowait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert pair.closed == ["read failed: file descriptors were cut off: too many are open"]
    os.close(fd)
    pair.close()


class Life:
    """A real pool host under a HostLink."""

    def __init__(self, tmp_path: Any) -> None:
        loop = asyncio.get_running_loop()
        self.ready = loop.create_future()
        self.died = loop.create_future()
        hello = Hello(VERSION, 1, "pool:0", str(tmp_path), str(tmp_path), {"max_output_bytes": 1 << 20})
        self.reports: asyncio.Queue[FromHost] = asyncio.Queue()
        self.link = HostLink(loop, "pool", hello, self.on_reports, self.on_death, dict(os.environ))

    def on_reports(self, link: HostLink, reports: list[FromHost]) -> None:
        for report in reports:
            self.reports.put_nowait(report)

    def on_death(self, link: HostLink, reason: str) -> None:
        self.died.set_result(reason)


async def test_a_host_keeps_no_descriptor_of_a_thousand_maps_and_forgets_what_is_unmapped(tmp_path: Any) -> None:
    life = Life(tmp_path)
    await life.reports.get()
    host_fds = f"/proc/{life.link.pid}/fd"
    ours, theirs = open_fds(), len(os.listdir(host_fds))
    fd = memfd(b"x" * 4096)
    for number in range(1000):
        life.link.map(FIRST_SEGMENT + number, fd, 4096)
    assert len(life.link.mapped) == 1000
    for number in range(1000):
        life.link.unmap(FIRST_SEGMENT + number)
    os.close(fd)
    life.link.send([Ping()])
    await life.reports.get()
    assert not life.link.mapped
    assert len(os.listdir(host_fds)) == theirs
    assert open_fds() == ours
    life.link.close()


async def test_a_host_killed_in_the_middle_of_its_maps_leaves_no_descriptor_here(tmp_path: Any) -> None:
    before = open_fds()
    life = Life(tmp_path)
    await life.reports.get()
    fd = memfd(b"x" * 4096)
    os.kill(life.link.pid, signal.SIGSTOP)
    for number in range(1000):  # more than the socket takes: the rest waits here
        life.link.send([Map(FIRST_SEGMENT + number, 4096), *[Ping()] * 1000], (fd,))
    os.close(fd)
    assert life.link.channel.unsent_bytes > 0
    life.link.kill()
    assert await life.died == "SIGKILL"
    assert open_fds() == before


async def test_a_map_without_its_descriptor_ends_the_host_and_says_why(tmp_path: Any) -> None:
    life = Life(tmp_path)
    await life.reports.get()
    life.link.send([Map(FIRST_SEGMENT, 4096)])
    assert "without its file descriptor" in await life.died
