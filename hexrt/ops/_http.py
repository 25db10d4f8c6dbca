"""The work of `tool.http`: one exchange, its redirects included, within its bounds.

A name is resolved once, the addresses are checked, and the connection goes to a checked address with the name in Host and in TLS; so
an answer of the name server that changes in between changes nothing. Bytes are counted after decompression, as they come.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import zlib
from functools import lru_cache
from typing import Any

import httpx
import msgspec

from hexrt.errors import BadRequest, HexrtError, Overloaded, TaskFailed, TimedOut
from hexrt.ops._hosts import USUAL_PORT, Gate, Settings, require_plain
from hexrt.ops._settings import read_settings
from hexrt.ops.spec import StepContext
from hexrt.ops.tool_http import Params

MAX_REDIRECTS = 5
MAX_ADDRESSES = 4
PIECE = 64 << 10
REDIRECTS = (301, 302, 303, 307, 308)
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
OURS = frozenset({
    "host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "keep-alive", "expect",
    "proxy-authorization", "proxy-connection", "accept-encoding",
})  # fmt: skip
KEPT_ACROSS_HOSTS = frozenset({"accept", "accept-language", "user-agent", "content-type"})
TEXT = re.compile(r"text/.*|application/([\w.+-]+\+)?(json|xml|javascript|x-www-form-urlencoded)")
JSON = re.compile(r"application/([\w.+-]+\+)?json")


async def fetch(context: StepContext, params: Params, inputs: dict[str, Any]) -> dict[str, Any]:
    """Raises Unavailable where a host is not allowed, BadRequest, TimedOut, Overloaded (429, 503) or TaskFailed, each saying why."""
    exchange = _Exchange(context, params, inputs)
    try:
        async with asyncio.timeout(params.timeout_s):
            return await exchange.run(await asyncio.to_thread(_tls))
    except TimeoutError:
        raise TimedOut(f"no whole answer within {params.timeout_s:g} s", context.step) from None


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    for library in ("httpx", "httpcore"):  # URLs and headers of users have no place in the daemon's log
        logging.getLogger(library).setLevel(logging.WARNING)
    return httpx.create_ssl_context(trust_env=False)


class _Exchange:
    def __init__(self, context: StepContext, params: Params, inputs: dict[str, Any]) -> None:
        self._step = context.step
        self._params = params
        settings = read_settings(context, "tool.http", Settings)
        if params.max_body_bytes > settings.max_body_mib << 20:
            raise BadRequest(
                f'is more than the {settings.max_body_mib << 20} that the config\'s [ops."tool.http"] max_body_mib allows',
                f"{context.step}.params.max_body_bytes",
            )
        self._gate = Gate(settings, f"{context.step}.params.url")
        self._method: str = params.method
        self._headers = self._checked_headers(params.headers)
        self._content = self._body(inputs)
        self._url = self._first_url(inputs)

    def _checked_headers(self, given: dict[str, str]) -> dict[str, str]:
        headers = {"user-agent": "hexrt", "accept": "*/*"}
        for name, value in given.items():
            where = f"{self._step}.params.headers.{name[:40]}"
            if not HEADER_NAME.fullmatch(name) or name.lower() in OURS:
                raise BadRequest("is no header that a step may set", where)
            if not (value.isascii() and value.isprintable()):
                raise BadRequest("has a line break or another character that a header cannot carry", where)
            headers[name.lower()] = value
        return {**headers, "accept-encoding": "gzip"}

    def _body(self, inputs: dict[str, Any]) -> bytes | None:
        body = inputs.get("body")
        if not isinstance(body, str | bytes | None):
            raise BadRequest(f"is a {type(body).__name__}; give text or bytes", f"{self._step}.inputs.body")
        if "json" in inputs:
            if body is not None:
                raise BadRequest("give either json or body", f"{self._step}.inputs")
            self._headers.setdefault("content-type", "application/json")
            try:
                return msgspec.json.encode(inputs["json"])
            except (TypeError, ValueError, RecursionError) as error:
                raise BadRequest(f"cannot be written as JSON: {error}", f"{self._step}.inputs.json") from None
        return body.encode() if isinstance(body, str) else body

    def _first_url(self, inputs: dict[str, Any]) -> httpx.URL:
        given = inputs.get("url") or ""
        if bool(given) == bool(self._params.url):
            raise BadRequest("give the URL either as params.url or as inputs.url", f"{self._step}.inputs.url")
        url = self._parse(given or self._params.url, f"{self._step}.{'inputs' if given else 'params'}.url")
        query = inputs.get("query")
        return url.copy_merge_params(query) if query else url

    def _parse(self, text: str, where: str, base: httpx.URL | None = None) -> httpx.URL:
        require_plain(text, where)
        try:
            url = base.join(text) if base else httpx.URL(text)
        except (httpx.InvalidURL, ValueError) as error:
            raise BadRequest(f"is no URL: {error}", where) from None
        if url.scheme not in USUAL_PORT or not url.host:
            raise BadRequest("must be an http or https URL with a host", where)
        if url.port is not None and not 0 < url.port < 65_536:
            raise BadRequest(f"has the port {url.port}; ports are 1 to 65535", where)
        if url.userinfo:
            raise BadRequest("carries a user name or password; send them in a header", where)
        return url.copy_with(fragment=None)

    async def run(self, tls: ssl.SSLContext) -> dict[str, Any]:
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._once(tls)
            target = answer["headers"].get("location")
            if answer["status"] not in REDIRECTS or not target or not self._params.follow_redirects:
                return await self._finish(answer)
            self._redirect(answer["status"], target)
        raise TaskFailed(f"more than {MAX_REDIRECTS} redirects", self._step)

    def _redirect(self, status: int, target: str) -> None:
        before = self._url
        try:
            self._url = self._parse(target, f"{self._step}.params.url", before)
        except BadRequest as error:
            raise TaskFailed(
                f"{before.host} redirects to what cannot be followed: it {error.message}", self._step
            ) from None
        if before.scheme == "https" and self._url.scheme == "http":
            raise TaskFailed(f"{before.host} redirects from https to http", self._step)
        if (status == 303 and self._method != "HEAD") or (status in (301, 302) and self._method == "POST"):
            self._method, self._content = "GET", None
            self._headers.pop("content-type", None)
        if (before.scheme, before.host, before.port) != (self._url.scheme, self._url.host, self._url.port):
            self._headers = {k: v for k, v in self._headers.items() if k in KEPT_ACROSS_HOSTS or k == "accept-encoding"}

    async def _once(self, tls: ssl.SSLContext) -> dict[str, Any]:
        url = self._url
        host, scheme = url.raw_host.decode("ascii").lower().rstrip("."), url.scheme
        addresses = await self._gate.resolve(scheme, host, url.port or USUAL_PORT[scheme])
        timeout = httpx.Timeout(self._params.timeout_s, connect=self._params.connect_timeout_s)
        # A client of its own: no cookie, proxy setting or connection is shared between steps.
        async with httpx.AsyncClient(verify=tls, trust_env=False, timeout=timeout, follow_redirects=False) as client:
            for address in addresses[:MAX_ADDRESSES]:
                request = client.build_request(
                    self._method,
                    url.copy_with(host=address),
                    headers={**self._headers, "host": url.netloc.decode("ascii")},
                    content=self._content,
                    extensions={"sni_hostname": host} if host != address else {},
                )
                try:
                    response = await client.send(request, stream=True)
                except httpx.ConnectError as error:
                    refusal = str(error)
                    continue  # nothing was sent: the next address may be tried whatever the method
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    raise self._broken(error) from None
                try:
                    return await self._read(response)
                finally:
                    await response.aclose()
        raise TaskFailed(f"no connection to {host}: {refusal}", self._step)

    def _broken(self, error: Exception) -> HexrtError:
        if isinstance(error, httpx.TimeoutException):
            return TimedOut(f"{self._url.host} did not answer in time ({type(error).__name__})", self._step)
        return TaskFailed(f"the exchange with {self._url.host} broke: {type(error).__name__}: {error}", self._step)

    async def _read(self, response: httpx.Response) -> dict[str, Any]:
        unpack = _Unpacker(response.headers.get("content-encoding", ""), self._params.max_body_bytes, self._step)
        try:
            async for piece in response.aiter_raw(PIECE):
                unpack.feed(piece)
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise self._broken(error) from None
        headers: dict[str, str] = {}
        for name, value in response.headers.multi_items():
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        return {"status": response.status_code, "headers": headers, "url": str(self._url), "body": unpack.end()}

    async def _finish(self, answer: dict[str, Any]) -> dict[str, Any]:
        status, body = answer["status"], answer.pop("body")
        if status >= 400 and self._params.fail_on_status:
            kind = Overloaded if status in (429, 503) else TaskFailed
            raise kind(f"{self._url.host} answered {status}: {body[:300].decode('utf-8', 'replace')}", self._step)
        media, _, rest = answer["headers"].get("content-type", "").partition(";")
        media = media.strip().lower()
        if TEXT.fullmatch(media):
            answer["text"] = _decode_text(body, rest)
        else:
            answer["body"] = body
        if JSON.fullmatch(media) and body:
            try:
                answer["json"] = await asyncio.to_thread(msgspec.json.decode, body)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise TaskFailed(
                    f"{self._url.host} says its answer is JSON, and it is not: {error}", self._step
                ) from None
        return answer


def _decode_text(body: bytes, parameters: str) -> str:
    found = re.search(r"charset=\"?([\w.-]+)", parameters, re.IGNORECASE)
    try:
        return body.decode(found[1] if found else "utf-8", "replace")
    except (LookupError, UnicodeError):
        return body.decode("utf-8", "replace")


class _Unpacker:
    """Undoes a content encoding piece by piece and stops at the cap, so that a small bomb never becomes a large one."""

    def __init__(self, encoding: str, max_bytes: int, step: str) -> None:
        self._step = step
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self._inflate: Any = None
        name = encoding.strip().lower()
        if name in ("gzip", "x-gzip", "deflate"):
            self._inflate = zlib.decompressobj(47)  # gzip or zlib, by its header
        elif name not in ("", "identity"):
            raise TaskFailed(f"the answer is encoded as {encoding[:80]!r}, which was not asked for", step)

    def feed(self, piece: bytes) -> None:
        if self._inflate is None:
            self._keep(piece)
            return
        try:
            self._keep(self._inflate.decompress(piece, self._max_bytes - self._size + 1))
        except zlib.error as error:
            raise TaskFailed(f"the answer's compressed body is damaged: {error}", self._step) from None

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._max_bytes:
            raise TaskFailed(f"the body has more than {self._max_bytes} bytes; raise max_body_bytes", self._step)
        self._parts.append(data)

    def end(self) -> bytes:
        if self._inflate is not None and self._parts and not self._inflate.eof:
            raise TaskFailed("the answer's compressed body breaks off", self._step)
        return b"".join(self._parts)
