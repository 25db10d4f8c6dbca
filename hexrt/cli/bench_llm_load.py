"""The load of `hexrt bench llm`: the same prompts, the same questions and the same arithmetic for hexrt and for every peer.

Owns the prompts, what is asked of a server, and how a rate is taken from what its readers saw. Times are the reader's own. `decode N` is the
tokens that came between the last of the N first pieces of text and the first of the N last ones, in which all N decode; the prompts have been
read before, and no two share more than a beginning of chance. The best of the repetitions counts, since a busy machine only ever makes slower.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

from hexrt.errors import TimedOut

PAGE_TOKENS = 16
FIRST_ID = 100
"""Prompts are drawn from the ids above: below, vocabularies keep their control tokens."""
WORDS = (
    "the river stone light garden market window paper music winter summer road house field letter story water bread "
    "green blue"
).split()
OCCUPANCY = 0.6
"""Of the Poisson load: as much of what the 8 clients got."""
ARRIVALS_S, FEWEST_ARRIVALS = 30.0, 4
"""A slow server is sent fewer requests than `Sizes.arrivals`, as many as arrive in that time."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is asked. A context of whole pages and one token leaves just that token to be read when an answer begins."""

    prefill: int = 512
    context: int = 30 * PAGE_TOKENS + 1
    answer: int = 64
    sequences: tuple[int, ...] = (1, 4, 16, 64)
    clients: int = 8
    words: int = 105  # of a client's prompt: about 136 tokens with the chat template of the demo's model
    requests: int = 3  # of each client
    arrivals: int = 24
    repeats: int = 3
    prompts: int = 24  # of the comparison with float32
    most_s: float = 90.0  # reading the prompts of one row must not take longer
    subject_s: float = 200.0  # nor all rows of one server

    def quick(self) -> Sizes:
        return replace(
            self, sequences=(1, 4, 16), requests=1, arrivals=8, repeats=2, prompts=8, most_s=60.0, subject_s=80.0
        )

    @property
    def most_tokens(self) -> int:
        """Of prompts and answers that are held at a time."""
        return max(self.sequences) * (self.context + self.answer) + self.clients * (4 * self.words + self.answer)


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer as its reader saw it: when it was asked for, when each piece of text came, and its tokens."""

    asked_s: float
    came_s: tuple[float, ...]
    tokens: int


class Server(Protocol):
    """What answers, token by token. `client`: over which of the clients' connections."""

    async def complete(self, ids: Sequence[int], tokens: int, client: int) -> Stream: ...

    async def chat(self, text: str, tokens: int, client: int) -> Stream: ...


@dataclass(slots=True)
class Finding:
    """A number about one subject; `value` None: it could not be had, and `note` says why."""

    what: str
    value: float | None
    unit: str
    note: str = ""


@dataclass(slots=True)
class Findings:
    """What was measured so far, also when the next measurement breaks off."""

    found: list[Finding] = field(default_factory=list)

    def add(self, what: str, value: float | None, unit: str, note: str = "") -> None:
        self.found.append(Finding(what, value, unit, note))

    def value(self, what: str) -> float | None:
        return next((each.value for each in self.found if each.what == what), None)


# --- prompts ------------------------------------------------------------------------------------------------------


