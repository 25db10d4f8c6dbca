"""Hostile bytes on a real socket: each gets a named error for that connection alone, and the server lives on."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import msgspec
import psutil
import pytest

from hexrt.errors import BadRequest
from hexrt.protocol import messages as m
from hexrt.protocol.framing import HEADER, FrameSplitter, frame
from hexrt.server import refusals
from tests.seeds import seeds
from tests.serving import HELLO, RawClient, connected, limits, on_uvloop, serving, step, workflow

encode = msgspec.msgpack.encode


def submit_with(**fields: object) -> dict:
    return {"type": "submit", "request": 7, "workflow": workflow(step(**fields))}


async def lives(path: Path) -> None:
    async with connected(path) as other:
        assert isinstance(await other.ask(m.Statistics(1)), m.StatisticsReport)


async def refused_and_closed(client: RawClient) -> m.Refused:
    answer = await client.next()
    assert isinstance(answer, m.Refused) and answer.request is None, answer
    assert await client.next() is None
    return answer


NESTED = msgspec.Raw(b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0")
UNREADABLE = {
    "no msgpack": b"\xc1",
    "nothing": b"",
    "a truncated message": encode(m.List(1))[:-2],
    "more than one message": encode(m.List(1)) + b"\xc0",
    "a list": encode([1, 2]),
    "an unknown type": encode({"type": "nope"}),
    "no request number": encode({"type": "list"}),
    "a negative request number": encode({"type": "list", "request": -1}),
    "a huge request number": encode({"type": "list", "request": 2**64 - 1}),
    "a text for a request number": encode({"type": "list", "request": "1"}),
    "nesting before the number": encode({"type": "submit", "x": NESTED, "request": 1}),
    "a list that claims 4 G entries": encode({"type": "hello", "versions": msgspec.Raw(b"\xdd\xff\xff\xff\xff\x01")}),
    "text that is no UTF-8": encode({"type": "hello", "versions": [1], "client": msgspec.Raw(b"\xa2\xff\xfe")}),
    "a second hello": encode(HELLO),
}


@on_uvloop
async def test_an_unreadable_frame_is_refused_and_the_connection_closed_and_others_live(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here:
        for name, body in UNREADABLE.items():
            async with connected(here.path) as client:
                await client.send_bytes(frame(body))
                answer = await refused_and_closed(client)
                assert answer.error.kind == "bad_request" and answer.error.where, name
            await lives(here.path)


WRONG = [
    ({"type": "list", "request": 7, "limit": 0}, "limit"),
    ({"type": "list", "request": 7, "limit": 10**9}, "limit"),
    ({"type": "list", "request": 7, "state": "odd"}, "state"),
    ({"type": "list", "request": 7, "extra": 1}, "extra"),
    ({"type": "status", "request": 7}, "run"),
    ({"type": "status", "request": 7, "run": b"short"}, "run"),
    ({"type": "status", "request": 7, "run": "text"}, "run"),
    ({"type": "cancel", "request": 7, "run": b"r" * 16, "reason": "x" * 2000}, "reason"),
    ({"type": "submit", "request": 7}, "workflow"),
    ({"type": "submit", "request": 7, "workflow": {"steps": [], "durable": 1}}, "durable"),
    (submit_with(op=3), "steps[0].op"),
    (submit_with(id="a b"), "steps[0].id"),
    (submit_with(retries=-1), "steps[0].retries"),
    (submit_with(retries=10**12), "steps[0].retries"),
    (submit_with(deadline_s=float("nan")), "steps[0].deadline_s"),
    (submit_with(timeout_s=float("inf")), "steps[0].timeout_s"),
    (submit_with(timeout_s=0), "steps[0].timeout_s"),
    (submit_with(priority=1.5), "steps[0].priority"),
    (submit_with(params={1: 2}), "steps[0].params"),
    (submit_with(needs={"memory_bytes": -5}), "steps[0].needs.memory_bytes"),
    (submit_with(map={}), "steps[0].map.over"),
]


@on_uvloop
async def test_a_wrong_field_is_refused_by_its_path_and_the_connection_lives(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        for message, where in WRONG:
            answer = await client.ask(message)
            assert isinstance(answer, m.Refused) and answer.request == 7, (where, answer)
            assert answer.error.where == where and answer.error.kind == "bad_request"
        assert isinstance(await client.ask(m.Statistics(8)), m.StatisticsReport)
        assert not here.backend.runs and not here.bugs


@on_uvloop
async def test_a_hundred_thousand_levels_of_nesting_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        await client.send(submit_with(params=NESTED))
        answer = await client.next()
        assert isinstance(answer, m.Refused) and "nested too deeply" in answer.error.message
        await lives(here.path)


@on_uvloop
async def test_a_length_above_the_cap_is_refused_before_its_bytes_come(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", limits(max_frame=1000)) as here, connected(here.path) as client:
        await client.send_bytes(frame(encode(m.Statistics(1))) + HEADER.pack(1001))
        assert isinstance(await client.next(), m.StatisticsReport)
        assert "1000 allowed" in (await refused_and_closed(client)).error.message


@on_uvloop
async def test_requests_before_the_hello_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path, hello=False) as client:
        await client.send(m.List(1))
        assert "hello" in (await refused_and_closed(client)).error.message


@on_uvloop
async def test_a_client_of_another_version_is_told_both_versions(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path, hello=False) as client:
        await client.send(m.ClientHello((7, 8)))
        answer = await refused_and_closed(client)
        assert f"version {m.VERSION}" in answer.error.message and "7, 8" in answer.error.message
    async with serving(tmp_path / "t") as here, connected(here.path, hello=False) as client:
        assert (await client.ask(m.ClientHello((9, m.VERSION)))).version == m.VERSION


@on_uvloop
async def test_a_request_number_that_is_in_use_ends_the_connection(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        accepted = await client.ask({"type": "submit", "request": 1, "workflow": workflow(step(op="hold"))})
        await client.send(m.Result(2, accepted.run), m.Statistics(2))
        assert "in use" in (await refused_and_closed(client)).error.message


@on_uvloop
async def test_half_a_frame_and_a_missing_hello_are_cut_off_and_a_quiet_client_is_not(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "s", limits(half_frame_s=0.1)) as here,
        connected(here.path) as quiet,
        connected(here.path) as half,
        connected(here.path, hello=False) as silent,
        connected(here.path, hello=False) as trickling,
    ):
        await half.send_bytes(frame(encode(m.Statistics(1)))[:-3])
        await trickling.send_bytes(HEADER.pack(10)[:2])
        for client in (half, silent, trickling):
            assert await client.next() is None
        assert here.server.clients == 1
        assert isinstance(await quiet.ask(m.Statistics(1)), m.StatisticsReport)


@on_uvloop
async def test_frames_in_many_small_pieces_and_many_frames_in_one_piece_are_understood(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        for byte in frame(encode(m.Statistics(1))):
            await client.send_bytes(bytes((byte,)))
        assert (await client.next()).request == 1
        await client.send(*(m.Statistics(n) for n in range(2, 502)))
        assert [(await client.next()).request for _ in range(500)] == list(range(2, 502))


def mutated(random_: random.Random, body: bytes) -> bytes:
    """`body` with a few bytes changed, cut, doubled or put in."""
    content = bytearray(body)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(content) + 1)
        match random_.randrange(4):
            case 0 if at < len(content):
                content[at] = random_.randrange(256)
            case 1:
                del content[at : at + random_.randint(1, 8)]
            case 2:
                content[at:at] = random_.randbytes(random_.randint(1, 8))
            case _:
                content[at:at] = content[max(0, at - 16) : at]
    return bytes(content)


@pytest.mark.parametrize("seed", seeds(1, 350))
@on_uvloop
async def test_three_thousand_mutated_frames_leave_the_server_alive_and_its_memory_flat(
    tmp_path: Path, seed: int
) -> None:
    seeds = [
        encode(message)
        for message in (
            submit_with(inputs={"value": [1, {"x": b"y"}, 2.5]}, params={"deep": [[[1]]]}, after=["b"], retries=3),
            {"type": "submit", "request": 3, "workflow": workflow(step(op="hold")), "follow": "events"},
            m.List(4), m.Status(5, b"r" * 16), m.Watch(6, b"r" * 16), m.Result(7, b"r" * 16), m.Cancel(8, b"r" * 16, "why"),
            m.Forget(9, 4), m.Devices(10), m.Timeline(11, b"r" * 16), HELLO,
        )
    ]  # fmt: skip
    random_ = random.Random(20 + seed)
    process = psutil.Process(os.getpid())
    async with serving(tmp_path / "s") as here:

        async def throw(count: int) -> None:
            for _ in range(count // 10):
                async with connected(here.path) as client:
                    bodies = [mutated(random_, random_.choice(seeds)) for _ in range(10)]
                    try:
                        await client.send_bytes(b"".join(map(frame, bodies)))
                    except (BrokenPipeError, ConnectionResetError):
                        continue  # refused at an earlier frame of the ten
                    answer = await client.next()
                    assert answer is None or isinstance(answer, m.FromDaemon)
            here.backend.runs.clear()

        await throw(500)
        before = process.memory_info().rss
        await throw(3000)
        await lives(here.path)
        assert process.memory_info().rss - before < 16 << 20
        assert not here.bugs and here.server.clients <= 1
        assert not [task for task in asyncio.all_tasks() if "_later" in repr(task)]


@pytest.mark.parametrize("seed", seeds(2, 1000))
def test_ten_thousand_mutated_frames_are_decoded_or_refused(seed: int) -> None:
    """The decoder alone, without a socket: what it does not refuse is a message."""
    random_ = random.Random(seed)
    whole = encode(
        submit_with(inputs={"value": [1, {"x": b"y"}, 2.5]}, params={"deep": [[[1]]]}, after=["b"], retries=3)
    )
    decoder = msgspec.msgpack.Decoder(m.FromClient)
    refused = 0
    for _ in range(10_000):
        try:
            assert isinstance(decoder.decode(mutated(random_, whole)), m.FromClient)
        except refusals.UNREADABLE:
            refused += 1
    assert refused > 5_000


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 1000])
def test_the_splitter_gives_the_same_frames_however_the_stream_is_cut(cut: int) -> None:
    bodies = [b"", b"a", b"b" * 300, b"c" * 5, b""]
    stream = b"".join(map(frame, bodies))
    splitter = FrameSplitter(1000)
    got = [body for at in range(0, len(stream), cut) for body in splitter.feed(stream[at : at + cut])]
    assert got == bodies and splitter.pending_bytes == 0


def test_the_splitter_counts_what_is_pending_and_refuses_what_is_too_long() -> None:
    splitter = FrameSplitter(10)
    assert list(splitter.feed(HEADER.pack(8) + b"1234")) == [] and splitter.pending_bytes == 8
    assert list(splitter.feed(b"5678" + HEADER.pack(11)[:3])) == [b"12345678"] and splitter.pending_bytes == 3
    with pytest.raises(BadRequest, match="10 allowed"):
        list(splitter.feed(HEADER.pack(11)[3:]))
