"""A scripted server for tests of endpoints: each request that is no look at the list of models gets the next answer of a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from hexrt.config import Model
from hexrt.devices.endpoint import EndpointDevice
from hexrt.llm.endpoint import Answered, Ask, Broke, EndpointReport, Said, Seen
from hexrt.protocol.host import Sampling

MODELS = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 4096}]}
Play = Callable[["Scripted", asyncio.StreamWriter], Awaitable[None]]


def response(status: int, body: bytes, kind: str = "application/json", **headers: str) -> bytes:
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{more}\r\n".encode() + body


def stream_head(kind: str = "text/event-stream", more: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\nconnection: close\r\n{more}\r\n".encode()


def event(value: Any) -> bytes:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


def chat(text: str = "", finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish, **more}]})


def usage(prompt: int, answer: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": answer}})


DONE = event("[DONE]")


def send(*pieces: bytes) -> Play:
    """Sends this and closes the connection."""

    async def play(server: Scripted, writer: asyncio.StreamWriter) -> None:
        writer.writelines(pieces)

    return play


def answer(*texts: str, finish: str = "stop", prompt: int = 7) -> Play:
    """A whole answer, a token a text."""
    return send(stream_head(), *map(chat, texts), chat("", finish), usage(prompt, len(texts)), DONE)


def cut(*texts: str) -> Play:
    """The connection ends after these."""
    return send(stream_head(), *map(chat, texts))


def hang(*pieces: bytes) -> Play:
    """Sends this and then waits until the client goes; says so."""

    async def play(server: Scripted, writer: asyncio.StreamWriter) -> None:
        writer.writelines(pieces)
        server.hanging.set()
        await server.reader(writer).read()
        server.left.set()

    return play


def endless(piece: bytes, head: bytes = b"") -> Play:
    """Sends `piece` again and again until the client goes."""

    async def play(server: Scripted, writer: asyncio.StreamWriter) -> None:
        writer.write(head or stream_head())
        try:
            while True:
                writer.write(piece * (1 + (64 << 10) // len(piece)))
                await writer.drain()
        except ConnectionError:
            server.left.set()

    return play


@dataclass(eq=False)
class Scripted:
    script: list[Play]
    models: Play | None = None
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)  # target, headers, body
    looks: int = 0
    port: int = 0
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    _readers: dict[asyncio.StreamWriter, asyncio.StreamReader] = field(default_factory=dict)

    def reader(self, writer: asyncio.StreamWriter) -> asyncio.StreamReader:
        return self._readers[writer]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection."""
        self._readers[writer] = reader
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            method, target, _ = head[0].split()
            if method == "GET":
                self.looks += 1
                play = self.models or send(response(200, json.dumps(MODELS).encode(), connection="close"))
                if target != "/v1/models":
                    play = send(response(404, b"", connection="close"))
            else:
                self.requests.append((target, headers, json.loads(body)))
                play = self.script.pop(0)
            await play(self, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            del self._readers[writer]


@asynccontextmanager
async def scripted(*script: Play, models: Play | None = None) -> AsyncIterator[Scripted]:
    found = Scripted(list(script), models)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        for writer in list(found._readers):
            writer.transport.abort()
        await server.wait_closed()


def sampling(max_tokens: int = 16, **more: Any) -> Sampling:
    return Sampling(
        **{"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "stop": (), "max_tokens": max_tokens} | more
    )  # type: ignore[arg-type]


def ask(command: int = 1, role: str = "user", text: str = "", tokens: int = 0, **more: Any) -> Ask:
    return Ask(command, ({"role": role, "content": "Hello."},), sampling(**more), text, tokens)


@dataclass(eq=False)
class Rig:
    """A device that speaks to a server, and what it reported."""

    device: EndpointDevice
    reports: list[EndpointReport]
    pauses: list[float]
    _news: asyncio.Event

    async def until(self, kinds: tuple[type, ...], count: int = 1) -> list[Any]:
        while len(found := [r for r in self.reports if isinstance(r, kinds)]) < count:
            self._news.clear()
            await self._news.wait()
        return found

    async def answer(self, request: Ask) -> Answered | Broke:
        self.device.send([request])
        ended: list[Answered | Broke] = await self.until((Answered, Broke), 1 + len([r for r in self.reports if isinstance(r, Answered | Broke)]))  # fmt: skip
        return ended[-1]

    @property
    def text(self) -> str:
        return "".join(report.text for report in self.reports if isinstance(report, Said))

    @property
    def facts(self) -> dict[str, Any]:
        return next(report.facts for report in reversed(self.reports) if isinstance(report, Seen))


@asynccontextmanager
async def rig(port: int, pauses: Sequence[float] = (), **model: Any) -> AsyncIterator[Rig]:
    """Waits between tries take no time, and are written down."""
    reports: list[EndpointReport] = []
    news, slept = asyncio.Event(), list(pauses)

    def report(found: EndpointReport) -> None:
        reports.append(found)
        news.set()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0.001)

    settings = {"endpoint": f"http://127.0.0.1:{port}/v1", "idle_s": 5.0, "connect_s": 5.0} | model
    device = EndpointDevice("far", Model(**settings), report, sleep)
    try:
        yield Rig(device, reports, slept, news)
    finally:
        await device.close()
