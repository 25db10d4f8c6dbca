"""A model that a server answers for, as a device of the daemon's own loop: speaks HTTP, tries again, goes on where an answer broke off.

Owns the requests that are with the server. A request is tried again where the server is busy, not there, or lets go before the first token;
after that the answer is continued, never repeated, so that what was given out stays. Between tries it waits longer and longer, or as long
as the server says.
"""

from __future__ import annotations

import asyncio
import email.utils
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from time import monotonic_ns, time
from typing import Any

import httpx
from httpx_sse import ServerSentEvent, SSEError
from msgspec.structs import replace
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, stop_never
from tenacity.wait import wait_exponential_jitter

from hexrt.config import Model
from hexrt.devices.body import describe
from hexrt.devices.endpoint_http import STREAM, EndpointHttp, words
from hexrt.errors import HexrtError, Overloaded, TaskFailed
from hexrt.llm.endpoint import Abort, Answered, Ask, Broke, EndpointReport, Said, Seen
from hexrt.llm.endpoint_wire import (
    Dialect,
    Piece,
    Served,
    Usage,
    body_of,
    path_of,
    piece_of,
    printable,
    refusal,
    served_by,
    words_of,
)

BUSY = (429, 502, 503, 504)
MAX_PAUSE_S = 300.0
"""The longest that a server may ask to be left alone."""
MOST_OFFERED = 20
SLACK_TOKENS, SLACK = 64, 4
"""Pieces beyond `max_tokens`, and how many times as many, after which a server is taken for one that never ends."""
MAX_CHARACTERS = 8 << 20
_pauses = wait_exponential_jitter(multiplier=0.25, max=10.0, jitter=0.25)
_rests = wait_exponential_jitter(multiplier=0.5, max=30.0, jitter=0.5)
Sleep = Callable[[float], Awaitable[Any]]


class _Again(Exception):
    """Another try may do better; else the step fails of `error`."""

    def __init__(self, error: HexrtError, pause_s: float = 0.0) -> None:
        super().__init__(error.message)
        self.error = error
        self.pause_s = pause_s


@dataclass(eq=False, slots=True)
class _Answer:
    """One answer over all its requests."""

    ask: Ask
    texts: list[str] = field(default_factory=list)
    tokens: int = 0  # before this request, as far as they were counted
    pieces: int = 0  # of this request
    characters: int = 0
    finish: str = ""
    usage: Usage | None = None

    def rest(self) -> Ask:
        """What is still to be asked for."""
        self.tokens, self.pieces = self.tokens + self.pieces, 0
        text = self.ask.text + "".join(self.texts)
        return replace(self.ask, text=text, tokens=self.ask.tokens + self.tokens)

    def take(self, piece: Piece) -> None:
        self.usage = piece.usage or self.usage
        self.finish = piece.finish or self.finish
        self.pieces += piece.is_token
        self.characters += len(piece.text)
        if self.pieces > SLACK * self.ask.sampling.max_tokens + SLACK_TOKENS or self.characters > MAX_CHARACTERS:
            raise TaskFailed("the server does not end its answer")
        if piece.text:
            self.texts.append(piece.text)

    def answered(self) -> Answered:
        """What the server counted in its last request, together with what was counted here in those before."""
        before = self.ask.tokens + self.tokens
        prompt = max(0, self.usage.prompt_tokens - before) if self.usage else 0
        drawn = self.usage.completion_tokens if self.usage else self.pieces
        return Answered(self.ask.command, self.finish, prompt, before + drawn, monotonic_ns())


def name_of(model: str) -> str:
    """A model as anybody may see it: llama.cpp's server calls one by the path of its file unless it was told a name."""
    return printable(model.rpartition("/")[2] if model.startswith("/") else model)[-200:]


