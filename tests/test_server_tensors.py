"""Memory that crosses the client socket: what is taken, what is refused by name, and that no descriptor is left whatever happens."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hexrt import values
from hexrt.memory.arena import SEALS
from hexrt.protocol import messages as m
from hexrt.protocol.framing import HEADER, frame
from tests.passing import lives, named, place, sealed, submit
from tests.serving import HELLO, RawClient, connected, limits, on_uvloop, open_files, serving

encode = msgspec.msgpack.encode


def memfd(size: int, *seals: str) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sum(SEALS[name] for name in seals))
    return fd


async def ended(client: RawClient) -> str:
    """The reason that the last message before the end gives."""
    answer = await client.next()
    assert isinstance(answer, m.Refused) and answer.request is None and answer.error.where == "tensors", answer
    assert await client.next() is None
    return answer.error.message


@on_uvloop
async def test_tensors_go_in_by_one_memfd_and_come_back_by_one_that_nobody_can_change(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        before = open_files()
        contents = (b"a" * 5000, b"b" * 70_000)
        fd = sealed(*contents)
        tensors = [place(1, 0, 5000), place(2, 5056, 70_000)]
        await client.send_with(submit(1, tensors, [named(2, 70_000), named(1, 5000), named(2, 70_000)], "result"), fd)
        os.close(fd)
        assert isinstance(await client.next(), m.Accepted)
        result = await client.next()
        assert isinstance(result, m.RunResult) and result.request == 1 and len(client.fds) == 1
        assert values.handles(result.outputs["a"]) == (2, 1)
        found = {t.handle: os.pread(client.fds[0], t.bytes, t.offset) for t in result.tensors}
        assert found == {1: contents[0], 2: contents[1]}
        assert fcntl.fcntl(client.fds[0], fcntl.F_GET_SEALS) & sum(SEALS.values()) == sum(SEALS.values())
        with pytest.raises(PermissionError):
            os.ftruncate(client.fds[0], 0)
        os.close(client.fds.pop())
        (run,) = here.backend.runs.values()
        run.memory.clear()
        assert open_files() == before and here.server.open_requests == 0


def directory() -> int:
    return os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def regular() -> int:
    fd, name = tempfile.mkstemp()
    os.unlink(name)
    os.ftruncate(fd, 9000)
    return fd


FILES: dict[str, tuple[Callable[[], int], str]] = {
    "no seals": (lambda: memfd(9000), "SHRINK, GROW, WRITE"),
    "not sealed against writing": (lambda: memfd(9000, "SHRINK", "GROW"), "missing: WRITE"),
    "may be truncated later": (lambda: memfd(9000, "GROW", "WRITE"), "missing: SHRINK"),
    "may grow later": (lambda: memfd(9000, "SHRINK", "WRITE"), "missing: GROW"),
    "nothing in it": (lambda: memfd(0, "SHRINK", "GROW", "WRITE"), "0 bytes"),
    "a regular file": (regular, "another file"),
    "a directory": (directory, "another file"),
    "only a path": (lambda: os.open("/", os.O_PATH | os.O_CLOEXEC), "another file"),
    "a socket": (lambda: socket.socket(socket.AF_UNIX).detach(), "another file"),
    "an event": (lambda: os.eventfd(0, os.EFD_CLOEXEC), "another file"),
    "a device": (lambda: os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC), "another file"),
}


@on_uvloop
async def test_a_file_that_is_no_sealed_memfd_is_refused_and_closed_and_the_connection_lives(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        before = open_files()
        for name, (make, text) in FILES.items():
            fd = make()
            await client.send_with(submit(7, [place(1, 0, 5000)], named(1, 5000)), fd)
            os.close(fd)
            answer = await client.next()
            assert isinstance(answer, m.Refused) and answer.request == 7, name
            assert answer.error.where == "tensors" and text in answer.error.message, (name, answer.error)
            await lives(client)
            assert open_files() == before, name
        assert not here.backend.runs and not here.bugs


RANGES: list[tuple[list[Any], str]] = [
    ([place(1, 0, 9001)], "tensors[0].bytes"),
    ([place(1, 0, 10), place(2, 9001, 1)], "tensors[1].offset"),
    ([place(1, 0, 10), place(2, 9000, 1)], "tensors[1].bytes"),
    ([place(1, 2**63 - 1, 2**63 - 1)], "tensors[0].offset"),
    ([place(1, 1, 2**63 - 1)], "tensors[0].bytes"),
    ([place(1, 2**63, 1)], "tensors[0].offset"),
    ([place(1, -1, 10)], "tensors[0].offset"),
    ([place(1, 0, -1)], "tensors[0].bytes"),
    ([place(1, 0, 0)], "tensors[0].bytes"),
    ([place(-1, 0, 10)], "tensors[0].handle"),
    ([place(0, 0, 10)], "tensors[0].handle"),
    ([place(2**32, 0, 10)], "tensors[0].handle"),
    ([place(1, 0, 10), place(2, 20, 5), place(1, 40, 10)], "tensors[2].handle"),
    ([place(1, 100, 10), place(2, 0, 101)], "tensors[0].offset"),
    ([place(1, 0, 10), place(2, 0, 10)], "tensors[1].offset"),
    ([place(1, 0, 9000), place(2, 10, 1), place(3, 20, 1)], "tensors[1].offset"),
    ([place(1, 0, 10), {"handle": 2, "offset": 10}], "tensors[1].bytes"),
    ([place(1, 0, 10) | {"path": "/"}], "tensors[0].path"),
    ([[1, 0, 10]], "tensors[0]"),
    ([place(1, 0, 10), {"handle": 2, "offset": 10.5, "bytes": 1}], "tensors[1].offset"),
    ([place(i + 1, i, 1) for i in range(10_001)], "tensors"),
]


@on_uvloop
async def test_a_tensor_that_does_not_lie_in_the_memfd_by_itself_is_refused_by_its_field(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        before = open_files()
        fd = sealed(bytes(9000))
        for tensors, where in RANGES:
            await client.send_with(submit(7, tensors, None), fd)
            answer = await client.next()
            assert isinstance(answer, m.Refused) and answer.request == 7, where
            assert answer.error.kind == "bad_request" and answer.error.where == where, (where, answer.error)
            await lives(client)
        os.close(fd)
        assert open_files() == before and not here.backend.runs and not here.bugs


@on_uvloop
async def test_tensors_that_come_without_a_descriptor_are_refused_and_the_next_ones_are_not_mixed_up(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        before = open_files()
        fd = sealed(b"x" * 5000)
        await client.send(
            submit(1, [place(1, 0, 5000)], named(1, 5000)), {"type": "nope", "request": 2}, m.Statistics(3)
        )
        await client.send_with(submit(4, [place(1, 0, 5000)], named(1, 5000)), fd)
        os.close(fd)
        answers = [await client.next() for _ in range(4)]
        assert [a.request for a in answers] == [1, 2, 3, 4]  # type: ignore[union-attr]
        assert isinstance(answers[0], m.Refused) and "no file descriptor" in answers[0].error.message
        assert isinstance(answers[3], m.Accepted)
        (run,) = here.backend.runs.values()
        assert bytes(run.memory.pop(1)) == b"x" * 5000
        assert open_files() == before


@on_uvloop
async def test_a_descriptor_that_belongs_to_no_message_ends_the_connection(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here:
        before = open_files()
        fd = sealed(bytes(5000))
        for message in (m.Statistics(1), submit(1), m.Forget(1, 2), m.Cancel(1, b"r" * 16)):
            async with connected(here.path) as client:
                await client.send_with(message, fd)
                while not isinstance(answer := await client.next(), m.Refused) or answer.request is not None:
                    assert answer is not None
                assert "names no tensors" in answer.error.message and await client.next() is None
        async with connected(here.path, hello=False) as client:
            await client.send_with(HELLO, fd)
            assert isinstance(await client.next(), m.Welcome)
            assert "names no tensors" in await ended(client)
        async with connected(here.path) as client:
            await client.send_with({"type": "submit", "request": 1, "workflow": 3}, fd)
            assert isinstance(await client.next(), m.Refused), "an undecodable message takes its descriptor along"
            await lives(client)
        async with connected(here.path) as client:
            await client.send_with(msgspec.Raw(b"\xc1"), fd)
            assert await client.next() is not None and await client.next() is None
        os.close(fd)
        assert open_files() == before and not here.bugs


@on_uvloop
async def test_more_than_one_descriptor_for_a_message_ends_the_connection(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here:
        before = open_files()
        fd = sealed(bytes(5000))
        request = submit(1, [place(1, 0, 5000)], named(1, 5000))
        for count in (2, 3, 253):
            async with connected(here.path) as client:
                await client.send_with(request, *[fd] * count)
                assert "one file descriptor at most" in await ended(client)
        async with connected(here.path) as client:
            data = frame(encode(request))
            for i in range(1000):
                try:
                    socket.send_fds(client.sock, [data[i : i + 1]], [fd])
                except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                    break
            assert "one file descriptor at most" in await ended(client)
        os.close(fd)
        assert open_files() == before and not here.backend.runs


@on_uvloop
async def test_a_thousand_submits_with_memory_leave_no_descriptor(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        before = open_files()
        fd = sealed(bytes(5000))
        for n in range(1000):
            await client.send_with(submit(n, [place(1, 0, 5000)], named(1, 5000)), fd)
            assert isinstance(await client.next(), m.Accepted)
            run = here.backend.runs.popitem()[1]
            run.memory.clear()
        os.close(fd)
        assert open_files() == before


@on_uvloop
async def test_a_client_that_dies_half_way_leaves_no_descriptor(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as other:
        before = open_files()
        data = frame(encode(submit(1, [place(1, 0, 5000)], named(1, 5000))))
        for cut in (1, 3, 4, 5, 20, len(data) - 1):
            fd = sealed(bytes(5000))
            async with connected(here.path) as client:
                socket.send_fds(client.sock, [data[:cut]], [fd])
                os.close(fd)
                if cut % 2:  # the daemon has read it before the end comes
                    await lives(other, cut)
            await lives(other, 100 + cut)
        assert open_files() == before and here.server.clients == 1 and not here.backend.runs


@on_uvloop
async def test_a_length_above_the_cap_with_a_descriptor_closes_both(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", limits(max_frame=1000)) as here:
        before = open_files()
        async with connected(here.path) as client:
            fd = sealed(bytes(5000))
            socket.send_fds(client.sock, [HEADER.pack(1001)], [fd])
            os.close(fd)
            answer = await client.next()
            assert isinstance(answer, m.Refused) and "1000 allowed" in answer.error.message
            assert await client.next() is None
        assert open_files() == before and here.server.clients == 0
