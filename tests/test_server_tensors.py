"""Memory that crosses the client socket: what is taken, what is refused by name, and that no descriptor is left whatever happens."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hexrt import values
from hexrt.memory.arena import F_ADD_SEALS, F_GET_SEALS, SEALS, sealed_copy
from hexrt.protocol import messages as m
from hexrt.protocol.framing import HEADER, frame
from hexrt.server.connection import MOST_UNREAD
from tests.seeds import seeds
from tests.serving import HELLO, RawClient, connected, limits, on_uvloop, open_files, serving, step, workflow

encode = msgspec.msgpack.encode


def named(handle: int, size: int) -> Any:
    return values.descriptor(handle, "uint8", (size,))


def submit(
    number: int, tensors: list[Any] | None = None, value: Any = None, follow: str = "none", **fields: Any
) -> dict[str, Any]:
    sent = {
        "type": "submit",
        "request": number,
        "workflow": workflow(step(inputs={"value": value}), **fields),
        "follow": follow,
    }
    return sent if tensors is None else sent | {"tensors": tensors}


def place(handle: int, offset: int, size: int) -> dict[str, int]:
    return {"handle": handle, "offset": offset, "bytes": size}


def memfd(size: int, *seals: str) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, F_ADD_SEALS, sum(SEALS[name] for name in seals))
    return fd


def sealed(*contents: bytes) -> int:
    return sealed_copy([memoryview(content) for content in contents])[0]


async def lives(client: RawClient, number: int = 900) -> None:
    assert isinstance(await client.ask(m.Statistics(number)), m.StatisticsReport)


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
        assert fcntl.fcntl(client.fds[0], F_GET_SEALS) & sum(SEALS.values()) == sum(SEALS.values())
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
async def test_memory_is_closed_where_the_backend_waits_fails_or_answers_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as other:
        before = open_files()
        fd = sealed(bytes(5000))
        async with connected(here.path) as client:
            await client.send_with(submit(1, [place(1, 0, 5000)], named(1, 5000), name="bug"), fd)
            answer = await client.next()
            assert isinstance(answer, m.Refused) and answer.error.kind == "invariant_violation"
            await client.send_with(submit(2, [place(1, 0, 5000)], named(1, 5000), "result", name="late"), fd)
            while len(here.backend.runs) < 2:
                await lives(other)
        os.close(fd)
        await lives(other)
        here.backend.gate.set()
        run = list(here.backend.runs.values())[-1]
        await run.ended.wait()
        for each in here.backend.runs.values():
            each.memory.clear()
        await lives(other)
        assert open_files() == before


@on_uvloop
async def test_a_client_that_does_not_read_its_results_gets_only_so_many_made_and_later_all(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client, connected(here.path) as other:
        fd = sealed(b"y" * 5000)
        await client.send_with(submit(1, [place(1, 0, 5000)], named(1, 5000)), fd)
        os.close(fd)
        accepted = await client.next()
        files = open_files()
        await client.send(*(m.Result(n, accepted.run) for n in range(2, 202)))  # type: ignore[union-attr]
        for n in range(5):
            await lives(other, n)
        assert here.server.open_requests == 200 - MOST_UNREAD
        assert open_files() <= files + 2, "what is sent is no descriptor of the daemon's any more"
        answers = [await client.next() for _ in range(200)]
        assert [a.request for a in answers] == list(range(2, 202))  # type: ignore[union-attr]
        assert len(client.fds) == 200
        assert all(os.pread(fd, 5000, 0) == b"y" * 5000 for fd in client.fds)
        assert isinstance(await client.ask(m.Statistics(300)), m.StatisticsReport)


@on_uvloop
async def test_a_reader_that_leaves_its_results_unread_and_goes_takes_nothing_with_it(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as other:
        before = open_files()
        async with connected(here.path) as client:
            fd = sealed(b"y" * 5000)
            await client.send_with(submit(1, [place(1, 0, 5000)], named(1, 5000)), fd)
            os.close(fd)
            accepted = await client.next()
            await client.send(*(m.Result(n, accepted.run) for n in range(2, 102)))  # type: ignore[union-attr]
            await lives(other)
        await lives(other)
        here.backend.runs.popitem()[1].memory.clear()
        while here.server.clients > 1:
            await lives(other)
        assert open_files() == before and here.server.open_requests == 0


@on_uvloop
async def test_a_result_that_cannot_be_made_or_sent_is_refused_under_its_number(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", limits(max_frame=10_000)) as here, connected(here.path) as client:
        before = open_files()
        fd = sealed(bytes(5000))
        await client.send_with(submit(1, [place(1, 0, 5000)], named(1, 5000)), fd)
        os.close(fd)
        accepted = await client.next()
        run = here.backend.runs[accepted.run]  # type: ignore[union-attr]
        run.outputs["b"] = msgspec.Raw(encode("x" * 10_000))
        answer = await client.ask(m.Result(2, run.id))
        assert isinstance(answer, m.Refused) and answer.request == 2 and "max_frame_mib" in answer.error.message
        del run.outputs["b"]
        kept = dict(run.memory)
        run.memory[2] = None  # type: ignore[assignment]
        answer = await client.ask(m.Result(3, run.id))
        assert isinstance(answer, m.Refused) and answer.request == 3 and answer.error.kind == "invariant_violation"
        assert [type(bug) for bug in here.bugs] == [AttributeError]
        run.memory.clear()
        run.memory.update(kept)
        answer = await client.ask(m.Result(4, run.id))
        assert isinstance(answer, m.RunResult) and len(client.fds) == 1 and here.server.open_requests == 0
        run.memory.clear()
        kept.clear()
        os.close(client.fds.pop())
        assert open_files() == before


ASK_AS = """
import os, socket, sys
os.setgroups([]); os.setgid(4321); os.setuid(1234)
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
for message in sys.argv[2:]:
    s.sendall(bytes.fromhex(message))
    data, fds, flags, _ = socket.recv_fds(s, 1 << 16, 100)
    print(len(fds), b"not_found" in data, b"secret" in data)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take on another user's identity")
