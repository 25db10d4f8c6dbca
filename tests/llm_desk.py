"""For the batcher's tests: an engine whose host is played by hand, and requests in short."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

from hexrt.errors import ErrorRecord
from hexrt.llm.batch import Engine, Outcome, SequenceRequest
from hexrt.protocol.host import Chunked, Sampling, ToHost, Token

CANCELLED = ErrorRecord("cancelled", "cancelled before it began")


def greedy(max_tokens: int) -> Sampling:
    return Sampling(0.0, 0, 1.0, 0, (), max_tokens)


def ask(key: Hashable, prompt: int, answer: int, **more: Any) -> SequenceRequest:
    """A request of `prompt` tokens 100, 101, ...; answer 0 asks for a prefill alone."""
    return SequenceRequest(key, tuple(range(100, 100 + prompt)), greedy(answer) if answer else None, **more)


class Desk:
    """An engine with the host's part played by hand. Page size 4, context 64, budget 8, two passes a chunk unless said otherwise."""

    def __init__(self, frames: int = 16, **more: int) -> None:
        given = {"page_tokens": 4, "context_tokens": 64, "token_budget": 8, "passes": 2} | more
        self.engine = Engine("m", frames, **given)
        self.commands = itertools.count(1)

    def decide(self) -> list[ToHost]:
        sent = self.engine.decide(0, lambda: next(self.commands))
        self.engine.check_integrity()
        return sent

    def reply(self, command: int, *tokens: Token) -> list[Outcome]:
        outcomes = self.engine.chunked(Chunked(command, command * 10, command * 10 + 5, tokens), 0)
        self.engine.check_integrity()
        return outcomes
