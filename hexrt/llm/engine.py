"""The hands of LLM steps: carries out chunks on one model, as the daemon's batcher composed them.

Owns the sequences' page tables as bound, and what `engine_sequence` keeps of each. Decides nothing about pages or batches. All methods run
on the host's compute thread, but for `mask`, which any thread may call. A fault of one sequence ends that one, as its Token says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns

import torch

from hexrt.errors import BadRequest, Unavailable
from hexrt.llm.engine_grammar import Grammars
from hexrt.llm.engine_model import PagedModel
from hexrt.llm.engine_pass import Pass, advance
from hexrt.llm.engine_sampling import DRAWN, NOT_FINITE, Drawn
from hexrt.llm.engine_sequence import ERROR, HostSequence, Part, bad_sampling
from hexrt.protocol.host import BindPages, Chunk, Chunked, ChunkSequence, Sampling


def _no_tokeniser() -> str:
    raise Unavailable("it came without its tokeniser", "params")


class ModelEngine:
    """The sequences of one loaded model. `tokeniser` gives its tokenizer.json, which grammars need."""

    def __init__(
        self, model: PagedModel, decode: Callable[[Sequence[int]], str], tokeniser: Callable[[], str] = _no_tokeniser
    ) -> None:
        self.model = model
        self.stale_bindings = 0
        self._decode = decode
        self.grammars = Grammars(tokeniser, model.shape.vocabulary, model.eos)
        self._sequences: dict[int, HostSequence] = {}
        self._masked: set[int] = set()

    def mask(self, sequence: int) -> None:
        """From the next pass on the sequence takes no part."""
        self._masked.add(sequence)

    def bind(self, message: BindPages) -> bool:
        """Sets entries of a page table; False, with nothing changed, where the message is older than the table or does not fit it."""
        sequence = self._sequences.get(message.sequence) or HostSequence(message.sequence)
        fits = message.first <= sequence.pages and all(0 <= f < self.model.frames for f in message.frames)
        if message.version < sequence.version or not fits:
            self.stale_bindings += 1
            return False
        sequence.bind(message.first, message.frames)
        sequence.version = message.version
        self._sequences[message.sequence] = sequence
        return True

    def release(self, sequence: int) -> None:
        if (known := self._sequences.pop(sequence, None)) is not None:
            self._forget(known)
        self._masked.discard(sequence)

    def _forget(self, sequence: HostSequence) -> None:
        if sequence.slot >= 0:
            self.model.buffers.seen.give_back(sequence.slot)
            sequence.slot = -1

    @torch.inference_mode()
    def run(self, chunk: Chunk) -> Chunked:
        """All passes of a chunk, fewer where every sequence has ended."""
        start = monotonic_ns()
        parts = [self._begin(entry) for entry in chunk.sequences]
        _Passes(self.model, parts, self._masked).run(chunk.passes)
        return Chunked(chunk.command, start, monotonic_ns(), tuple(part.token() for part in parts))

    # --- before the passes ------------------------------------------------------------------------------------------

    def _begin(self, entry: ChunkSequence) -> Part:
        sequence = self._sequences.get(entry.sequence)
        if sequence is None:
            part = Part(HostSequence(entry.sequence), entry)
            part.end(f"{ERROR}the host knows no sequence {entry.sequence}")
            return part
        part = Part(sequence, entry)
        if sequence.position < 0:
            sequence.position = entry.position
        if entry.sampling is not None and not sequence.finish:
            self._introduce(part, entry.sampling)
        if not sequence.finish and (fault := self._fault(sequence, entry)):
            part.end(ERROR + fault)
        return part

    def _introduce(self, part: Part, sampling: Sampling) -> None:
        """Brings the sequence to where `answered` had brought it; an answer that was complete ends here."""
        sequence, entry, size = part.sequence, part.entry, self.model.shape.vocabulary
        fault = bad_sampling(sampling)
        if not fault and any(not 0 <= token < size for ids in (entry.answered, entry.prompt) for token in ids):
            fault = f"a token id is outside the vocabulary of {size}"
        grammar = None
        if not fault and sampling.grammar is not None:
            try:
                grammar = self.grammars.start(sampling.grammar)
            except (BadRequest, Unavailable) as error:
                fault = f"{error.where}: {error.message}"
        if fault:
            part.end(ERROR + fault)
            return
        self._forget(sequence)
        if sampling.repetition_penalty != 1:
            sequence.slot = self.model.buffers.seen.take((*entry.prompt, *entry.answered))
        sequence.introduce(sampling, self._decode, grammar)
        part.take_again(entry.answered, self.model.eos)

    def _fault(self, sequence: HostSequence, entry: ChunkSequence) -> str:
        """Why the entry cannot run; empty where it can."""
        size, context = self.model.shape.vocabulary, self.model.shape.context_tokens
        if entry.position != sequence.position:
            return f"the chunk starts at token {entry.position}, the sequence is at {sequence.position}"
        if not entry.ids and sequence.pending is None:
            return "there is nothing to decode from"
        if entry.last and sequence.sampling is None:
            return "it came without sampling parameters"
        if any(not 0 <= token < size for token in entry.ids):
            return f"a token id is outside the vocabulary of {size}"
        if (end := sequence.position + max(1, len(entry.ids))) > context:
            return f"it would go to token {end}, and the model's context holds {context}"
        if not sequence.has_pages(len(entry.ids), self.model.page_tokens):
            return f"{sequence.pages} pages are bound, too few for token {sequence.position}"
        return ""


class _Passes:
    """The passes of one chunk. While the same sequences decode, a pass is made of the one before it on the device."""

    def __init__(self, model: PagedModel, parts: list[Part], masked: set[int]) -> None:
        self._model, self._parts, self._masked = model, parts, masked
        self._inputs: Pass | None = None
        self._drawn: Drawn | None = None
        self._in: list[Part] = []  # in the order of their rows

    def run(self, passes: int) -> None:
        for number in range(passes):
            active = [part for part in self._parts if self._is_active(part, number)]
            if number:
                active = [part for part in active if self._has_room(part)]
            if not active:
                break
            self._pass(active, number, passes - number)

    def _is_active(self, part: Part, number: int) -> bool:
        if part.sequence.finish or part.entry.sequence in self._masked:
            return False
        return (number == 0 and bool(part.entry.ids)) or part.sequence.pending is not None

    def _has_room(self, part: Part) -> bool:
        """Whether the next token has a place; the sequence ends where not."""
        position, context = part.sequence.position, self._model.shape.context_tokens
        if position >= context:
            part.end(f"{ERROR}the model's context of {context} tokens is full")
        elif not part.sequence.has_pages(1, self._model.page_tokens):
            part.end(f"{ERROR}its pages are full at token {position}")
        return not part.sequence.finish

    def _pass(self, parts: list[Part], number: int, left: int) -> None:
        """One forward pass over `parts`; where it fails as a whole, each goes alone, so that only the culprit ends."""
        try:
            parts = self._prepare(parts, number, left)
            if not parts:
                return
            assert self._inputs is not None
            self._drawn = self._model.step(self._inputs)
        except Exception as error:  # border of a sequence: whatever its tokens make the model raise
            self._inputs = None
            if len(parts) == 1:
                parts[0].end(f"{ERROR}{type(error).__name__}: {error}")
                return
            for part in parts:
                self._pass([part], number, 1)
            self._inputs = None
            return
        self._accept(parts, number, self._drawn)

    def _prepare(self, parts: list[Part], number: int, left: int) -> list[Part]:
        """Puts the next pass into the buffers; returns its sequences in the order of their rows, less those whose grammar has failed."""
        while parts:
            if self._goes_on(parts):
                assert self._inputs is not None and self._drawn is not None
                advance(self._inputs, self._drawn, self._model.page_tokens)
                parts = self._in
                self._model.buffers.allow([part.draw() for part in parts if part.sequence.grammar is not None])
            else:
                rows = [part.row(number) for part in parts]
                order = sorted(range(len(parts)), key=lambda at: len(rows[at].ids) > 1)
                parts = [parts[at] for at in order]
                self._inputs = self._model.buffers.fill([rows[at] for at in order], left)
                self._in = parts
            if all(part.has_grammar_left() for part in parts):
                break
            self._inputs = None
            parts = [part for part in parts if part.has_grammar_left()]
        return parts

    def _goes_on(self, parts: list[Part]) -> bool:
        """Whether the pass before, over the very same sequences, can be moved on."""
        inputs = self._inputs
        return inputs is not None and inputs.decodes and len(parts) == len(self._in) and set(parts) == set(self._in)

    def _accept(self, parts: list[Part], number: int, drawn: Drawn) -> None:
        """Takes note of what the pass computed and drew."""
        drawing = [part for part in parts if part.draws(number)]
        for part in parts:
            part.sequence.position += part.count(number)
        tokens, states = drawn.tokens.tolist()
        reports = iter(zip(drawn.logprobs.tolist(), drawn.ids.tolist(), strict=True))
        for part, token, state in zip(drawing, tokens, states, strict=True):
            report = next(reports) if part.wants_logprobs else None
            if state == DRAWN:
                part.take(token, self._model.eos, report)
            else:
                part.end(ERROR + (_NOT_FINITE if state == NOT_FINITE else _NOTHING_ALLOWED))


_NOT_FINITE = "the model's logits are not finite"
_NOTHING_ALLOWED = "its grammar allows no token of the vocabulary"
