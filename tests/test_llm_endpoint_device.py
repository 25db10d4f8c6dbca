"""The endpoint device against a scripted server: retries, answers that break off, and everything a hostile server may do."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from pathlib import Path

import pytest

from hexrt.core import TokenLogprob
from hexrt.devices.endpoint import pause_of
from hexrt.llm.endpoint import Abort, Answered, Broke, Said
from hexrt.protocol.host import Grammar
from tests.endpoint_server import (
    DONE,
    Play,
    Scripted,
    answer,
    ask,
    chat,
    cut,
    endless,
    event,
    hang,
    response,
    rig,
    scripted,
    send,
    stream_head,
    usage,
)
from tests.seeds import seeds
from tests.serving import on_uvloop

pytestmark = pytest.mark.timeout(60)


@on_uvloop
async def test_an_answer_comes_piece_by_piece_and_its_tokens_are_as_the_server_counts_them() -> None:
    async with scripted(answer("Hel", "lo", "!", prompt=11)) as server, rig(server.port) as here:
        ended = await here.answer(ask())
        assert isinstance(ended, Answered)
        assert (ended.finish, ended.prompt_tokens, ended.answer_tokens) == ("stop", 11, 3)
        assert [r.text for r in here.reports if isinstance(r, Said)] == ["Hel", "lo", "!"]
        ((target, headers, body),) = server.requests
        assert target == "/v1/chat/completions" and "authorization" not in headers
        assert body["messages"] == [{"role": "user", "content": "Hello."}] and body["stream"] and body["model"] == "m"
        assert here.facts["reachable"] and here.facts["server"] == "vLLM" and here.facts["context_tokens"] == 4096


@on_uvloop
async def test_a_raw_prompt_goes_without_messages_and_pieces_are_counted_where_the_server_does_not() -> None:
    raw = [event({"choices": [{"text": text, "finish_reason": finish}]}) for text, finish in (("a", None), ("b", "length"))]  # fmt: skip
    async with scripted(send(stream_head(), *raw, DONE)) as server, rig(server.port) as here:
        ended = await here.answer(ask(role="raw"))
        assert isinstance(ended, Answered) and (ended.finish, ended.answer_tokens, here.text) == ("length", 2, "ab")
        assert server.requests[0][0] == "/v1/completions" and server.requests[0][2]["prompt"] == "Hello."


@on_uvloop
async def test_a_busy_server_is_asked_again_after_as_long_as_it_says() -> None:
    script = [send(response(status, b"busy", retry_after="7", connection="close")) for status in (429, 503)]
    async with scripted(*script, answer("ok")) as server, rig(server.port) as here:
        assert isinstance(await here.answer(ask()), Answered)
        assert here.pauses == [7.0, 7.0] and len(server.requests) == 3


@on_uvloop
async def test_a_server_that_stays_busy_fails_the_step_in_its_own_words_after_so_many_tries() -> None:
    refused = send(response(503, b'{"error": {"message": "Loading\\u001b model"}}', connection="close"))
    async with scripted(*[refused] * 3) as server, rig(server.port, tries=3) as here:
        ended = await here.answer(ask())
        assert isinstance(ended, Broke) and ended.error.kind == "overloaded"
        assert ended.error.message == "the server answered 503: Loading  model, 3 times"
        assert here.pauses[0] < here.pauses[1] and len(server.requests) == 3


@on_uvloop
async def test_a_connection_lost_before_the_first_token_is_tried_again() -> None:
    for lost in (send(b""), cut(), send(stream_head()[:20])):
        async with scripted(lost, answer("ok")) as server, rig(server.port) as here:
            assert isinstance(await here.answer(ask()), Answered)
            assert here.text == "ok" and len(server.requests) == 2


@on_uvloop
async def test_an_answer_that_breaks_off_is_gone_on_with_and_not_repeated() -> None:
    async with scripted(cut("One", " two"), cut(" three"), answer(" four", prompt=20)) as server, rig(server.port) as here:  # fmt: skip
        ended = await here.answer(ask(max_tokens=10))
        assert here.text == "One two three four"
        assert isinstance(ended, Answered) and (ended.prompt_tokens, ended.answer_tokens) == (17, 4)
        bodies = [body for _, _, body in server.requests]
        assert [b["max_tokens"] for b in bodies] == [10, 8, 7]
        assert bodies[2]["messages"][-1] == {"role": "assistant", "content": "One two three"}
        assert bodies[2]["continue_final_message"] is True and bodies[2]["add_generation_prompt"] is False
        assert "continue_final_message" not in bodies[0]


@on_uvloop
async def test_an_answer_that_breaks_off_at_its_last_token_is_whole() -> None:
    async with scripted(cut("a", "b")) as server, rig(server.port) as here:
        ended = await here.answer(ask(max_tokens=2))
        assert isinstance(ended, Answered) and (ended.finish, here.text, len(server.requests)) == ("length", "ab", 1)


@on_uvloop
async def test_what_a_server_cannot_go_on_with_fails_by_name() -> None:
    other = send(response(200, b'{"data": [{"id": "m", "owned_by": "someone"}]}', connection="close"))
    async with scripted(cut("a"), models=other) as server, rig(server.port) as here:
        ended = await here.answer(ask())
        assert isinstance(ended, Broke) and ended.error.kind == "unavailable" and "broke off" in ended.error.message
        assert here.facts["server"] == "OpenAI-compatible"
    async with scripted(cut('{"a')) as server, rig(server.port) as here:
        ended = await here.answer(ask(grammar=Grammar("json_schema", "{}")))
        assert isinstance(ended, Broke) and "in the middle of one that must match a schema" in ended.error.message


@on_uvloop
async def test_what_was_answered_before_a_restart_is_sent_along() -> None:
    async with scripted(answer(" two")) as server, rig(server.port) as here:
        ended = await here.answer(ask(text="One", tokens=1, max_tokens=5))
        assert isinstance(ended, Answered) and ended.answer_tokens == 2 and here.text == " two"
        assert server.requests[0][2]["messages"][-1]["content"] == "One" and server.requests[0][2]["max_tokens"] == 4


@on_uvloop
async def test_cancelling_lets_go_of_the_connection_at_once_and_says_nothing_more() -> None:
    async with scripted(hang(stream_head(), chat("a"))) as server, rig(server.port) as here:
        here.device.send([ask()])
        await here.until((Said,))
        here.device.send([Abort(1)])
        await server.left.wait()
        assert not [r for r in here.reports if isinstance(r, Answered | Broke)]


@on_uvloop
async def test_a_server_that_says_nothing_for_too_long_is_left() -> None:
    async with scripted(hang(stream_head()), hang(stream_head())) as server, rig(server.port, idle_s=0.2, tries=2) as here:  # fmt: skip
        ended = await here.answer(ask())
        assert isinstance(ended, Broke) and ended.error.message.endswith("it said nothing for too long, 2 times")


DEEP = b"[" * 100_000
HOSTILE: dict[str, tuple[Play, str]] = {
    "an endless line": (endless(b"x" * 4096), "a line of more than 1 MiB"),
    "an endless answer": (endless(chat("more ")), "does not end its answer"),
    "not JSON": (send(stream_head(), event("what?")), "no piece of an answer: what?"),
    "deep JSON": (send(stream_head(), b'data: {"choices": ' + DEEP + b"\n\n"), "no piece of an answer"),
    "another type": (send(response(200, b"<html>", "text/html")), "answers as 'text/html', not as text/event-stream"),
    "a redirect": (send(response(307, b"", location="http://127.0.0.1:1/")), "answered 307, which sends elsewhere"),
    "a packed body": (send(stream_head(more="content-encoding: gzip\r\n")), "packs its answer as 'gzip'"),
    "huge headers": (endless(b"x: y\r\n", b"HTTP/1.1 200 OK\r\n"), "cannot be reached"),
    "no HTTP": (send(b"SSH-2.0-OpenSSH\r\n\r\n" * 2), "cannot be reached"),
    "an unknown end": (send(stream_head(), chat("a", "bored")), "ended the answer for a reason that is not known here: bored"),
    "a tool call": (send(stream_head(), chat("", "tool_calls")), "calling a tool"),
    "a filter": (send(stream_head(), chat("a", "content_filter")), "by its content filter"),
    "an error in the stream": (send(stream_head(), event({"error": {"message": "out\nof luck", "code": 500}})), "gave up the answer: out of luck"),
    "bad request": (send(response(400, b'{"error": {"message": "top_k is wrong"}}')), "refused it (400): top_k is wrong"),
    "no entry": (send(response(401, b"")), "does not let the daemon in (401)"),
    "a refusal without end": (send(response(500, b"z" * 3_000_000)), "answered 500: zzz"),
    "no number": (send(stream_head(), event('{"choices": [{"delta": {"content": 5}}]}')), "no piece of an answer"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@on_uvloop
async def test_a_hostile_server_fails_its_step_by_name(name: str) -> None:
    play, expected = HOSTILE[name]
    async with scripted(play, play, answer("fine")) as server, rig(server.port, tries=2) as here:
        ended = await here.answer(ask())
        assert isinstance(ended, Broke) and expected in ended.error.message, ended
        assert ended.error.message.isprintable() and len(ended.error.message) < 900
        server.script[:] = server.script[-1:]
        here.reports.clear()
        assert isinstance(await here.answer(ask(2)), Answered) and here.text == "fine"


@on_uvloop
async def test_a_server_that_is_not_there_fails_the_step_after_its_tries_and_comes_back_by_itself() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        async with rig(port, tries=2) as here:
            ended = await here.answer(ask())
            assert isinstance(ended, Broke) and ended.error.kind == "task_failed"
            assert f"'far' at http://127.0.0.1:{port}/v1 cannot be reached" in ended.error.message
            assert here.facts["reachable"] is False and here.facts["why"]
            sock.close()
            here.reports.clear()
            script = scripted(answer("back"))
            async with script as server:
                moved = await asyncio.start_server(server.serve, "127.0.0.1", port)
                await here.until((object,))
                assert here.facts["reachable"] is True
                assert isinstance(await here.answer(ask(2)), Answered)
                moved.close()
                await moved.wait_closed()


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        (b"[]", "its list of models is not what"),
        (b'{"data": []}', "it offers no model"),
        (b"[" * 100_000, "its list of models is not what"),
        (b" " * (2 << 20), "a body of more than 1 MiB"),
    ],
)
@on_uvloop
async def test_a_list_of_models_that_makes_no_sense_fails_the_step_by_name(listing: bytes, expected: str) -> None:
    models = send(response(200, listing, connection="close"))
    async with scripted(models=models) as server, rig(server.port) as here:
        ended = await here.answer(ask())
        assert isinstance(ended, Broke) and expected in ended.error.message


@on_uvloop
async def test_a_server_without_a_list_is_asked_for_the_model_of_the_config() -> None:
    models = send(response(404, b"", connection="close"))
    async with scripted(answer("ok"), models=models) as server, rig(server.port, endpoint_model="mine") as here:
        assert isinstance(await here.answer(ask()), Answered)
        assert server.requests[0][2]["model"] == "mine"


@on_uvloop
async def test_a_password_in_the_url_is_used_and_not_shown() -> None:
    async with scripted(answer("ok")) as server:
        url = f"http://me:secret@127.0.0.1:{server.port}/v1"
        async with rig(server.port, endpoint=url) as here:
            assert isinstance(await here.answer(ask()), Answered)
            assert server.requests[0][1]["authorization"].startswith("Basic ")
            assert "secret" not in json.dumps(here.facts)


@on_uvloop
async def test_the_key_is_read_when_it_is_used_and_never_written_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = tmp_path / "key"
    async with scripted(answer("a"), answer("b")) as server, rig(server.port, api_key_file=str(key)) as here:
        ended = await here.answer(ask())
        assert isinstance(ended, Broke) and "models.far.api_key_file cannot be read" in ended.error.message
        assert str(tmp_path) not in ended.error.message
        key.write_text("s3cret\n")
        key.chmod(0o644)
        assert isinstance(await here.answer(ask(2)), Answered)
        key.write_text("t4cret")
        assert isinstance(await here.answer(ask(3)), Answered)
        assert [h["authorization"] for _, h, _ in server.requests] == ["Bearer s3cret", "Bearer t4cret"]
        key.write_text("two\nlines")
        assert isinstance(await here.answer(ask(4)), Broke)
    assert caplog.text.count("0600") == 1 and "cret" not in caplog.text


@on_uvloop
async def test_proxies_of_the_environment_do_not_count() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            patch.setenv(name, "http://127.0.0.1:1")
        async with scripted(answer("ok")) as server, rig(server.port) as here:
            assert isinstance(await here.answer(ask()), Answered)


@on_uvloop
async def test_log_probabilities_come_with_the_ids_that_the_server_says() -> None:
    content = [{"token": "token_id:5", "logprob": -0.5, "top_logprobs": [{"token": "token_id:5", "logprob": -0.5}, {"token": "token_id:9", "logprob": None}]}]  # fmt: skip
    told = send(stream_head(), chat("a", logprobs={"content": content}), chat("", "stop"), usage(1, 1), DONE)
    nameless = send(stream_head(), chat("a", logprobs={"content": [{"logprob": -1.0, "top_logprobs": [{"token": "a", "logprob": -1.0}]}]}))  # fmt: skip
    async with scripted(told, nameless) as server, rig(server.port) as here:
        assert isinstance(await here.answer(ask(logprobs=2)), Answered)
        (said,) = (r for r in here.reports if isinstance(r, Said))
        assert said.logprobs == (TokenLogprob(-0.5, ((5, -0.5), (9, -9999.0))),)
        ended = await here.answer(ask(2, logprobs=1))
        assert isinstance(ended, Broke) and "ask for logprobs 0" in ended.error.message


@on_uvloop
async def test_many_answers_at_once_are_kept_apart_and_closing_leaves_nothing() -> None:
    plays = [hang(stream_head(), chat(str(n))) for n in range(20)]
    async with scripted(*plays) as server:
        async with rig(server.port) as here:
            here.device.send([ask(n) for n in range(1, 21)])
            said = await here.until((Said,), 20)
            assert {r.command for r in said} == set(range(1, 21)) and {r.text for r in said} == set(map(str, range(20)))
        assert not here.device._tasks


def test_a_retry_after_is_seconds_or_a_date_and_never_for_ever() -> None:
    assert [pause_of(h) for h in ("3", "", "soon", "-1", "99999999")] == [3.0, 0.0, 0.0, 0.0, 300.0]
    assert pause_of("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert pause_of("Wed, 21 Oct 2099 07:28:00 GMT") == 300.0


def unsteady(words: list[str], chance: random.Random) -> Play:
    """Goes on from the text that it is given, and at each word may let go, hang up with an error, or be busy."""

    async def play(server: Scripted, writer: asyncio.StreamWriter) -> None:
        server.script.append(play)
        (*_, last) = server.requests[-1][2]["messages"]
        begun = len(last["content"].split(",")) - 1 if last["role"] == "assistant" else 0
        limit = server.requests[-1][2]["max_tokens"]
        if chance.random() < 0.2:
            writer.write(response(chance.choice((429, 502, 503, 504)), b"", connection="close"))
            return
        writer.write(stream_head())
        for word in words[begun : begun + limit]:
            if chance.random() < 0.1:
                if chance.random() < 0.5:
                    writer.write(event({"error": {"code": 503, "message": "later"}}))
                return
            writer.write(chat(word))
        whole = len(words[begun:]) <= limit
        writer.writelines([chat("", "stop" if whole else "length"), usage(3, min(limit, len(words[begun:]))), DONE])

    return play


@pytest.mark.parametrize("seed", seeds(20, 2_000))
@on_uvloop
async def test_whatever_breaks_off_where_the_answer_is_the_same_and_each_word_is_said_once(seed: int) -> None:
    chance = random.Random(seed)
    words = [f"{n}," for n in range(chance.randrange(1, 60))]
    limit = chance.randrange(1, 60)
    async with scripted(unsteady(words, chance)) as server, rig(server.port, tries=100) as here:
        ended = await here.answer(ask(max_tokens=limit))
        assert isinstance(ended, Answered), ended
        assert here.text == "".join(words[:limit]) and ended.answer_tokens == min(limit, len(words))
        if len(words) != limit:
            assert ended.finish == ("stop" if len(words) < limit else "length")