def prompt_ids(seed: str, count: int, vocabulary: int) -> list[int]:
    draw = random.Random(f"{seed} {count}")
    return [draw.randrange(min(FIRST_ID, vocabulary // 2), vocabulary) for _ in range(count)]


def prompt_text(seed: str, words: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


# --- arithmetic ---------------------------------------------------------------------------------------------------


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def decode_rate(streams: Sequence[Stream]) -> float:
    """Tokens a second while all of them decode. A stream's tokens are spread evenly over its pieces of text."""
    first = max(stream.came_s[0] for stream in streams)
    last = min(stream.came_s[-1] for stream in streams)
    if last <= first:
        return math.nan
    tokens = sum(sum(first < at <= last for at in s.came_s) * s.tokens / len(s.came_s) for s in streams)
    return tokens / (last - first)


def gaps(streams: Sequence[Stream]) -> list[float]:
    """Seconds between neighbouring pieces of text."""
    return [after - at for s in streams for at, after in zip(s.came_s, s.came_s[1:], strict=False)]


def first_s(streams: Sequence[Stream]) -> list[float]:
    return [stream.came_s[0] - stream.asked_s for stream in streams]


# --- measuring ----------------------------------------------------------------------------------------------------


async def measure(
    server: Server, sizes: Sizes, wanted: frozenset[str], vocabulary: int, into: Findings, rate: float = 0.0
) -> float:
    """All `wanted` rows of one server (prefill, decode, clients, poisson). `rate`: of arrivals a second, 0: as the clients' row gives it; returned.

    Raises TimedOut where that takes longer than `Sizes.subject_s`, with what was found until then in `into`.
    """
    try:
        async with asyncio.timeout(sizes.subject_s):
            return await _measure(server, sizes, wanted, vocabulary, into, rate)
    except TimeoutError:
        raise TimedOut(f"its rows take longer than {sizes.subject_s:g} s") from None


async def _measure(
    server: Server, sizes: Sizes, wanted: frozenset[str], vocabulary: int, into: Findings, rate: float
) -> float:
    await server.complete(prompt_ids("warm", 3 * PAGE_TOKENS, vocabulary), 2, 0)
    speed = await _prefill(server, sizes, vocabulary)
    if "prefill" in wanted:
        into.add(f"prefill {sizes.prefill}", speed, "tokens/s")
    if "decode" in wanted:
        await _decode(server, sizes, vocabulary, speed, into)
    if wanted & {"clients", "poisson"}:
        got = await _clients(server, sizes, into if "clients" in wanted else Findings())
        rate = rate or OCCUPANCY * got / sizes.answer
    if "poisson" in wanted:
        await _poisson(server, sizes, rate, into)
    return rate


async def _prefill(server: Server, sizes: Sizes, vocabulary: int) -> float:
    took = []
    for number in range(sizes.repeats + 1):
        ids = prompt_ids(f"prefill {number}", sizes.prefill, vocabulary)
        start = time.perf_counter()
        await server.complete(ids, 1, 0)
        took.append(time.perf_counter() - start)
    return sizes.prefill / min(took)


async def _decode(server: Server, sizes: Sizes, vocabulary: int, speed: float, into: Findings) -> None:
    prompts: list[list[int]] = []
    for count in sizes.sequences:
        what = f"decode {count}"
        if (expected_s := (count - len(prompts)) * sizes.context / speed) > sizes.most_s:
            into.add(what, None, "tokens/s", f"left out: reading its prompts would take about {expected_s:.0f} s")
            continue
        new = [prompt_ids(f"decode {number}", sizes.context, vocabulary) for number in range(len(prompts), count)]
        prompts += new
        await _all(server, new, 1, sizes)
        repeats = 1 if count > 16 else sizes.repeats
        rates = [decode_rate(await _all(server, prompts, sizes.answer, sizes)) for _ in range(repeats)]
        known = [rate for rate in rates if not math.isnan(rate)]
        into.add(what, max(known, default=None), "tokens/s", "" if known else "the answers came in one piece")


async def _all(server: Server, prompts: Sequence[Sequence[int]], tokens: int, sizes: Sizes) -> list[Stream]:
    return await asyncio.gather(
        *(server.complete(ids, tokens, number % sizes.clients) for number, ids in enumerate(prompts))
    )


async def _clients(server: Server, sizes: Sizes, into: Findings) -> float:
    async def one(client: int) -> list[Stream]:
        texts = [prompt_text(f"client {client} {turn}", sizes.words) for turn in range(sizes.requests)]
        return [await server.chat(text, sizes.answer, client) for text in texts]

    start = time.perf_counter()
    streams = [*chain.from_iterable(await asyncio.gather(*map(one, range(sizes.clients))))]
    got = sum(stream.tokens for stream in streams) / (time.perf_counter() - start)
    into.add(f"clients {sizes.clients}", got, "tokens/s", f"{len(streams)} answers of {sizes.answer} tokens")
    into.add(f"clients {sizes.clients} first token p50", quantile(first_s(streams), 0.5) * 1e3, "ms")
    return got


async def _poisson(server: Server, sizes: Sizes, rate: float, into: Findings) -> None:
    draw = random.Random("arrivals")
    loop = asyncio.get_running_loop()

    async def one(number: int, at_s: float) -> Stream:
        await asyncio.sleep(at_s - loop.time())
        return await server.chat(prompt_text(f"poisson {number}", sizes.words), sizes.answer, number % sizes.clients)

    count = max(FEWEST_ARRIVALS, min(sizes.arrivals, int(rate * ARRIVALS_S)))
    at_s, tasks = loop.time(), []
    for number in range(count):
        at_s += draw.expovariate(rate)
        tasks.append(one(number, at_s))
    streams = await asyncio.gather(*tasks)
    note = f"{count} answers of {sizes.answer} tokens, {rate:.2f} a second; between pieces of text as they come"
    for name, values in (("first token", first_s(streams)), ("between tokens", gaps(streams))):
        for share in (0.5, 0.99):
            value = quantile(values, share) * 1e3 if values else None
            into.add(f"poisson {name} p{share * 100:.0f}", value, "ms", note)
