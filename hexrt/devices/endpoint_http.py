"""HTTP to one server of a model, within bounds: sizes, lines, times, and no way off the path.

Owns the client. Nothing of the environment counts (no proxies, no .netrc), no redirect is followed, certificates are verified, and whatever
the server sends is counted before it is kept. Of a key it holds none: that is read anew for each request.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from httpx_sse import EventSource

from hexrt.config import Model
from hexrt.errors import TaskFailed, Unavailable

log = logging.getLogger("hexrtd")
MAX_LINE = 1 << 20
"""Bytes of one line of a stream: a token with its log-probabilities has some thousands."""
MAX_STREAM = 256 << 20
MAX_BODY = 1 << 20
MAX_WORDS_BYTES = 64 << 10
"""Of a refusal, as far as it is read."""
STREAM = "text/event-stream"


class _Bounded(httpx.AsyncByteStream):
    """A body that ends in TaskFailed where it, or one of its lines, is too long."""

    def __init__(self, stream: httpx.AsyncByteStream, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = line = 0
        async for piece in self._stream:
            size += len(piece)
            last = piece.rfind(b"\n")
            line = line + len(piece) if last < 0 else len(piece) - last - 1
            if size > self._max_bytes or line > MAX_LINE:
                what = f"a body of more than {self._max_bytes >> 20} MiB" if size > self._max_bytes else "a line of more than 1 MiB"  # fmt: skip
                raise TaskFailed(f"the server sends {what}")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Transport(httpx.AsyncBaseTransport):
    def __init__(self, inner: httpx.AsyncHTTPTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            await response.aclose()
            raise TaskFailed(f"the server packs its answer as {encoding[:40]!r}, which was not asked for")
        response.stream = _Bounded(response.stream, request.extensions.get("max_bytes", MAX_BODY))
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class EndpointHttp:
    def __init__(self, name: str, model: Model) -> None:
        for library in ("httpx", "httpcore"):  # URLs have no place in the daemon's log
            logging.getLogger(library).setLevel(logging.WARNING)
        self._name = name
        self._key_file = model.api_key_file
        self._told = False  # that others can read the key
        self.url = httpx.URL(model.endpoint.rstrip("/") + "/")
        tls = httpx.create_ssl_context(trust_env=False) if self.url.scheme == "https" else False
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=model.concurrency)
        self._client = httpx.AsyncClient(
            transport=_Transport(httpx.AsyncHTTPTransport(verify=tls, limits=limits, trust_env=False)),
            timeout=httpx.Timeout(model.idle_s, connect=model.connect_s, pool=None),
            headers={"user-agent": "hexrt", "accept-encoding": "identity"},
            follow_redirects=False,
            trust_env=False,
        )

    @property
    def shown_url(self) -> str:
        """For people: without a password that may be in it."""
        return str(self.url.copy_with(userinfo=b"")).rstrip("/")

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises httpx.TransportError, TaskFailed, Unavailable."""
        response = await self._client.get(self.url.join(path), headers=await self._headers("application/json"))
        return response.status_code, response.content

    @asynccontextmanager
    async def post(self, path: str, body: dict[str, Any]) -> AsyncIterator[tuple[httpx.Response, EventSource]]:
        """The answer as it begins. Raises httpx.TransportError, TaskFailed, Unavailable."""
        headers = await self._headers(STREAM) | {"content-type": "application/json"}
        async with self._client.stream(
            "POST", self.url.join(path), content=msgspec.json.encode(body), headers=headers, extensions={"max_bytes": MAX_STREAM},
        ) as response:  # fmt: skip
            yield response, EventSource(response)

    async def _headers(self, accept: str) -> dict[str, str]:
        headers = {"accept": accept}
        if self._key_file:
            headers["authorization"] = f"Bearer {await asyncio.to_thread(self._key)}"
        return headers

    def _key(self) -> str:
        """Raises Unavailable."""
        path = Path(self._key_file).expanduser()
        try:
            with open(path, encoding="ascii") as file:
                mode, key = os.fstat(file.fileno()).st_mode, file.read(MAX_WORDS_BYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not ASCII"
            raise Unavailable(f"models.{self._name}.api_key_file cannot be read: {why}") from None
        if not key or not key.isprintable() or " " in key:
            raise Unavailable(f"models.{self._name}.api_key_file must hold one line, the key")
        if mode & 0o077 and not self._told:
            self._told = True
            log.warning("models.%s.api_key_file can be read by others than its owner: make its mode 0600", self._name)
        return key

    async def close(self) -> None:
        await self._client.aclose()


async def words(response: httpx.Response) -> bytes:
    """The beginning of a refusal's body."""
    found = b""
    async for piece in response.aiter_bytes():
        found += piece
        if len(found) >= MAX_WORDS_BYTES:
            break
    return found[:MAX_WORDS_BYTES]
