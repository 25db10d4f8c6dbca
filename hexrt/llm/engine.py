"""The hands of LLM steps: carries out chunks on one model, as the daemon's batcher composed them.

Owns the sequences' page tables as bound, their sampling, position and text. Decides nothing about pages or batches. All methods run on
the host's compute thread, but for `mask`, which any thread may call. A fault of one sequence ends that one, as its Token says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns

from hexrt.llm.engine_attention import Row
from hexrt.llm.engine_model import PagedModel, Work
from hexrt.llm.engine_sampling import sample
from hexrt.llm.engine_text import AnswerText
from hexrt.protocol.host import BindPages, Chunk, Chunked, ChunkSequence, Sampling, Token

ERROR = "error: "


@dataclass(eq=False, slots=True)
class HostSequence:
    """`position`: tokens whose K and V are in the pages; `pending`: the last drawn token, which is not."""

    number: int
    frames: list[int] = field(default_factory=list)
    version: int = 0
    position: int = -1
    sampling: Sampling | None = None
    text: AnswerText | None = None
    answered: int = 0
    pending: int | None = None
    finish: str = ""


@dataclass(eq=False, slots=True)
class _Part:
    """What one sequence does and gains in the chunk that runs."""

    sequence: HostSequence
    entry: ChunkSequence
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    ended: bool = False  # by the chunk that runs

    def token(self) -> Token:
        finish = self.sequence.finish if self.ended else ""
        return Token(self.entry.sequence, tuple(self.ids), "".join(self.pieces), finish)

    def end(self, finish: str) -> None:
        if not self.sequence.finish:
            self.sequence.finish, self.ended = finish, True


class ModelEngine:
    """The sequences of one loaded model."""

    def __init__(self, model: PagedModel, decode: Callable[[Sequence[int]], str]) -> None:
        self.model = model
        self.stale_bindings = 0
        self._decode = decode
        self._sequences: dict[int, HostSequence] = {}
        self._masked: set[int] = set()

    def mask(self, sequence: int) -> None:
        """From the next pass on the sequence takes no part."""
        self._masked.add(sequence)

    def bind(self, message: BindPages) -> bool:
        """Sets entries of a page table; False, with nothing changed, where the message is older than the table or does not fit it."""
        sequence = self._sequences.get(message.sequence) or HostSequence(message.sequence)
        fits = message.first <= len(sequence.frames) and all(0 <= f < self.model.frames for f in message.frames)
        if message.version < sequence.version or not fits:
            self.stale_bindings += 1
            return False
        sequence.frames[message.first : message.first + len(message.frames)] = message.frames
        sequence.version = message.version
        self._sequences[message.sequence] = sequence
        return True

    def release(self, sequence: int) -> None:
        self._sequences.pop(sequence, None)
        self._masked.discard(sequence)

    def run(self, chunk: Chunk) -> Chunked:
        """All passes of a chunk, fewer where every sequence has ended."""
        start = monotonic_ns()
        parts = [self._begin(entry) for entry in chunk.sequences]
        for number in range(chunk.passes):
            active = [part for part in parts if self._is_active(part, number)]
            if not active:
                break
            self._pass(active, number)
        return Chunked(chunk.command, start, monotonic_ns(), tuple(part.token() for part in parts))

    # --- before the passes ------------------------------------------------------------------------------------------

    def _begin(self, entry: ChunkSequence) -> _Part:
        sequence = self._sequences.get(entry.sequence)
        if sequence is None:
            part = _Part(HostSequence(entry.sequence), entry)
            part.end(f"{ERROR}the host knows no sequence {entry.sequence}")
            return part
        part = _Part(sequence, entry)
        if sequence.position < 0:
            sequence.position = entry.position
        if entry.sampling is not None:
            self._introduce(part, entry.sampling)
        if not sequence.finish and (fault := self._fault(sequence, entry)):
            part.end(ERROR + fault)
        return part

    def _introduce(self, part: _Part, sampling: Sampling) -> None:
        """Brings the sequence to where `answered` had brought it; an answer that was complete ends here."""
        sequence = part.sequence
        sequence.sampling = sampling
        sequence.text = AnswerText(self._decode, sampling.stop)
        sequence.answered = 0
        for token in part.entry.answered:
            sequence.text.push(token)
            sequence.answered += 1
            if finish := self._finish(sequence, token):
                part.end(finish)

    def _fault(self, sequence: HostSequence, entry: ChunkSequence) -> str:
        """Why the entry cannot run; empty where it can."""
        if entry.position != sequence.position:
            return f"the chunk starts at token {entry.position}, the sequence is at {sequence.position}"
        if not entry.ids and sequence.pending is None:
            return "there is nothing to decode from"
        if entry.last and sequence.sampling is None:
            return "it came without sampling parameters"
        if any(not 0 <= token < self.model.shape.vocabulary for token in entry.ids):
            return f"a token id is outside the vocabulary of {self.model.shape.vocabulary}"
        if not self._has_pages(sequence, max(1, len(entry.ids))):
            return f"{len(sequence.frames)} pages are bound, too few for token {sequence.position}"
        return ""

    def _has_pages(self, sequence: HostSequence, count: int) -> bool:
        return sequence.position + count <= len(sequence.frames) * self.model.page_tokens

    # --- a pass -----------------------------------------------------------------------------------------------------

    def _is_active(self, part: _Part, number: int) -> bool:
        if part.sequence.finish or part.entry.sequence in self._masked:
            return False
        return (number == 0 and bool(part.entry.ids)) or part.sequence.pending is not None

    def _work(self, part: _Part, number: int) -> Work:
        sequence, entry = part.sequence, part.entry
        if number == 0 and entry.ids:
            return Work(entry.ids, Row(sequence.frames, sequence.position, len(entry.ids)), entry.last)
        assert sequence.pending is not None
        return Work((sequence.pending,), Row(sequence.frames, sequence.position, 1), True)

    def _pass(self, parts: list[_Part], number: int) -> None:
        """One forward pass over `parts`; where it fails as a whole, each goes alone, so that only the culprit ends."""
        for part in parts:
            if number and not self._has_pages(part.sequence, 1):
                part.end(f"{ERROR}its pages are full at token {part.sequence.position}")
        items = [(part, self._work(part, number)) for part in parts if not part.sequence.finish]
        items.sort(key=lambda item: (item[1].row.count > 1, item[1].row.end))
        if not items:
            return
        try:
            drawn = self._draw(items)
        except Exception as error:  # border of a sequence: whatever its tokens make the model raise
            if len(items) == 1:
                items[0][0].end(f"{ERROR}{type(error).__name__}: {error}")
                return
            for part, _ in items:
                self._pass([part], number)
            return
        tokens = iter(drawn)
        for part, work in items:
            part.sequence.position += work.row.count
            if work.draws:
                self._accept(part, next(tokens))

    def _draw(self, items: list[tuple[_Part, Work]]) -> list[int | None]:
        """Computes the pass; one token for each item that draws, in order."""
        logits = self.model.forward([work for _, work in items])
        drawing = [part.sequence for part, work in items if work.draws]
        samplings = [sequence.sampling for sequence in drawing if sequence.sampling is not None]
        return sample(logits, samplings, [sequence.answered for sequence in drawing]) if drawing else []

    def _accept(self, part: _Part, token: int | None) -> None:
        sequence = part.sequence
        if token is None:
            part.end(f"{ERROR}the model's logits are not finite")
            return
        assert sequence.text is not None
        sequence.pending = token
        sequence.answered += 1
        part.ids.append(token)
        part.pieces.append(sequence.text.push(token))
        if finish := self._finish(sequence, token):
            part.pieces.append(sequence.text.flush())
            part.end(finish)

    def _finish(self, sequence: HostSequence, token: int) -> str:
        """How this token, the last one pushed, ends the answer; empty where it does not."""
        sampling, text = sequence.sampling, sequence.text
        assert sampling is not None and text is not None
        if text.stopped or (token in self.model.eos and not sampling.ignore_eos):
            return "stop"
        return "length" if sequence.answered >= sampling.max_tokens else ""
