"""Results with memory to clients that read slowly, not at all, or are somebody else; and streams cut anywhere."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hexrt.protocol import messages as m
from hexrt.protocol.framing import frame
from hexrt.server.connection import MOST_UNREAD
from tests.passing import lives, named, place, sealed, submit
from tests.seeds import seeds
from tests.serving import HELLO, RawClient, connected, limits, on_uvloop, open_files, serving

encode = msgspec.msgpack.encode


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
async def test_a_reader_that_leaves_its_results_unread_for_too_long_is_cut_off(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", limits(half_frame_s=0.1)) as here, connected(here.path) as client:
        fd = sealed(b"y" * 5000)
        await client.send_with(submit(1, [place(1, 0, 5000)], named(1, 5000)), fd)
        os.close(fd)
        accepted = await client.next()
        await client.send(*(m.Result(n, accepted.run) for n in range(2, 102)))  # type: ignore[union-attr]
        async with connected(here.path) as other:
            while here.server.clients > 1:
                await lives(other)
        answers = 0
        while await client.next() is not None:
            answers += 1
        assert answers == len(client.fds) == MOST_UNREAD
