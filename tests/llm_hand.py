"""A tiny model's engine, driven by hand: sequences with pages of their own, chunks as a batcher would send them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from hexrt.devices.places import anonymous
from hexrt.llm.engine import ModelEngine
from hexrt.llm.engine_model import PagedModel
from hexrt.protocol.host import BindPages, Chunk, ChunkSequence, Sampling, Token
from tests.llm_families import make

PAGES = 8  # of 16 tokens, for each sequence: the context of the tiny models
PROMPT = (1, 40, 90, 77, 110, 83)


class Hand:
    """`folder` is made where it is not there yet."""

    def __init__(self, folder: Path, family: str = "llama", kind: type[PagedModel] = PagedModel) -> None:
        if not folder.exists():
            make(folder, family)
        torch.set_num_threads(1)  # a pass of so small a model is over before a second thread has begun
        self.model = kind("tiny", folder, "float32", memoryview(anonymous(16 << 20)), 16)
        source = (folder / "tokenizer.json").read_text(encoding="utf-8")
        self.tokeniser = Tokenizer.from_str(source)
        decode: Any = partial(self.tokeniser.decode, skip_special_tokens=True)
        self.engine = ModelEngine(self.model, decode, lambda: source)
        self._commands = itertools.count(1)

    def bind(self, number: int, pages: int = PAGES) -> None:
        frames = tuple(number % 32 * PAGES + page for page in range(pages))
        assert self.engine.bind(BindPages("tiny", number, 0, frames, 1))

    def chunk(self, passes: int, *entries: ChunkSequence) -> list[Token]:
        return list(self.engine.run(Chunk(next(self._commands), "tiny", passes, entries)).tokens)

    def answers(
        self, samplings: Sequence[Sampling], prompt: Sequence[int] = PROMPT, passes: int = 4, answered: Sequence[int] = ()
    ) -> list[Token]:  # fmt: skip
        """All that the sequences 1, 2, ... say, together in chunks of `passes`; they are released afterwards."""
        whole = (*prompt, *answered)
        numbers = range(1, len(samplings) + 1)
        for number in numbers:
            self.bind(number)
        entries = [
            ChunkSequence(n, 0, whole, True, s, tuple(answered), tuple(prompt) if s.repetition_penalty != 1 else ())
            for n, s in zip(numbers, samplings, strict=True)
        ]
        said: dict[int, Token] = {}
        at = {n: len(whole) for n in numbers}
        while entries:
            for token in self.chunk(passes, *entries):
                old = said.get(token.sequence)
                at[token.sequence] += len(token.ids) - (old is None)
                said[token.sequence] = token if old is None else _joined(old, token)
            entries = [ChunkSequence(n, at[n], (), False) for n in numbers if not said[n].finish]
        for number in numbers:
            self.engine.release(number)
        return [said[n] for n in numbers]

    def ids(self, text: str) -> list[int]:
        return list(self.tokeniser.encode(text, add_special_tokens=False).ids)


def _joined(old: Token, new: Token) -> Token:
    return Token(old.sequence, old.ids + new.ids, old.text + new.text, new.finish, old.logprobs + new.logprobs)


def sampling(max_tokens: int = 12, temperature: float = 0.0, ignore_eos: bool = True, **more: Any) -> Sampling:
    given = {"top_k": 0, "top_p": 1.0, "seed": 0, "stop": (), **more}
    return Sampling(temperature, max_tokens=max_tokens, ignore_eos=ignore_eos, **given)
