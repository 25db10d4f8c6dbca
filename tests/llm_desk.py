"""For the batcher's tests: an engine whose host is played by hand, and requests in short."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import Any

from hexrt.errors import ErrorRecord
from hexrt.llm.batch import Engine, Outcome, SequenceRequest
from hexrt.memory.keeper import Keeper
from hexrt.memory.lru import Lru, NextUse
from hexrt.memory.pool import PagePool
from hexrt.protocol.host import Chunked, Copied, Copy, Sampling, ToHost, Token
from hexrt.scheduling.links import Links

CANCELLED = ErrorRecord("cancelled", "cancelled before it began")


def greedy(max_tokens: int) -> Sampling:
    return Sampling(0.0, 0, 1.0, 0, (), max_tokens)


def ask(key: Hashable, prompt: int, answer: int, **more: Any) -> SequenceRequest:
    """A request of `prompt` tokens 100, 101, ...; answer 0 asks for a prefill alone."""
    return SequenceRequest(key, tuple(range(100, 100 + prompt)), greedy(answer) if answer else None, **more)


PAGE_BYTES = 3 * 4096  # no divisor of an extent, as of most models: frames are taken from the lowest up


class FakeDevice:
    """As much of a device as the keeper asks for."""

    def __init__(self, commands: Iterator[int]) -> None:
        self.ready = True
        self._commands = commands

    def next_command(self) -> int:
        return next(self._commands)


def keeper_of(frames: int = 16, host: int = 0, nvme: int = 0, policy: str = "lru") -> Keeper:
    """A keeper of tiers with so many pages; 0 leaves a tier out."""
    keeper = Keeper(PagePool(NextUse() if policy == "next_use" else Lru()), Links())
    if host:
        keeper.add_host(host * PAGE_BYTES)
    if nvme:
        keeper.add_nvme(nvme * PAGE_BYTES)
    keeper.add_device("cpu:0", frames * PAGE_BYTES)
    return keeper


class Desk:
    """An engine with the host's part played by hand. Page size 4, context 64, budget 8, two passes a chunk unless said otherwise."""

    def __init__(self, frames: int = 16, host: int = 0, nvme: int = 0, policy: str = "lru", **more: int) -> None:
        given = {"page_tokens": 4, "context_tokens": 64, "token_budget": 8, "passes": 2} | more
        self.keeper = keeper_of(frames, host, nvme, policy)
        self.engine = Engine("m", "cpu:0", self.keeper, PAGE_BYTES, **given)
        self.keeper.when_freed.append(self.engine.frames_freed)
        self.commands = itertools.count(1)
        self.now_ns = 0
        self.devices = {name: FakeDevice(self.commands) for name in ("cpu:0", "disk:0")}
        self.copies: list[tuple[str, Copy]] = []  # on their way, oldest first

    def decide(self) -> list[ToHost]:
        """What goes to the device but for copies, which stay in `copies` until they are answered."""
        sent = self.engine.decide(self.now_ns, lambda: next(self.commands))
        copies: dict[str, list[Any]] = {}
        self.keeper.decide(0, self.devices, copies)
        self.copies += [(name, copy) for name, messages in copies.items() for copy in messages]
        self.engine.check_integrity()
        return sent

    def answer_copies(self) -> None:
        """Every copy that is on its way has gone well."""
        while self.copies:
            name, copy = self.copies.pop(0)
            self.keeper.copied(name, Copied(copy.command, 0, 1, sum(p.pages * p.page_bytes for p in copy.pieces)))

    def reply(self, command: int, *tokens: Token) -> list[Outcome]:
        outcomes = self.engine.chunked(Chunked(command, command * 10, command * 10 + 5, tokens), 0)
        self.engine.check_integrity()
        return outcomes
