"""tool.http against real servers on loopback: what it fetches, and what neither a workflow nor a server can make it do."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
import subprocess
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hexrt.errors import BadRequest, HexrtError, Overloaded, TaskFailed, TimedOut, Unavailable
from hexrt.ops._hosts import Gate, Settings, is_public, literal
from hexrt.ops.registry import load_ops
from tests.bodies import Machine, launch

Reply = Callable[["Request", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Server:
    """An HTTP server whose every byte a test may choose."""

    replies: dict[str, Reply]
    port: int = 0
    requests: list[Request] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, target, _ = head[0].split(" ")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            request = Request(method, target, headers, body)
            self.requests.append(request)
            await self.replies[target.partition("?")[0]](request, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):  # a client that goes away, as some tests want it to
            pass
        finally:
            writer.close()

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


def plain(body: bytes, kind: str = "text/plain", status: str = "200 OK", *extra: str) -> Reply:
    async def reply(request: Request, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *extra, "", ""]
        writer.write("\r\n".join(lines).encode() + (b"" if request.method == "HEAD" else body))

    return reply


def redirect(to: str, status: str = "302 Found") -> Reply:
    return plain(b"", "text/plain", status, f"Location: {to}")


def raw(*pieces: bytes) -> Reply:
    async def reply(request: Request, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    return reply


async def hang(request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart")
    await writer.drain()
    await asyncio.Event().wait()


async def never(request: Request, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def endless(request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def echo(request: Request, writer: asyncio.StreamWriter) -> None:
    content = {
        "method": request.method,
        "target": request.target,
        "headers": request.headers,
        "body": request.body.decode("latin-1"),
    }
    await plain(json.dumps(content).encode(), "application/json")(request, writer)


def squeezed(body: bytes, encoding: str = "gzip") -> Reply:
    data = gzip.compress(body) if encoding == "gzip" else zlib.compress(body) if encoding == "deflate" else body
    return plain(data, "text/plain", "200 OK", f"Content-Encoding: {encoding}")


CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"

REPLIES: dict[str, Reply] = {
    "/": plain(b"hello"),
    "/echo": echo,
    "/json": plain(b'{"a": [1, 2.5, null, "\xc3\xa9"]}', "application/json; charset=utf-8"),
    "/problem": plain(b'{"a": 1}', "application/problem+json"),
    "/badjson": plain(b'{"a": ', "application/json"),
    "/deepjson": plain(b"[" * 200_000, "application/json"),
    "/latin": plain("é".encode("latin-1"), "text/html; charset=ISO-8859-1"),
    "/oddcharset": plain("é".encode(), "text/html; charset=klingon"),
    "/bytes": plain(bytes(range(256)), "application/octet-stream"),
    "/missing": plain(b"no such thing", status="404 Not Found"),
    "/busy": plain(b"later", status="503 Service Unavailable"),
    "/hang": hang,
    "/never": never,
    "/endless": endless,
    "/gzip": squeezed(b"squeezed " * 100),
    "/deflate": squeezed(b"squeezed " * 100, "deflate"),
    "/bomb": squeezed(bytes(200 << 20)),
    "/nogzip": plain(b"this is no gzip", "text/plain", "200 OK", "Content-Encoding: gzip"),
    "/halfgzip": plain(gzip.compress(b"squeezed" * 1000)[:-20], "text/plain", "200 OK", "Content-Encoding: gzip"),
    "/brotli": squeezed(b"anything", "br"),
    "/chunks": raw(CHUNKED, b"5\r\nhello\r\n", b"6\r\n world\r\n", b"0\r\n\r\n"),
    "/badchunks": raw(CHUNKED, b"5\r\nhello\r\n", b"zz\r\ngarbage\r\n0\r\n\r\n"),
    "/cut": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart"),
    "/garbage": raw(b"\x00\xff\xfe not http at all\r\n\r\n"),
    "/empty": raw(),
    "/manyheaders": raw(b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: %s\r\n" % (i, b"v" * 1000) for i in range(2000)) + b"\r\n"),
    "/twice": raw(b"HTTP/1.1 200 OK\r\nX-A: 1\r\nX-A: 2\r\nContent-Length: 0\r\n\r\n"),
    "/loop": redirect("/loop"),
    "/relative": redirect("echo?from=relative"),
    "/post303": redirect("/echo", "303 See Other"),
    "/post307": redirect("/echo", "307 Temporary Redirect"),
    "/elsewhere": redirect("http://169.254.169.254/latest/meta-data/"),
    "/file": redirect("file:///etc/passwd"),
    "/userinfo": redirect("http://user:secret@127.0.0.1/"),
    "/gopher": redirect("gopher://127.0.0.1:70/"),
    "/blank": redirect("http://127.0.0.1 /"),
}  # fmt: skip


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server(dict(REPLIES))
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(made.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    yield made
    listening.close()
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def machine(tmp_path: Path, *allow: str, private: tuple[str, ...] = ()) -> Machine:
    return Machine(tmp_path, {"tool.http": {"allow": list(allow), "allow_private": list(private)}}, "io:0")


@pytest.fixture
def local(tmp_path: Path, server: Server) -> Machine:
    return machine(tmp_path, f"127.0.0.1:{server.port}")


async def get(local: Machine, url: str, inputs: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    answer: dict[str, Any] = await local.run_async("tool.http", {"url": url, **params}, inputs)
    return answer


async def test_text_json_and_bytes_come_back_as_what_they_are(server: Server, local: Machine) -> None:
    hello = await get(local, server.url())
    assert (hello["status"], hello["text"], hello["headers"]["content-type"]) == (200, "hello", "text/plain")
    assert "body" not in hello and "json" not in hello
    answer = await get(local, server.url("/json"))
    assert answer["json"] == {"a": [1, 2.5, None, "é"]} and answer["text"].endswith('"é"]}')
    assert (await get(local, server.url("/problem")))["json"] == {"a": 1}
    assert (await get(local, server.url("/bytes")))["body"] == bytes(range(256))
    assert (await get(local, server.url("/latin")))["text"] == "é"
    assert (await get(local, server.url("/oddcharset")))["text"] == "é"
    assert (await get(local, server.url("/chunks")))["text"] == "hello world"
    assert (await get(local, server.url("/twice")))["headers"]["x-a"] == "1, 2"


async def test_method_headers_query_and_json_are_sent(server: Server, local: Machine) -> None:
    seen = (
        await get(
            local,
            server.url("/echo?a=1#part"),
            {"query": {"b": "x y&z", "n": 2}, "json": {"k": ["é", None]}},
            method="PUT",
            headers={"X-Key": "secret", "User-Agent": "mine"},
        )
    )["json"]
    assert (seen["method"], seen["target"]) == ("PUT", "/echo?a=1&b=x+y%26z&n=2")
    assert seen["headers"]["x-key"] == "secret" and seen["headers"]["user-agent"] == "mine"
    assert seen["headers"]["host"] == f"127.0.0.1:{server.port}"
    assert seen["headers"]["content-type"] == "application/json"
    assert json.loads(seen["body"].encode("latin-1")) == {"k": ["é", None]}
    posted = await local.run_async("tool.http", {"method": "POST"}, {"url": server.url("/echo"), "body": b"\x01\x02"})
    assert posted["json"]["body"] == "\x01\x02"


async def test_the_log_of_the_daemon_says_nothing_of_what_users_fetch(
    server: Server, local: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    await get(local, server.url("/echo?token=secret"), headers={"Authorization": "secret"})
    assert "secret" not in caplog.text


async def test_a_head_request_has_no_body(server: Server, local: Machine) -> None:
    assert (await get(local, server.url("/gzip"), method="HEAD"))["text"] == ""


async def test_a_compressed_body_is_unpacked(server: Server, local: Machine) -> None:
    for path in ("/gzip", "/deflate"):
        assert (await get(local, server.url(path)))["text"] == "squeezed " * 100
    assert server.requests[-1].headers["accept-encoding"] == "gzip"


REFUSALS: list[tuple[str, dict[str, Any], type[HexrtError], str]] = [
    ("/missing", {}, TaskFailed, "answered 404: no such thing"),
    ("/busy", {}, Overloaded, "answered 503: later"),
    ("/badjson", {}, TaskFailed, "says its answer is JSON, and it is not"),
    ("/deepjson", {}, TaskFailed, "says its answer is JSON, and it is not"),
    ("/hang", {"timeout_s": 0.3}, TimedOut, "no whole answer within 0.3 s|did not answer in time"),
    ("/never", {"timeout_s": 0.3}, TimedOut, "no whole answer within 0.3 s|did not answer in time"),
    ("/endless", {"max_body_bytes": 1_000_000}, TaskFailed, "more than 1000000 bytes; raise max_body_bytes"),
    ("/bomb", {}, TaskFailed, "more than 8388608 bytes"),
    ("/", {"max_body_bytes": 4}, TaskFailed, "more than 4 bytes"),
    ("/nogzip", {}, TaskFailed, "compressed body is damaged"),
    ("/halfgzip", {}, TaskFailed, "compressed body breaks off"),
    ("/brotli", {}, TaskFailed, "encoded as 'br', which was not asked for"),
    ("/badchunks", {}, TaskFailed, "the exchange with 127.0.0.1 broke: RemoteProtocolError"),
    ("/cut", {}, TaskFailed, "the exchange with 127.0.0.1 broke: RemoteProtocolError"),
    ("/garbage", {}, TaskFailed, "the exchange with 127.0.0.1 broke: RemoteProtocolError"),
    ("/empty", {}, TaskFailed, "the exchange with 127.0.0.1 broke: RemoteProtocolError"),
    ("/manyheaders", {}, TaskFailed, "the exchange with 127.0.0.1 broke"),
    ("/loop", {}, TaskFailed, "more than 5 redirects"),
    ("/elsewhere", {}, Unavailable, r"169.254.169.254 is not allowed: .*allow in \[ops.\"tool.http\"\]"),
    ("/file", {}, TaskFailed, "redirects to what cannot be followed: it must be an http or https URL"),
    ("/gopher", {}, TaskFailed, "redirects to what cannot be followed: it must be an http or https URL"),
    ("/userinfo", {}, TaskFailed, "redirects to what cannot be followed: it carries a user name"),
    ("/blank", {}, TaskFailed, "redirects to what cannot be followed: it has a blank"),
]


@pytest.mark.parametrize(
    ("path", "params", "kind", "message"), REFUSALS, ids=[r[0] + str(i) for i, r in enumerate(REFUSALS)]
)
async def test_what_a_server_does_wrong_is_a_named_error(
    server: Server, local: Machine, path: str, params: dict[str, Any], kind: type[HexrtError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        await get(local, server.url(path), **params)
    assert (await get(local, server.url()))["text"] == "hello"


async def test_a_status_may_be_looked_at_instead_of_failing(server: Server, local: Machine) -> None:
    missing = await get(local, server.url("/missing"), fail_on_status=False)
    assert (missing["status"], missing["text"]) == (404, "no such thing")


async def test_redirects_are_followed_only_if_asked_and_as_the_standard_says(server: Server, local: Machine) -> None:
    assert (await get(local, server.url("/relative")))["json"]["target"] == "/echo?from=relative"
    stayed = await get(local, server.url("/relative"), follow_redirects=False)
    assert (stayed["status"], stayed["headers"]["location"]) == (302, "echo?from=relative")
    after_303 = (await get(local, server.url("/post303"), {"json": 1}, method="POST"))["json"]
    assert (after_303["method"], after_303["body"]) == ("GET", "") and "content-type" not in after_303["headers"]
    after_307 = (await get(local, server.url("/post307"), {"json": 1}, method="POST"))["json"]
    assert (after_307["method"], after_307["body"]) == ("POST", "1")


async def test_a_redirect_to_another_host_carries_no_secrets(server: Server, tmp_path: Path) -> None:
    server.replies["/away"] = redirect(server.url("/echo", "localhost"))
    both = machine(tmp_path, f"127.0.0.1:{server.port}", f"localhost:{server.port}")
    headers = {"Authorization": "Bearer x", "Cookie": "a=b", "X-Api-Key": "k", "Accept-Language": "de"}
    seen = (await get(both, server.url("/away"), headers=headers))["json"]["headers"]
    assert not {"authorization", "cookie", "x-api-key"} & seen.keys()
    assert seen["accept-language"] == "de" and seen["host"] == f"localhost:{server.port}"
    only_first = machine(tmp_path, f"127.0.0.1:{server.port}")
    before = len(server.requests)
    with pytest.raises(Unavailable, match=r"localhost:.* is not allowed"):
        await get(only_first, server.url("/away"))
    assert len(server.requests) == before + 1


async def test_nothing_is_asked_unless_the_config_allows_it(server: Server, tmp_path: Path) -> None:
    for allowed in (
        (),
        ("127.0.0.1",),
        ("localhost",),
        (f"127.0.0.2:{server.port}",),
        (f"*.0.0.1:{server.port}",),
        ("*.1",),
    ):
        with pytest.raises(
            Unavailable, match=r"127.0.0.1:\d+ is not allowed: whoever runs hexrtd may list it under allow"
        ):
            await get(machine(tmp_path, *allowed), server.url())
    assert server.requests == []
    for rule in ("*", "http://x", "a b", "x:99999", "x:", "", "*.", "[::1"):
        with pytest.raises(Unavailable, match="has a rule that is none"):
            await get(machine(tmp_path, rule), server.url())


async def test_a_name_that_leads_into_the_own_network_needs_the_other_list(server: Server, tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo
    asked: list[str] = []

    async def rebinding(host: Any, port: Any, **more: Any) -> Any:
        """First answer public, every later one private: what a hostile name server does."""
        if host == "rebind.example":
            asked.append(host)
            return await real("127.0.0.1", port, **more)
        return await real(host, port, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "getaddrinfo", rebinding)
        url = server.url("/echo", "rebind.example")
        with pytest.raises(Unavailable, match=r"rebind.example lies at 127.0.0.1, .*allow_private"):
            await get(machine(tmp_path, "rebind.example:*"), url)
        assert server.requests == [] and asked == ["rebind.example"]
        seen = await get(machine(tmp_path, private=("*.example:*",)), url)
        assert seen["json"]["headers"]["host"] == f"rebind.example:{server.port}"
        assert asked == ["rebind.example"] * 2  # once a request: what was checked is what is connected to


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1/", "file:///etc/passwd", "http://", "http:///x", "127.0.0.1", "//127.0.0.1/", "http://user@127.0.0.1/",
        "http://user:pw@127.0.0.1/", "http://127.0.0.1\\@evil/", "http://127.0.0.1 /", "http://127.0.0.1/\r\nX: 1",
        "http://127.0.0.1/\x00", "http://[::1/", "http://127.0.0.1:99999/", "http://127.0.0.1:abc/", "javascript:alert(1)",
    ],
)  # fmt: skip
async def test_a_url_with_a_trick_in_it_is_refused_by_name(server: Server, local: Machine, url: str) -> None:
    with pytest.raises(BadRequest, match=r"^s.params.url: "):
        await get(local, url)
    with pytest.raises(BadRequest, match=r"^s.inputs.url: "):
        await local.run_async("tool.http", {}, {"url": url})
    assert server.requests == []


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f.1", "0177.0.0.1", "127.1", "127.0.0.1.", "[::ffff:127.0.0.1]", "①②⑦.0.0.1"]
)
async def test_another_way_to_write_an_address_gets_nowhere(server: Server, tmp_path: Path, host: str) -> None:
    for allowed in ((), (f"example.com:{server.port}",), ("*.example.com",)):
        with pytest.raises((Unavailable, BadRequest, TaskFailed)):
            await get(machine(tmp_path, *allowed), f"http://{host}:{server.port}/")
    assert server.requests == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-A", "a\r\nX-B: b"), ("X-A", "a\nb"), ("X-A", "a\x00"), ("X-A", "é"), ("X A", "a"), ("X-A\r\n", "a"), ("", "a"), ("Host", "evil"),
        ("Content-Length", "5"), ("transfer-encoding", "chunked"), ("Connection", "upgrade"), ("Accept-Encoding", "br"),
    ],
)  # fmt: skip
async def test_a_header_with_a_trick_in_it_is_refused_by_name(
    server: Server, local: Machine, name: str, value: str
) -> None:
    with pytest.raises(BadRequest, match=r"s.params.headers."):
        await get(local, server.url(), headers={name: value})
    assert server.requests == []


async def test_inputs_that_contradict_each_other_are_refused(server: Server, local: Machine) -> None:
    with pytest.raises(BadRequest, match=r"give either json or body"):
        await get(local, server.url(), {"json": 1, "body": "x"})
    with pytest.raises(BadRequest, match=r"give the URL either"):
        await get(local, server.url(), {"url": server.url()})
    with pytest.raises(BadRequest, match=r"give the URL either"):
        await local.run_async("tool.http", {})
    with pytest.raises(BadRequest, match=r"s.inputs.body: is a int; give text or bytes"):
        await get(local, server.url(), {"body": 5})
    with pytest.raises(BadRequest, match=r"s.inputs.query"):
        await get(local, server.url(), {"query": {"a": [1]}})


async def test_a_step_may_not_ask_for_more_than_the_config_lets_it(
    server: Server, tmp_path: Path, local: Machine
) -> None:
    with pytest.raises(BadRequest, match=r"s.params.max_body_bytes: is more than the 33554432 that the config's"):
        await get(local, server.url(), max_body_bytes=(32 << 20) + 1)
    wider = Machine(tmp_path, {"tool.http": {"allow": [f"127.0.0.1:{server.port}"], "max_body_mib": 300}}, "io:0")
    assert (await get(wider, server.url("/"), max_body_bytes=300 << 20))["text"] == "hello"


async def test_a_host_that_is_unknown_or_does_not_listen_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskFailed, match=r"the name nowhere.invalid is unknown here"):
        await get(machine(tmp_path, "nowhere.invalid"), "http://nowhere.invalid/")
    with pytest.raises(TaskFailed, match=r"no connection to 127.0.0.1"):
        await get(machine(tmp_path, "127.0.0.1:1"), "http://127.0.0.1:1/")


async def test_cancelling_ends_the_exchange_at_once(server: Server, local: Machine) -> None:
    arrived = asyncio.Event()

    async def wait_for_ever(request: Request, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await asyncio.Event().wait()

    server.replies["/wait"] = wait_for_ever
    task = asyncio.create_task(get(local, server.url("/wait")))
    await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture
def certificate(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    try:
        subprocess.run(
            [*command, "-subj", "/CN=localhost", "-keyout", str(path) + ".key", "-out", str(path)],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("the openssl command is not installed")
    yield path


async def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path, certificate: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, str(certificate) + ".key")
    made = Server({"/": plain(b"hello")})
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=context)
    port = listening.sockets[0].getsockname()[1]
    with pytest.raises(TaskFailed, match=r"no connection to localhost: .*[Cc]ertificate|CERTIFICATE"):
        await get(machine(tmp_path, f"localhost:{port}"), f"https://localhost:{port}/")
    assert made.requests == []
    listening.close()
    await listening.wait_closed()


PRIVATE = """0.0.0.0 10.0.0.1 100.64.0.1 127.0.0.1 127.255.255.254 169.254.169.254 172.16.0.1 192.168.1.1 192.0.2.1 224.0.0.1
    255.255.255.255 :: ::1 fe80::1 fc00::1 ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 2002:7f00:1:: 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe"""


def test_which_addresses_are_public() -> None:
    for text in PRIVATE.split():
        address = literal(text)
        assert address is not None and not is_public(address), text
    for text in ("93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808"):
        address = literal(text)
        assert address is not None and is_public(address), text


def test_which_hosts_a_rule_means() -> None:
    gate = Gate(Settings(("Example.com", "*.example.org:8443", "any.net:*", "[::1]:81"), ("*.lan",)), "w")
    for scheme, host, port, private in (
        ("https", "example.com", 443, False), ("http", "example.com", 80, False), ("https", "a.b.example.org", 8443, False),
        ("http", "any.net", 12345, False), ("http", "::1", 81, True), ("http", "nas.lan", 80, True),
    ):  # fmt: skip
        assert gate.check(scheme, host, port) is private
    for scheme, host, port in (
        ("https", "example.com", 80), ("http", "www.example.com", 80), ("http", "notexample.com", 80), ("https", "example.org", 8443),
        ("https", "evil-example.org", 8443), ("http", "::1", 80), ("http", "lan", 80), ("http", "example.com.evil.net", 80),
    ):  # fmt: skip
        with pytest.raises(Unavailable, match="is not allowed"):
            gate.check(scheme, host, port)


def test_only_asking_is_idempotent() -> None:
    spec = load_ops()[0]["tool.http"]
    for method in ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"):
        params = msgspec.convert({"url": "http://x/", "method": method}, spec.params)
        assert spec.is_idempotent(params) is (method in ("GET", "HEAD", "OPTIONS"))


@pytest.mark.parametrize(
    "params",
    [{"timeout_s": 0}, {"timeout_s": -1}, {"timeout_s": float("nan")}, {"timeout_s": 1e9}, {"max_body_bytes": -1}, {"method": "TRACE"},
     {"method": "GET /x HTTP/1.1\r\n"}, {"headers": {"a": 1}}, {"verify": False}, {"url": "http://x/" + "a" * 9000}],
)  # fmt: skip
def test_a_silly_parameter_is_refused_when_the_workflow_is_checked(params: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match=next(iter(params))):
        launch("tool.http", {"url": "http://x/", **params})
