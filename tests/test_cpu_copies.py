"""Copies of a real CPU host: every bit comes back from wherever it was, and what lies outside its places is a fault by itself."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hexrt.cli.bench_copies import measure
from hexrt.devices.link import HostLink
from hexrt.devices.places import Places
from hexrt.protocol.host import (
    DEVICE,
    FIRST_SEGMENT,
    HOST,
    VERSION,
    Copied,
    Copy,
    CopyFault,
    FromHost,
    Hello,
    HostFailed,
    LoadModel,
    Map,
    Piece,
    Ready,
    ToHost,
)
from tests.seeds import seeds

pytestmark = pytest.mark.timeout(120)

PAGE = 8192
PAGES = 128
MIB = 1 << 20


class Device:
    """A CPU host with an arena of 1 MiB, HOST memory of as much that is mapped here too, and a segment it may only read."""

    def __init__(self, folder: Path, arena_mib: int) -> None:
        settings = {"max_output_bytes": MIB, "cpu": {"threads": 1, "arena_mib": arena_mib}}
        hello = Hello(VERSION, 1, "cpu:0", str(folder), str(folder), settings)
        self.reports: asyncio.Queue[FromHost | str] = asyncio.Queue()
        self.link = HostLink(asyncio.get_running_loop(), "cpu", hello, self.on_reports, self.on_death, dict(os.environ))
        self.places = Places()
        for place, writable in ((HOST, True), (FIRST_SEGMENT, False)):
            fd = os.memfd_create("test", os.MFD_CLOEXEC)
            os.ftruncate(fd, MIB)
            self.link.map(place, fd, MIB, writable)
            self.places.map(Map(place, MIB, writable=True), fd)
        self.command = 0

    def on_reports(self, link: HostLink, reports: list[FromHost]) -> None:
        for report in reports:
            self.reports.put_nowait(report)

    def on_death(self, link: HostLink, reason: str) -> None:
        self.reports.put_nowait(reason)

    async def ask(self, message: ToHost) -> FromHost | str:
        self.link.send([message])
        return await self.reports.get()

    async def copy(self, *pieces: Piece) -> Copied:
        self.command += 1
        report = await self.ask(Copy(self.command, pieces))
        assert isinstance(report, Copied), report
        assert report.command == self.command
        assert report.start_ns <= report.end_ns
        return report


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[Device]:
    made = Device(tmp_path, 1)
    ready = await made.reports.get()
    assert isinstance(ready, Ready), ready
    assert ready.facts["links"]["copy_bytes_per_s"] > 1e8
    assert 0 < ready.facts["links"]["latency_ns"] < 1e9
    yield made
    made.link.close()


def page(number: int) -> bytes:
    return random.Random(number).randbytes(PAGE)


def runs(draw: random.Random, pages: list[int]) -> list[list[int]]:
    """`pages` cut into runs of one to five."""
    cut = []
    while pages:
        count = draw.randint(1, 5)
        cut.append(pages[:count])
        pages = pages[count:]
    return cut


@pytest.mark.parametrize("seed", seeds(2, 40))
async def test_what_lies_on_the_device_comes_back_bit_by_bit_whatever_the_order(device: Device, seed: int) -> None:
    draw = random.Random(seed)
    host = device.places.view(HOST)
    half = PAGES // 2
    where = list(range(half))  # of page n on the device
    for number in range(half):
        host[number * PAGE : (number + 1) * PAGE] = page(number)
    await device.copy(Piece(HOST, 0, DEVICE, 0, PAGE, half))
    for _ in range(6):
        host[:] = draw.randbytes(MIB)
        order = draw.sample(range(half), half)
        slots = draw.sample(range(PAGES), half)
        out = [Piece(DEVICE, where[n] * PAGE, HOST, slot * PAGE, PAGE, 1) for n, slot in zip(order, slots, strict=True)]
        assert (await device.copy(*out)).bytes == half * PAGE
        await device.copy(Piece(FIRST_SEGMENT, 0, DEVICE, 0, PAGE, PAGES))  # nothing is left on the device
        back, at = [], 0
        for run in runs(draw, draw.sample(order, half)):
            for n in run:
                back.append(Piece(HOST, slots[order.index(n)] * PAGE, DEVICE, at * PAGE, PAGE, 1))
                where[n] = at
                at += 1
            back.append(Piece(DEVICE, where[run[0]] * PAGE, DEVICE, (at - len(run) + half) * PAGE, PAGE, len(run)))
            for n in run:
                where[n] += half
        assert not (await device.copy(*back)).faults
        for n in range(half):
            where[n] -= half if draw.random() < 0.5 else 0  # both copies are whole: go on from either
    await device.copy(*(Piece(DEVICE, where[n] * PAGE, HOST, n * PAGE, PAGE, 1) for n in range(half)))
    assert [bytes(host[n * PAGE : (n + 1) * PAGE]) == page(n) for n in range(half)] == [True] * half


async def test_the_pages_of_a_piece_outside_are_faults_and_the_others_are_copied(device: Device) -> None:
    host = device.places.view(HOST)
    host[:PAGE] = page(1)
    copied = await device.copy(
        Piece(HOST, 0, DEVICE, 0, PAGE, 1),
        Piece(HOST, MIB - PAGE, DEVICE, 0, PAGE, 2),
        Piece(DEVICE, 0, HOST, PAGE, PAGE, 1),
        Piece(HOST, 0, 7, 0, PAGE, 1),
        Piece(HOST, 0, FIRST_SEGMENT, 0, PAGE, 1),
        Piece(DEVICE, -PAGE, HOST, 0, PAGE, 1),
        Piece(DEVICE, 0, HOST, 2 * PAGE, PAGE, 1),
    )
    assert copied.bytes == 3 * PAGE
    assert copied.faults == (
        CopyFault(1, "io", "bytes 1040384 to 1056768 are outside place 1, which has 1048576"),
        CopyFault(2, "io", "bytes 1040384 to 1056768 are outside place 1, which has 1048576"),
        CopyFault(4, "io", "no place 7 is mapped"),
        CopyFault(5, "io", "place 16 is mapped for reading alone"),
        CopyFault(6, "io", "bytes -8192 to 0 are outside place 0, which has 1048576"),
    )
    assert bytes(host[: 3 * PAGE]) == page(1) * 3


async def test_a_move_within_one_place_may_overlap_itself(device: Device) -> None:
    host = device.places.view(HOST)
    content = random.Random(3).randbytes(9 * PAGE)
    host[: 9 * PAGE] = content
    await device.copy(Piece(HOST, 0, HOST, PAGE, PAGE, 9), Piece(HOST, 0, DEVICE, 0, PAGE, 10))
    await device.copy(Piece(DEVICE, PAGE, DEVICE, 0, PAGE, 9), Piece(DEVICE, 0, HOST, 0, PAGE, 9))
    assert bytes(host[: 9 * PAGE]) == content


async def test_a_device_that_shares_the_hosts_memory_has_no_place_of_its_own(tmp_path: Path) -> None:
    device = Device(tmp_path, 0)
    assert isinstance(await device.reports.get(), Ready)
    copied = await device.copy(Piece(HOST, 0, DEVICE, 0, PAGE, 1), Piece(HOST, 0, HOST, PAGE, PAGE, 1))
    assert [(fault.page, fault.message) for fault in copied.faults] == [(0, "no place 0 is mapped")]
    assert copied.bytes == PAGE
    device.link.close()


async def test_a_model_before_there_is_memory_for_its_pages_fails_by_name(tmp_path: Path) -> None:
    settings = {"max_output_bytes": MIB, "cpu": {"threads": 1, "arena_mib": 0}}
    reports: asyncio.Queue[FromHost] = asyncio.Queue()

    def take(link: HostLink, found: list[FromHost]) -> None:
        for report in found:
            reports.put_nowait(report)

    link = HostLink(
        asyncio.get_running_loop(), "cpu", Hello(VERSION, 1, "cpu:0", str(tmp_path), str(tmp_path), settings),
        take, lambda link, reason: None, dict(os.environ),
    )  # fmt: skip
    await reports.get()
    link.send([LoadModel(1, "m", "nowhere", "float32", 16)])
    assert isinstance(await reports.get(), HostFailed)
    link.close()


def test_the_bench_of_copies_has_a_row_for_each_way_and_kind_of_run() -> None:
    rows = measure(12 * MIB, 360 << 10)
    runs = ("one run", "runs of 16 pages", "page by page")
    assert [row["name"] for row in rows] == [f"{way}, {run}" for way in ("host to device", "device to host") for run in runs]  # fmt: skip
    assert all(row["ratio"] > 0 and row["unit"] == "MB/s" for row in rows)
