"""Writes the timelines of runs as one Perfetto trace (protobuf track events).

Owns the file format. Imported only by who writes a trace: it pulls in protobuf, which the daemon's start must not. The file appears
whole or not at all. Times are CLOCK_MONOTONIC nanoseconds, tied to the wall clock by one snapshot; several timelines must be of one boot.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackDescriptor, TrackEvent
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

from hexrt.errors import BadRequest
from hexrt.tracing.layout import Arg, Group, Picture, Slice, lay_out

if TYPE_CHECKING:
    from hexrt.protocol.messages import RunTimeline

CLOCK_REALTIME, CLOCK_MONOTONIC = 1, 3  # perfetto.protos.BuiltinClock
SEQUENCE = 1
CONTROL = {code: 0x2400 + code for code in range(32)} | {127: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)
"""Control characters become their visible pictures: a NUL would end a name, an escape would reach somebody's terminal."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What was written. `slices` counts every slice, nested ones too."""

    path: Path
    runs: int
    attempts: int
    tracks: int
    slices: int
    flows: int
    bytes: int


def write_trace(timeline: RunTimeline | Sequence[RunTimeline], path: Path) -> TraceSummary:
    """Writes one trace of one or several runs to `path`, replacing a file that is there.

    Raises BadRequest where there is nothing to write or the file cannot be written; an older file is then left as it was.
    """
    timelines = list(timeline) if isinstance(timeline, Sequence) else [timeline]
    if not timelines:
        raise BadRequest("there is no run to write a trace of", "timeline")
    picture = lay_out(timelines)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with open(temporary, "xb") as file:
                writer = _Writer(file)
                writer.clock(timelines[0].submitted_ns, timelines[0].submitted_wall_ns)
                writer.picture(picture)
                size = file.tell()
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise BadRequest(f"the trace cannot be written to {path}: {error.strerror}", "path") from error
    attempts = sum(len(t.attempts) for t in timelines)
    return TraceSummary(path, len(timelines), attempts, writer.tracks, writer.slices, picture.flows, size)


class _Interned:
    """One table of interned strings: a string's number, and the strings that the next packet has to define."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.new: list[tuple[int, str]] = []

    def number(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self._numbers) + 1
            self.new.append((number, text.translate(CONTROL)))
        return number


class _Writer:
    """One packet sequence. The first packet clears the incremental state, else a reader drops all that follows."""

    def __init__(self, file: IO[bytes]) -> None:
        self._builder = StreamingTraceProtoBuilder(file)
        self._names, self._categories, self._keys, self._strings = (_Interned() for _ in range(4))
        self._uuid = 0
        self._first = True
        self.tracks = 0
        self.slices = 0

    def _packet(self) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        if self._first:
            self._first = False
            packet.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
            packet.trace_packet_defaults.timestamp_clock_id = CLOCK_MONOTONIC
        else:
            packet.sequence_flags = TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        return packet

    def clock(self, monotonic_ns: int, wall_ns: int) -> None:
        packet = self._packet()
        packet.clock_snapshot.primary_trace_clock = CLOCK_MONOTONIC
        for clock, now_ns in ((CLOCK_MONOTONIC, monotonic_ns), (CLOCK_REALTIME, wall_ns)):
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=now_ns)
        self._builder.write_packet(packet)

    def picture(self, picture: Picture) -> None:
        for rank, group in enumerate(picture.groups, start=1):
            self._group(rank, group)

    def _new_track(self) -> tuple[Any, Any]:
        self._uuid += 1
        packet = self._packet()
        packet.track_descriptor.uuid = self._uuid
        return packet, packet.track_descriptor

    def _group(self, rank: int, group: Group) -> None:
        packet, descriptor = self._new_track()
        parent = self._uuid
        descriptor.process.pid = rank
        descriptor.process.process_name = group.name.translate(CONTROL)
        descriptor.child_ordering = TrackDescriptor.EXPLICIT
        self._builder.write_packet(packet)
        for place, track in enumerate(group.tracks):
            packet, descriptor = self._new_track()
            uuid = self._uuid
            descriptor.sibling_order_rank = place
            if track.stream:
                descriptor.thread.pid = rank
                descriptor.thread.tid = (1 << 20) + uuid  # no kernel thread; only has to be unique
                descriptor.thread.thread_name = track.name
            else:
                descriptor.parent_uuid = parent
                descriptor.name = track.name
            self._builder.write_packet(packet)
            self.tracks += 1
            for piece in track.slices:
                self._slice(uuid, piece)

    def _slice(self, uuid: int, piece: Slice) -> None:
        self.slices += 1
        packet = self._packet()
        packet.timestamp = piece.begin_ns
        event = packet.track_event
        event.type = TrackEvent.TYPE_SLICE_BEGIN
        event.track_uuid = uuid
        event.name_iid = self._names.number(piece.name)
        event.category_iids.append(self._categories.number(piece.category))
        event.flow_ids.extend(piece.leaves)
        event.terminating_flow_ids.extend(piece.arrives)
        for arg in piece.args:
            self._annotate(event.debug_annotations.add(), arg)
        self._define(packet)
        self._builder.write_packet(packet)
        for child in piece.children:
            self._slice(uuid, child)
        if piece.end_ns is not None:
            packet = self._packet()
            packet.timestamp = piece.end_ns
            packet.track_event.type = TrackEvent.TYPE_SLICE_END
            packet.track_event.track_uuid = uuid
            self._builder.write_packet(packet)

    def _annotate(self, annotation: Any, arg: Arg) -> None:
        key, value = arg
        annotation.name_iid = self._keys.number(key)
        if isinstance(value, str):
            annotation.string_value_iid = self._strings.number(value)
        elif isinstance(value, int):
            annotation.int_value = value
        else:
            annotation.double_value = value

    def _define(self, packet: Any) -> None:
        data = packet.interned_data
        for table, entries in (
            (self._names, data.event_names),
            (self._categories, data.event_categories),
            (self._keys, data.debug_annotation_names),
        ):
            for number, text in table.new:
                entries.add(iid=number, name=text)
            table.new.clear()
        for number, text in self._strings.new:
            data.debug_annotation_string_values.add(iid=number, str=text.encode())
        self._strings.new.clear()
