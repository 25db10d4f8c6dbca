"""Patterns written on a device come back from DEVICE, HOST and NVME in any order, through the real hosts of both, bit by bit."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hexrt.devices.link import HostLink
from hexrt.devices.places import Places
from hexrt.memory.keeper import DISK, Keeper
from hexrt.memory.lru import NextUse
from hexrt.memory.pool import Level, Page, PagePool
from hexrt.protocol.host import DEVICE, FIRST_SEGMENT, HOST, VERSION, Copied, Copy, FromHost, Hello, Map, Piece, Ready
from hexrt.scheduling.links import Links
from tests.seeds import seeds

pytestmark = pytest.mark.timeout(120)

PAGE = 8192
MIB = 1 << 20
SEGMENT, BACK = FIRST_SEGMENT, FIRST_SEGMENT + 1  # patterns to be written, and pages read back
COUNT = 320
"""Pages: two and a half times what the device holds, more than it and HOST hold together."""
SIZES = {"arena_mib": 1, "host_mib": 1, "nvme_mib": 8}


class Host:
    """A real host process, and as much of a device as the keeper asks for."""

    def __init__(self, name: str, program: str, folder: Path, heard: Any) -> None:
        settings = {
            "max_output_bytes": MIB,
            "cpu": {"threads": 1, "arena_mib": SIZES["arena_mib"]},
            "memory": {"nvme_path": str(folder), "nvme_bytes": SIZES["nvme_mib"] * MIB},
        }
        hello = Hello(VERSION, 1, name, str(folder), str(folder), settings)
        self.name, self.ready, self.command = name, False, 0
        self.link = HostLink(asyncio.get_running_loop(), program, hello, lambda _, r: heard(self, r), self._died, dict(os.environ))  # fmt: skip

    def _died(self, link: HostLink, reason: str) -> None:
        raise AssertionError(f"{self.name} died: {reason}")

    def next_command(self) -> int:
        self.command += 1
        return self.command


class Machine:
    def __init__(self, folder: Path) -> None:
        self.keeper = Keeper(PagePool(NextUse()), Links())
        self.keeper.add_host(SIZES["host_mib"] * MIB)
        self.keeper.add_nvme(SIZES["nvme_mib"] * MIB)
        self.keeper.add_device("cpu:0", SIZES["arena_mib"] * MIB)
        self.pool = self.keeper.pool
        self.cls = self.pool.add_class(self.pool.top(self.keeper.page_class("cpu:0", PAGE)), PAGE, False)
        self.hosts = {n: Host(n, p, folder, self.heard) for n, p in (("cpu:0", "cpu"), (DISK, "disk"))}
        self.own: dict[tuple[str, int], asyncio.Future[Copied]] = {}  # copies that are not the keeper's
        self.changed = asyncio.Event()
        self.places = Places()
        for place, size in ((HOST, SIZES["host_mib"] * MIB), (SEGMENT, MIB), (BACK, MIB)):
            fd = os.memfd_create("test", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
            for host in self.hosts.values():
                host.link.map(place, fd, size, writable=place != SEGMENT)
            self.places.map(Map(place, size, writable=True), fd)

    def heard(self, host: Host, reports: list[FromHost]) -> None:
        for report in reports:
            if isinstance(report, Ready):
                host.ready = True
            elif isinstance(report, Copied):
                if (own := self.own.pop((host.name, report.command), None)) is not None:
                    own.set_result(report)
                else:
                    assert not report.faults
                    self.keeper.copied(host.name, report)
        self.keeper.check_integrity()
        self.send()
        self.changed.set()

    def send(self) -> None:
        sent: dict[str, list[Any]] = {}
        self.keeper.decide(0, self.hosts, sent)
        for name, messages in sent.items():
            self.hosts[name].link.send(messages)

    async def until(self, true: Any) -> None:
        while not true():
            self.changed.clear()
            self.send()
            await self.changed.wait()

    async def copy(self, *pieces: Piece) -> None:
        host = self.hosts["cpu:0"]
        command = host.next_command()
        done = self.own[host.name, command] = asyncio.get_running_loop().create_future()
        host.link.send([Copy(command, pieces)])
        assert not (await done).faults

    async def write(self, page: Page, content: bytes) -> None:
        """Onto the device."""
        self.places.view(SEGMENT)[:PAGE] = content
        await self.copy(Piece(SEGMENT, 0, DEVICE, self.pool.offset(page, Level.DEVICE), PAGE, 1))

    async def read(self, page: Page) -> bytes:
        """From the device."""
        await self.copy(Piece(DEVICE, self.pool.offset(page, Level.DEVICE), BACK, 0, PAGE, 1))
        return bytes(self.places.view(BACK)[:PAGE])

    async def bring_up(self, page: Page) -> None:
        """Pins the page and waits until it is on the device, hop by hop."""
        pool, keeper = self.pool, self.keeper
        pool.pin((page,))
        while not pool.has(page, Level.DEVICE):
            await self.until(lambda: not pool.moving(page))
            if keeper.prices.below_top(page) == 2:
                keeper.lift((page,))
            elif keeper.prices.below_top(page) == 1 and keeper.make_room(self.cls, 1):
                keeper.load((page,), "cpu:0", lambda faults: None)
            self.send()
            if not pool.has(page, Level.DEVICE) and len(keeper.traffic):
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    made = Machine(tmp_path)
    await made.until(lambda: all(host.ready for host in made.hosts.values()))
    yield made
    for host in made.hosts.values():
        host.link.close()


@pytest.mark.parametrize("seed", seeds(2, 30))
async def test_patterns_written_on_the_device_come_back_from_every_tier(machine: Machine, seed: int) -> None:
    chance, pool, keeper = random.Random(seed), machine.pool, machine.keeper
    content: dict[Page, bytes] = {}
    while len(content) < COUNT:
        await machine.until(lambda: keeper.make_room(machine.cls, 8))
        for page in pool.create(machine.cls, 8):
            content[page] = chance.randbytes(PAGE)
            await machine.write(page, content[page])
            pool.unpin((page,))
        keeper.freed()
    counts = [sum(pool.has(page, level) for page in content) for level in Level]
    assert counts[0] <= 128 and counts[1] <= 128 and counts[2] > 64, counts
    for page in chance.sample(sorted(content), 200):
        pool.set_next_use((page,), chance.choice([1, 3, 20]))
        await machine.bring_up(page)
        assert await machine.read(page) == content[page]
        if chance.random() < 0.2:  # written again: what lies below is void
            pool.write((page,))
            content[page] = chance.randbytes(PAGE)
            await machine.write(page, content[page])
        pool.unpin((page,))
        keeper.freed()
    for page in content:
        await machine.bring_up(page)
        assert await machine.read(page) == content[page]
        pool.unpin((page,))
    await machine.until(lambda: not len(keeper.traffic))
    pool.release(content)
    assert [tier.pages for tier in pool.tiers] == [0, 0, 0]
    keeper.check_integrity()