@on_uvloop
async def test_another_user_gets_neither_bytes_nor_a_descriptor(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        here.path.chmod(0o666)
        for folder in (tmp_path, *tmp_path.parents):
            if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
                folder.chmod(folder.stat().st_mode | 0o011)
        fd = sealed(b"secret" * 1000)
        await client.send_with(submit(1, [place(1, 0, 6000)], named(1, 6000)), fd)
        os.close(fd)
        accepted = await client.next()
        run = accepted.run  # type: ignore[union-attr]
        stolen = submit(4, [place(1, 0, 6000)], named(1, 6000))  # a handle means nothing without a memfd of one's own
        asks = [HELLO, m.Result(1, run), m.Watch(2, run), m.Status(3, run), stolen]
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ASK_AS, str(here.path), *(frame(encode(ask)).hex() for ask in asks), stdout=-1
        )
        out, _ = await child.communicate()
        assert child.returncode == 0
        lines = out.decode().splitlines()
        assert lines[0] == "0 False False" and lines[1:4] == ["0 True False"] * 3 and lines[4] == "0 False False"


@pytest.mark.parametrize("seed", seeds(15, 500))
@on_uvloop
async def test_memory_goes_with_its_own_message_however_the_stream_is_cut(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        before = open_files()
        expected: dict[int, bytes] = {}
        kinds = []
        for n in range(1, 30):
            kind = chance.choice(["plain", "tensors", "tensors", "refused", "statistics"])
            kinds.append(kind)
            content = os.urandom(chance.choice([10, 5000, 200_000]))
            if kind == "tensors":
                expected[n] = content
                message: Any = submit(
                    n, [place(n, 0, len(content))], [named(n, len(content)), "t" * chance.randrange(9000)], "result"
                )
            elif kind == "refused":
                message = submit(n, [place(1, 0, len(content) + 1)])
            else:
                message = submit(n, follow="result") if kind == "plain" else m.Statistics(n)
            data = frame(encode(message))
            fds = [sealed(content)] if kind in ("tensors", "refused") else []
            await send_cut(client, data, fds, chance)
        await check_answers(client, kinds, expected)
        for run in here.backend.runs.values():
            run.memory.clear()
        assert open_files() == before and here.server.open_requests == 0 and not here.bugs


async def send_cut(client: RawClient, data: bytes, fds: list[int], chance: random.Random) -> None:
    cuts = sorted(chance.sample(range(1, len(data)), min(chance.randrange(4), len(data) - 1)))
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        part = data[start:end]
        if fds:
            part = part[socket.send_fds(client.sock, [part], fds) :]
            os.close(fds.pop())
        await client.send_bytes(part)
        if chance.random() < 0.3:
            await asyncio.sleep(0)


async def check_answers(client: RawClient, kinds: list[str], expected: dict[int, bytes]) -> None:
    due = sum({"plain": 2, "tensors": 2}.get(kind, 1) for kind in kinds)
    for _ in range(due):
        answer = await client.next()
        kind = kinds[answer.request - 1]  # type: ignore[union-attr, operator]
        if isinstance(answer, m.RunResult) and kind == "tensors":
            (tensor,) = answer.tensors
            fd = client.fds.pop(0)
            assert os.pread(fd, tensor.bytes, tensor.offset) == expected[answer.request]
            os.close(fd)
        else:
            assert isinstance(answer, m.Refused) == (kind == "refused"), (kind, answer)
    assert not client.fds


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