class EndpointDevice:
    def __init__(self, name: str, model: Model, on_report: Callable[[EndpointReport], None], sleep: Sleep = asyncio.sleep) -> None:  # fmt: skip
        """`name` is the model's in the config. Must be made on the running loop."""
        self._name = name
        self._model = model
        self._report = on_report
        self._sleep = sleep
        self._http = EndpointHttp(name, model)
        self._served: Served | None = None
        self._facts: dict[str, Any] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._look()

    def send(self, messages: list[Any]) -> None:
        for message in messages:
            if isinstance(message, Ask):
                task = asyncio.get_running_loop().create_task(self._run(message))
                self._tasks[message.command] = task
                task.add_done_callback(lambda _, command=message.command: self._tasks.pop(command, None))  # type: ignore[misc]
            elif isinstance(message, Abort) and (running := self._tasks.get(message.command)) is not None:
                running.cancel()

    async def close(self) -> None:
        """Lets go of everything that is with the server."""
        tasks = [*self._tasks.values(), *([self._looking] if self._looking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.close()

    # --- one answer -----------------------------------------------------------------------------------------------

    async def _run(self, ask: Ask) -> None:
        answer = _Answer(ask)
        try:
            while not answer.finish:
                await self._go_on(answer)
            self._report(answer.answered())
        except _Again as again:
            tried = f", {self._model.tries} times" if self._model.tries > 1 else ""
            error = again.error
            self._report(Broke(ask.command, type(error)(error.message + tried).record(), monotonic_ns()))
        except Exception as error:  # border of a task
            self._report(Broke(ask.command, describe(error), monotonic_ns()))

    async def _go_on(self, answer: _Answer) -> None:
        """Until the answer is whole, or has grown and broke off. Raises what the step fails of, _Again where no try was left."""
        rest = answer.rest()
        if rest.text and rest.tokens >= rest.sampling.max_tokens:
            answer.finish = "length"
            return
        async for attempt in self._retrying(self._model.tries):
            with attempt:
                await self._exchange(answer, rest)

    def _retrying(self, tries: int) -> AsyncRetrying:
        return AsyncRetrying(
            stop=stop_after_attempt(tries) if tries else stop_never,
            wait=self._pause,
            retry=retry_if_exception_type(_Again),
            sleep=self._sleep,
            reraise=True,
        )

    @staticmethod
    def _pause(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        return max(_pauses(state), error.pause_s if isinstance(error, _Again) else 0.0)

    async def _exchange(self, answer: _Answer, rest: Ask) -> None:
        """One request. Returns too where it broke off after more of the answer had come. Raises _Again, HexrtError."""
        grown = len(answer.texts)
        try:
            served = self._served or await self._identify()
            async with self._http.post(path_of(rest), body_of(rest, served)) as (response, source):
                if response.status_code != 200:
                    raise await self._refusal(response)
                if response.headers.get("content-type", "").partition(";")[0].strip().lower() != STREAM:
                    raise TaskFailed(f"the server answers as {printable(response.headers.get('content-type', 'nothing')[:80])!r}, not as {STREAM}")  # fmt: skip
                async with aclosing(source.aiter_sse()) as events:
                    await self._read(answer, events)
        except SSEError as error:
            raise TaskFailed(f"the server's stream makes no sense: {printable(str(error)[:200])}") from None
        except httpx.TransportError as error:
            self._doubt(why_of(error))
            if len(answer.texts) == grown and not answer.finish:
                raise _Again(self._unreachable(error)) from None
        else:
            if not answer.finish and len(answer.texts) == grown:
                raise _Again(TaskFailed("the server ended its stream before its answer"))

    async def _read(self, answer: _Answer, events: AsyncIterator[ServerSentEvent]) -> None:
        top, command = answer.ask.sampling.logprobs, answer.ask.command
        async for event in events:
            if event.data == "[DONE]":
                return
            if not event.data:
                continue
            piece = piece_of(event.data, top)
            if piece.is_broken:
                return
            answer.take(piece)
            if piece.text or piece.logprobs:
                self._report(Said(command, piece.text, monotonic_ns(), piece.logprobs))

    async def _refusal(self, response: httpx.Response) -> Exception:
        body = await words(response)
        if response.status_code in BUSY:
            said = words_of(body)
            error = Overloaded(f"the server answered {response.status_code}{': ' if said else ''}{said}")
            return _Again(error, pause_of(response.headers.get("retry-after", "")))
        if response.status_code == 404:
            self._served = None  # it may offer another model by now
        return refusal(response.status_code, body)

    def _unreachable(self, error: httpx.TransportError) -> HexrtError:
        return TaskFailed(f"the server of the model {self._name!r} at {self._http.shown_url} cannot be reached: {why_of(error)}")  # fmt: skip

    # --- what the server is ---------------------------------------------------------------------------------------

    async def _identify(self) -> Served:
        """Asks what it is and offers. Raises httpx.TransportError, _Again, HexrtError."""
        status, body = await self._http.get("models")
        if status in BUSY:
            raise _Again(Overloaded(f"the server answered {status}: {words_of(body)}"))
        if status == 200:
            served, offers = served_by(body, self._model.endpoint_model)
        elif self._model.endpoint_model and status in (404, 405, 501):  # it keeps no list
            served, offers = Served(self._model.endpoint_model), ()
        else:
            raise refusal(status, body)
        if served.dialect is Dialect.OTHER and await self._is_tgi():
            served = replace(served, dialect=Dialect.TGI)
        self._served = served
        self._tell(reachable=True, why="", server=served.dialect.value, model=name_of(served.model), context_tokens=served.context_tokens, offers=[name_of(o) for o in offers[:MOST_OFFERED]])  # fmt: skip
        return served

    async def _is_tgi(self) -> bool:
        status, body = await self._http.get("../info")
        return status == 200 and b"text-generation-router" in body

    def _tell(self, **facts: Any) -> None:
        told = self._facts | {"url": self._http.shown_url, "model": self._model.endpoint_model} | facts
        if told != self._facts:
            self._facts = told
            self._report(Seen(told))

    def _doubt(self, why: str) -> None:
        """A request failed: the server may come back as another."""
        self._served = None
        self._tell(reachable=False, why=why)
        self._look()

    def _look(self) -> None:
        """Looks until the server is seen, so that `hexrt devices` says how it is without any step."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look_until_seen())

    async def _look_until_seen(self) -> None:
        looking = AsyncRetrying(
            stop=stop_never,
            wait=_rests,
            retry=retry_if_exception_type((_Again, httpx.TransportError)),
            sleep=self._sleep,
        )
        try:
            async for attempt in looking:
                with attempt:
                    try:
                        await self._identify()
                    except httpx.TransportError as error:
                        self._tell(reachable=False, why=why_of(error))
                        raise
                    except _Again as again:
                        self._tell(reachable=False, why=again.error.message)
                        raise
        except Exception as error:  # border of a task
            self._tell(reachable=False, why=describe(error).message)


def why_of(error: httpx.TransportError) -> str:
    """For people, without what a library calls it."""
    if isinstance(error, httpx.TimeoutException):
        return (
            "it does not answer in time" if isinstance(error, httpx.ConnectTimeout) else "it said nothing for too long"
        )
    said = printable(str(error)[:200])
    return said or type(error).__name__


def pause_of(header: str) -> float:
    """Seconds that a Retry-After asks for; 0 where it makes no sense."""
    try:
        seconds = (
            float(header)
            if header.strip().isdigit()
            else email.utils.parsedate_to_datetime(header).timestamp() - time()
        )
    except (ValueError, TypeError):
        return 0.0
    return min(max(seconds, 0.0), MAX_PAUSE_S)
