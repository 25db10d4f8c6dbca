"""What the store writes down, as bytes: facts in frames, and one row for each run that has ended.

Owns the forms on disk. A fact with a large part (an output, a submitted workflow) is written as `Away`: the fact without that part
and the digest of the file that holds it. Encodes and decodes only: no file and no database is touched here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import msgspec

from hexrt import values
from hexrt.errors import ErrorRecord
from hexrt.events import Event, Finished, Recovered, Submitted
from hexrt.protocol.messages import RunSummary, RunTimeline, StepStatus
from hexrt.workflow.model import Workflow

LARGE_BYTES = 64 * 1024
"""A part of more bytes than this goes to a file of its own."""
FRAME_BYTES = 1 << 20
"""A commit's facts are cut into frames of about this size, so that a frame can be rewritten at a bounded cost."""
EVERY_RUN = b""
"""Stands for the run of a fact that concerns all of them."""


class EndedRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a client may still ask of a run that has ended. `timeline.request` means nothing here."""

    summary: RunSummary
    outputs: dict[str, msgspec.Raw]
    errors: dict[str, ErrorRecord]
    steps: tuple[StepStatus, ...]
    timeline: RunTimeline


class Damage(msgspec.Struct, frozen=True):
    """A fact that is lost because its file is missing or has other content; `step` is -1 where the submitted workflow is lost."""

    run: bytes
    step: int
    part: int
    reason: str
    uid: int = -1  # of the run, where the workflow is lost


class Blob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Names a file of the blob folder by the BLAKE2b-256 of its content."""

    digest: bytes
    size_bytes: int


class Away(msgspec.Struct, frozen=True, array_like=True, tag=100):
    """A fact whose large part lies in a file."""

    blob: Blob
    fact: Submitted | Finished


class EndedRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An EndedRun as its row holds it beside the summary; the large outputs are in `away`."""

    outputs: dict[str, msgspec.Raw]
    away: dict[str, Blob]
    errors: dict[str, ErrorRecord]
    steps: tuple[StepStatus, ...]
    timeline: RunTimeline


class Frame(msgspec.Struct, eq=False):
    """Some facts in order as one msgpack array, and how many of its bytes each run has in it."""

    facts: bytes
    uses: dict[bytes, int]

    @property
    def crc(self) -> int:
        return zlib.crc32(self.facts)


PutBlob = Callable[[bytes, bytes], Blob]
"""Given a run and a content, promises to have the content on disk, for that run, before the frame is committed."""

_HOLLOW = Workflow(steps=())
_encoder = msgspec.msgpack.Encoder()
_stored = msgspec.msgpack.Decoder(list[Event | Away])
_raws = msgspec.msgpack.Decoder(list[msgspec.Raw])
_workflow = msgspec.msgpack.Decoder(Workflow)
_uses = msgspec.msgpack.Decoder(dict[bytes, int])
_summary = msgspec.msgpack.Decoder(RunSummary)
_row = msgspec.msgpack.Decoder(EndedRow)


def run_of(fact: Event | Away) -> bytes:
    """The run that a durable fact belongs to, EVERY_RUN for Recovered."""
    kind = type(fact)
    if kind is Recovered:
        return EVERY_RUN
    return fact.fact.run if kind is Away else fact.run  # type: ignore[union-attr]  # durable facts have a run


def encode_fact(fact: Event, put: PutBlob) -> bytes:
    """`put` is called for a large part, which is then not in the bytes returned."""
    kind = type(fact)
    if kind is Finished and len(fact.output) > LARGE_BYTES:  # type: ignore[union-attr]  # `kind` says so
        return _encode_away(fact, "output", bytes(fact.output), values.NIL, put)  # type: ignore[arg-type, union-attr]
    if kind is Submitted:
        workflow = values.encode(fact.workflow)  # type: ignore[union-attr]
        if len(workflow) > LARGE_BYTES:
            return _encode_away(fact, "workflow", workflow, _HOLLOW, put)  # type: ignore[arg-type]
        return _encoder.encode(msgspec.structs.replace(fact, workflow=msgspec.Raw(workflow)))
    return _encoder.encode(fact)


def _encode_away(fact: Submitted | Finished, part: str, content: bytes, hollow: object, put: PutBlob) -> bytes:
    return _encoder.encode(Away(put(fact.run, content), msgspec.structs.replace(fact, **{part: hollow})))


class Cutter:
    """Cuts encoded facts into frames, in order."""

    __slots__ = ("_frames", "_parts", "_size_bytes", "_uses")

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._begin()

    def _begin(self) -> None:
        self._parts: list[bytes] = []
        self._uses: dict[bytes, int] = {}
        self._size_bytes = 0

    def put(self, run: bytes, fact: bytes) -> None:
        size_bytes = len(fact)
        self._parts.append(fact)
        self._uses[run] = self._uses.get(run, 0) + size_bytes
        self._size_bytes += size_bytes
        if self._size_bytes >= FRAME_BYTES:
            self._end()

    def _end(self) -> None:
        self._frames.append(Frame(bytes(values.join(self._parts)), self._uses))
        self._begin()

    def frames(self) -> list[Frame]:
        """All frames; to be asked for once, at the end."""
        if self._parts:
            self._end()
        return self._frames


def encode_uses(uses: dict[bytes, int]) -> bytes:
    return _encoder.encode(uses)


def decode_uses(raw: bytes) -> dict[bytes, int]:
    return _uses.decode(raw)


def decode_frame(facts: bytes, crc: int) -> list[Event | Away]:
    """Raises ValueError or msgspec.DecodeError where the bytes are not what was written."""
    if zlib.crc32(facts) != crc:
        raise ValueError("its checksum is wrong")
    return _stored.decode(facts)


def split_frame(facts: bytes, crc: int) -> Iterator[tuple[bytes, bytes]]:
    """The (run, encoded fact) pairs that a frame was made of. Raises as `decode_frame`."""
    for fact, raw in zip(decode_frame(facts, crc), _raws.decode(facts), strict=True):
        yield run_of(fact), bytes(raw)


def whole(away: Away, content: bytes) -> Event:
    """The fact as it was given to the store."""
    if isinstance(away.fact, Submitted):
        return msgspec.structs.replace(away.fact, workflow=_workflow.decode(content))
    return msgspec.structs.replace(away.fact, output=msgspec.Raw(content))


def unpin(fact: Event) -> Event:
    """Copies the output out of the frame, which otherwise stays in memory as long as the fact does."""
    if isinstance(fact, Finished):
        return msgspec.structs.replace(fact, output=fact.output.copy())
    return fact


def encode_ended(ended: EndedRun, put: PutBlob) -> tuple[bytes, bytes, int]:
    """The summary, the rest, and the bytes of both and of the outputs that were `put`."""
    run = ended.summary.run
    away = {name: put(run, bytes(raw)) for name, raw in ended.outputs.items() if len(raw) > LARGE_BYTES}
    inline = {name: raw for name, raw in ended.outputs.items() if name not in away}
    summary = _encoder.encode(ended.summary)
    row = _encoder.encode(EndedRow(inline, away, ended.errors, ended.steps, ended.timeline))
    return summary, row, len(summary) + len(row) + sum(blob.size_bytes for blob in away.values())


def decode_summary(raw: bytes) -> RunSummary:
    return _summary.decode(raw)


def decode_row(raw: bytes) -> EndedRow:
    return _row.decode(raw)
