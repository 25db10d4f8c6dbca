"""What a host keeps of one sequence between chunks, and what the sequence does and gains in the chunk that runs.

Owns its page table as bound, its place in prompt and answer, its text and its grammar. All but the table and what was drawn last can be
made again from the answer's ids. Used on the host's compute thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hexrt.core import TokenLogprob
from hexrt.llm.engine_grammar import GrammarState
from hexrt.llm.engine_pass import DrawRow, Numbers, Row
from hexrt.llm.engine_text import AnswerText
from hexrt.protocol.host import ChunkSequence, Sampling, Token

ERROR = "error: "
LEAST_LOGPROB = -9999.0
"""Stands for the logarithm of 0, which JSON cannot write."""
FIRST_PAGES = 16


def bad_sampling(sampling: Sampling) -> str:
    """What of it makes no sense; empty where all does. The daemon has checked it: this is for a host that is told otherwise."""
    finite = {"temperature": 0.0, "top_p": 0.0, "min_p": 0.0, "repetition_penalty": 0.0, "top_k": 0}
    for name, least in finite.items():
        value = getattr(sampling, name)
        if not math.isfinite(value) or value < least:
            return f"params.{name}: {value} is no value for it"
    if sampling.repetition_penalty == 0 or sampling.top_p == 0:
        return f"params.{'top_p' if sampling.top_p == 0 else 'repetition_penalty'}: it must be above 0"
    return ""


@dataclass(eq=False, slots=True)
class HostSequence:
    """`position`: tokens whose K and V are in the pages; `pending`: the last drawn token, which is not."""

    number: int
    pages: int = 0  # bound
    version: int = 0
    position: int = -1
    sampling: Sampling | None = None
    text: AnswerText | None = None
    grammar: GrammarState | None = None
    slot: int = -1  # of what prompt and answer hold, under a repetition penalty
    answered: int = 0
    pending: int | None = None
    finish: str = ""
    _table: Numbers = field(default_factory=lambda: np.zeros(FIRST_PAGES, np.int32))

    @property
    def frames(self) -> Numbers:
        return self._table[: self.pages]

    def bind(self, first: int, frames: Sequence[int]) -> None:
        """`first` is at most `pages`."""
        end = first + len(frames)
        if end > len(self._table):
            self._table = np.concatenate([self._table, np.zeros(max(end, len(self._table)), np.int32)])
        self._table[first:end] = frames
        self.pages = max(self.pages, end)

    def has_pages(self, count: int, page_tokens: int) -> bool:
        return self.position + max(1, count) <= self.pages * page_tokens

    def introduce(
        self, sampling: Sampling, decode: Callable[[Sequence[int]], str], grammar: GrammarState | None
    ) -> None:
        self.sampling, self.grammar = sampling, grammar
        self.text = AnswerText(decode, sampling.stop)
        self.answered = 0

    def count(self, token: int, eos: frozenset[int]) -> str:
        """How this token, the answer's next and known to its text, ends it; empty where it does not."""
        sampling, text, grammar = self.sampling, self.text, self.grammar
        assert sampling is not None and text is not None
        self.answered += 1
        if grammar is not None:
            grammar.take(token)
            if grammar.error:
                return ERROR + grammar.error
            if grammar.is_complete:
                return "stop"
        if text.stopped or (token in eos and not sampling.ignore_eos) or token in sampling.stop_tokens:
            return "stop"
        return "length" if self.answered >= sampling.max_tokens else ""


@dataclass(eq=False, slots=True)
class Part:
    """What one sequence does and gains in the chunk that runs."""

    sequence: HostSequence
    entry: ChunkSequence
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    told: int = 0  # so many of `ids` are part of `pieces`
    ended: bool = False  # by the chunk that runs

    # --- what it does in a pass -------------------------------------------------------------------------------------

    def row(self, number: int) -> Row:
        sequence, entry = self.sequence, self.entry
        if number == 0 and entry.ids:
            return Row(entry.ids, sequence.frames, sequence.position, self.draw() if entry.last else None)
        assert sequence.pending is not None
        return Row((sequence.pending,), sequence.frames, sequence.position, self.draw())

    def draw(self) -> DrawRow:
        sequence = self.sequence
        assert sequence.sampling is not None
        allow = None if sequence.grammar is None else sequence.grammar.allow
        return DrawRow(sequence.sampling, sequence.answered, sequence.slot, allow)

    def count(self, number: int) -> int:
        """Its tokens in pass `number`."""
        return len(self.entry.ids) if number == 0 and self.entry.ids else 1

    def draws(self, number: int) -> bool:
        """Whether it draws in pass `number`."""
        return self.entry.last or not (number == 0 and self.entry.ids)

    @property
    def wants_logprobs(self) -> bool:
        sampling = self.sequence.sampling
        return sampling is not None and sampling.logprobs >= 0

    def has_grammar_left(self) -> bool:
        """False where its grammar has failed, which ends it."""
        grammar = self.sequence.grammar
        if grammar is not None and grammar.error:
            self.end(ERROR + grammar.error)
        return grammar is None or not grammar.error

    # --- what it gains ----------------------------------------------------------------------------------------------

    def take(self, token: int, eos: frozenset[int], report: tuple[list[float], list[int]] | None) -> None:
        """A token that was drawn."""
        sequence = self.sequence
        assert sequence.text is not None
        sequence.pending = token
        self.ids.append(token)
        if report is not None:
            self.logprobs.append(self._logprob(*report))
        if sequence.text.has_stops:
            self._tell()
        if finish := sequence.count(token, eos):
            self._tell()
            self.pieces.append(sequence.text.flush())
            self.end(finish)

    def take_again(self, answered: Sequence[int], eos: frozenset[int]) -> None:
        """An answer's ids from before; their text is known already."""
        sequence = self.sequence
        assert sequence.text is not None and sequence.sampling is not None
        one_by_one = sequence.text.has_stops
        if not one_by_one:
            sequence.text.push_all(answered)
        for token in answered:
            if one_by_one:
                sequence.text.push(token)
            if finish := sequence.count(token, eos):
                self.end(finish)
                return
        if sequence.answered >= sequence.sampling.max_tokens:
            self.end("length")

    def _tell(self) -> None:
        assert self.sequence.text is not None
        self.pieces.append(self.sequence.text.push_all(self.ids[self.told :]))
        self.told = len(self.ids)

    def _logprob(self, values: list[float], ids: list[int]) -> TokenLogprob:
        sampling: Any = self.sequence.sampling
        drawn, *best = (max(value, LEAST_LOGPROB) for value in values)
        return TokenLogprob(drawn, tuple(zip(ids, best, strict=True))[: sampling.logprobs])

    def end(self, finish: str) -> None:
        if not self.sequence.finish:
            self.sequence.finish, self.ended = finish, True

    def token(self) -> Token:
        """What the chunk's report says of it; told once, at the end."""
        if self.told < len(self.ids):
            self._tell()
        finish = self.sequence.finish if self.ended else ""
        return Token(self.entry.sequence, tuple(self.ids), "".join(self.pieces), finish, tuple(self.logprobs))
