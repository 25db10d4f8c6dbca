"""Where the bytes of every live tensor lie: in the ring of the host that put it out, in a client's memory, or where they were moved.

Owns the segments (memfds that hosts address by a place), which host's life has which of them mapped, and the slots of the rings. Who still
refers to a tensor is counted in its run (`hexrt.runtime.holding`); what nobody refers to is freed here, at the end of a turn. A dead host's
ring lives on until its last tensor is gone. Copies bytes only where it says so. Loop thread only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from hexrt import values
from hexrt.brain.staging import Staging
from hexrt.devices.link import HostLink
from hexrt.errors import HexrtError, InvariantViolation, TaskFailed
from hexrt.memory.arena import map_fd, sealed_copy
from hexrt.memory.passed import ClientMemory
from hexrt.memory.ring import Ring, RingReader
from hexrt.protocol.host import FIRST_SEGMENT, HOST, Made
from hexrt.protocol.messages import Tensor as Passed
from hexrt.runtime.arenas import Arenas
from hexrt.runtime.entities import Run, Tensor
from hexrt.runtime.holding import NO_LIMIT, Holding, size_of, tensors_of

SLOT_BYTES = 16 << 10
"""A ring has a slot for so many of its bytes: smaller tensors may use up the slots first, and go inline then."""


@dataclass(eq=False, slots=True)
class Segment:
    """`fd` is what hosts are given, for reading alone; `live` are the tensors in it by offset, the oldest first."""

    place: int
    fd: int
    bytes: int
    view: memoryview
    reader: RingReader | None = None
    filling: bool = False  # its host lives, and may put more in
    live: dict[int, tuple[Tensor, Run | None]] = field(default_factory=dict)
    live_bytes: int = 0
    moves: int = 0  # out of it, whose copies may still read it though their tensors are forgotten

    def add(self, tensor: Tensor, run: Run | None) -> None:
        self.live[tensor.offset] = tensor, run
        self.live_bytes += tensor.bytes


class Tensors:
    """Implements `hexrt.devices.tensors.Memory` for bodies that run in the daemon itself."""

    own_ring: int | None = None

    def __init__(
        self, holding: Holding, ring_bytes: int, staging: Staging, arenas: Arenas, max_output_bytes: int = NO_LIMIT
    ) -> None:
        self._holding = holding
        self._max_output_bytes = max_output_bytes
        self._staging = staging
        self._arenas = arenas
        self._ring_bytes = ring_bytes
        self._next_place = FIRST_SEGMENT
        self._segments: dict[int, Segment] = {}
        self._rings: dict[HostLink, Segment] = {}  # of the hosts that live
        self._with_slots: dict[int, Segment] = {}  # these, and those of dead hosts
        self._fresh: list[tuple[Run, tuple[Tensor, ...]]] = []  # of reports that are being taken in
        self._crowded = False
        self._blocked = False  # there was no room in HOST
        self._is_closed = False
        staging.when_freed(self._room_came_free)

    def _room_came_free(self) -> None:
        self._crowded |= self._blocked

    # --- hosts --------------------------------------------------------------------------------------------------

    def host_started(self, link: HostLink) -> None:
        """Gives a new host its ring."""
        slots = min(max(self._ring_bytes // SLOT_BYTES, 64), 1 << 16)
        with Ring.create(self._ring_bytes, slots) as ring:
            memory = map_fd(ring.fd, ring.bytes, True)
            segment = self._add(ring.reopen_read_only(), memory.toreadonly(), RingReader(memory))
            segment.filling = True
            self._with_slots[segment.place] = segment
            self._rings[link] = segment
            link.map(segment.place, ring.fd, ring.bytes, writable=True, ring=True)

    def host_gone(self, link: HostLink) -> None:
        """Nothing comes from this host any more, and it reads nothing."""
        segment = self._rings.pop(link, None)
        if segment is not None:
            segment.filling = False
            self._crowded = True
            self._close_if_empty(segment)

    def map(self, link: HostLink, places: Iterable[int]) -> None:
        """Sees to it that the host has these places before whatever it is sent from now on."""
        for place in places:
            if place == HOST:
                self._arenas.let_read(link)
            elif place not in link.mapped:
                segment = self._segments[place]
                link.map(place, segment.fd, segment.bytes)

    def _add(self, fd: int, view: memoryview, reader: RingReader | None = None) -> Segment:
        place, self._next_place = self._next_place, self._next_place + 1
        segment = self._segments[place] = Segment(place, fd, len(view), view, reader)
        return segment

    def _close_if_empty(self, segment: Segment) -> None:
        if segment.live or segment.filling or segment.moves:
            return
        del self._segments[segment.place]
        self._with_slots.pop(segment.place, None)
        os.close(segment.fd)
        for link in list(self._rings):  # one may be found dead by this very message
            if segment.place in link.mapped:
                link.unmap(segment.place)

    # --- tasks --------------------------------------------------------------------------------------------------

    def accept(
        self, link: HostLink | None, run: Run, step: int, output: msgspec.Raw, made: tuple[Made, ...]
    ) -> tuple[Tensor, ...]:
        """Takes over the tensors of a report on a step, which the run has from now on; they are kept until the end of the turn at least.

        Raises TaskFailed, everything given back, where the report does not fit what its output names.
        """
        ring = self._rings.get(link) if link is not None else None
        try:
            named, more = values.described(output)
            if named != {tensor.handle: tensor.bytes for tensor in made} or len(named) != len(made):
                raise TaskFailed("its output names a tensor that is not there")
            if more and (size := len(output) + more) > self._max_output_bytes:
                raise TaskFailed(
                    f"the output has {size} bytes, those of its tensors at each place that names one included, more than the "
                    f"{self._max_output_bytes} that limits.max_output_mib allows"
                )
        except (msgspec.MsgspecError, ValueError) as error:
            self.refuse(link, made)
            raise TaskFailed(f"its output cannot be read: {error}") from error
        except TaskFailed:
            self.refuse(link, made)
            raise
        known = run.tensors if run.tensors is not None else {}
        taken: list[Tensor] = []
        for i, one in enumerate(made):
            tensor = known.get(one.handle) if one.slot < 0 else self._take_slot(ring, run, known, one)
            if tensor is None or tensor.bytes != one.bytes:
                self._take_back(taken)
                self.refuse(link, made[i + 1 :])
                raise TaskFailed(f"its output names tensor {one.handle}, which it cannot have")
            taken.append(tensor)
        keep = run.graph is not None and any(index == step for _, index, _ in run.graph.outputs)
        for tensor in taken:
            tensor.refs += 1
            tensor.step = step if tensor.step < 0 else tensor.step
            known[tensor.handle] = tensor
            if keep:
                self._staging.keep(tensor)
        run.tensors = known
        found = tuple(taken)
        self._fresh.append((run, found))
        return found

    def _take_slot(self, ring: Segment | None, run: Run, known: Mapping[int, Tensor], made: Made) -> Tensor | None:
        if ring is None or ring.reader is None:
            return None
        try:
            slot = ring.reader.accept(made.slot)
        except HexrtError:
            return None
        tensor = Tensor(made.handle, ring.place, slot.offset, slot.bytes, made.slot)
        if (
            (slot.offset, slot.bytes) != (made.offset, made.bytes)
            or made.handle in known
            or made.handle < values.FIRST_HOST_HANDLE
        ):
            ring.reader.release(made.slot)
            return None
        ring.add(tensor, run)
        self._crowded = self._crowded or ring.live_bytes > ring.bytes // 2
        return tensor

    def _take_back(self, taken: Iterable[Tensor]) -> None:
        for tensor in taken:
            if not tensor.refs:
                self._free(tensor)

    def refuse(self, link: HostLink | None, made: Iterable[Made]) -> None:
        """Gives back the slots of a report that is not wanted."""
        ring = self._rings.get(link) if link is not None else None
        if ring is None or ring.reader is None:
            return
        for one in made:
            if one.slot >= 0:
                try:
                    ring.reader.accept(one.slot)
                except HexrtError:  # it has given no such slot
                    continue
                ring.reader.release(one.slot)

    # --- turns --------------------------------------------------------------------------------------------------

    def settle(self) -> bool:
        """The reports that were taken in have been applied: frees what nobody refers to. True where moves were begun, for the brain to send."""
        fresh, self._fresh = self._fresh, []
        for run, tensors in fresh:
            self._holding.let_go(run, tensors)
        if self._holding.released:
            self.collect()
        return self._crowded and self.relieve()

    def collect(self) -> None:
        """Frees what was released since the last time; after `close` there is nothing to be freed any more."""
        released = self._holding.released
        for tensor in released if not self._is_closed else ():
            self._free(tensor)
        released.clear()

    def _free(self, tensor: Tensor) -> None:
        if tensor.page >= 0:
            self._staging.free(tensor)
        else:
            self._leave(tensor)
        tensor.place = -1

    def _leave(self, tensor: Tensor) -> None:
        """It needs its place in a segment no more."""
        segment = self._segments[tensor.place]
        del segment.live[tensor.offset]
        segment.live_bytes -= tensor.bytes
        if segment.reader is not None:
            segment.reader.release(tensor.slot)
        self._close_if_empty(segment)

    def relieve(self) -> bool:
        """Begins to move tensors that nobody reads out of crowded rings into HOST: all out of rings of dead hosts, else down to half a ring."""
        self._crowded = self._blocked = False
        began = False
        for segment in list(self._with_slots.values()):
            over = segment.live_bytes - (segment.bytes // 2 if segment.filling else 0)
            for tensor, run in list(segment.live.values()):
                if over <= 0:
                    break
                over -= tensor.bytes  # what is moving will leave by itself
                if run is None or tensor.is_moving or tensor.reads or not self._staging.may_move(run, tensor):
                    continue  # what finds no room in a ring goes inline meanwhile
                if not self._staging.adopt(run, tensor, self._leave, partial(self._move_ended, segment)):
                    self._blocked = True
                    return began
                segment.moves += 1
                began = True
        return began

    def _move_ended(self, segment: Segment) -> None:
        segment.moves -= 1
        if segment.place in self._segments:
            self._close_if_empty(segment)

    # --- values -------------------------------------------------------------------------------------------------

    def view(self, place: int, offset: int = 0, length: int | None = None) -> memoryview:
        if place == HOST:
            return self._arenas.view(offset, length)
        segment = self._segments[place]
        return segment.view[offset : segment.bytes if length is None else offset + length]

    read = view  # nothing is written through either

    def _content(self, tensor: Tensor) -> memoryview:
        offset = tensor.offset if tensor.page < 0 else self._staging.offset(tensor)
        return self.view(tensor.place, offset, tensor.bytes)

    def inline(self, run: Run, value: msgspec.Raw, most_bytes: int = NO_LIMIT) -> msgspec.Raw:
        """The value with the bytes of its tensors in it, a copy; the very same value where it names none.

        Raises TaskFailed, before anything is copied where its tensors have more than `most_bytes`, each counted at each place.
        """
        if not run.tensors:
            return value
        known = run.tensors
        if (size := size_of(run, value) - len(value)) > most_bytes:
            raise TaskFailed(
                f"its tensors have {size} bytes, counted at each place that names one, and {most_bytes} are left of what "
                "limits.max_run_mib allows to be kept of a run"
            )

        def find(handle: int) -> memoryview:
            tensor = known.get(handle)
            if tensor is None:
                raise TaskFailed(f"there is no tensor {handle} in this run")
            return self._content(tensor)

        try:
            return values.inline(value, find)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TaskFailed(f"a tensor of this value cannot be read: {error}") from error

    def inliner(self) -> Callable[[Run, msgspec.Raw], msgspec.Raw]:
        """`inline` for all outputs of one run, which may name a tensor many times: in all no more bytes than a run may hold."""
        left = self._holding.max_run_bytes

        def inline(run: Run, value: msgspec.Raw) -> msgspec.Raw:
            nonlocal left
            whole = self.inline(run, value, left)
            left -= len(whole) - len(value)
            return whole

        return inline

    def export(self, run: Run, outputs: Iterable[msgspec.Raw]) -> tuple[tuple[Passed, ...], int]:
        """A sealed memfd, the caller's to close, with a copy of every tensor that the outputs name, and where each lies in it.

        Raises OutOfMemory.
        """
        found = {t.handle: t for output in outputs for t in tensors_of(run, output)}
        fd, offsets = sealed_copy([self._content(tensor) for tensor in found.values()])
        passed = tuple(Passed(t.handle, at, t.bytes) for t, at in zip(found.values(), offsets, strict=True))
        return passed, fd

    def take(self, run: bytes, memory: ClientMemory) -> None:
        """The run that is about to begin has what its client passed: takes the memory over."""
        view = map_fd(fd, memory.bytes, False) if (fd := memory.take()) >= 0 else None
        if view is None:
            raise InvariantViolation("a client's memory was taken twice")
        segment = self._add(fd, view)
        given: dict[int, Tensor] = {}
        self._holding.given[run] = memory.bytes, given
        for one in memory.tensors.values():
            tensor = given[one.handle] = Tensor(one.handle, segment.place, one.offset, one.bytes)
            segment.add(tensor, None)

    # --- whether all is well ------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, float]:
        paged = self._staging.paged.values()
        return {
            "tensors": float(sum(len(s.live) for s in self._segments.values()) + len(paged)),
            "tensor_bytes": float(sum(s.live_bytes for s in self._segments.values()) + sum(t.bytes for t in paged)),
            "segments": float(len(self._segments)),
        }

    def check_integrity(self, runs: Iterable[Run], idle: bool) -> None:
        """Each tensor of a run lies in a segment, each in a segment belongs to a run; with `idle` (nothing is in flight) each slot has one."""
        assert not self._fresh and not self._holding.released, "between turns nothing is being taken in or given back"
        owned = {id(tensor): tensor for run in runs for tensor in (run.tensors or {}).values()}
        lying = {id(tensor): tensor for segment in self._segments.values() for tensor, _ in segment.live.values()}
        lying |= {id(tensor): tensor for tensor in self._staging.paged.values()}
        assert owned.keys() == lying.keys(), f"{len(owned)} tensors are owned, {len(lying)} lie in segments or pages"
        for segment in self._segments.values():
            assert segment.live or segment.filling or segment.moves, f"segment {segment.place} is kept for nothing"
            assert segment.live_bytes == sum(t.bytes for t, _ in segment.live.values())
            for offset, (tensor, _) in segment.live.items():
                assert (tensor.place, tensor.offset) == (segment.place, offset) and tensor.refs > 0
            if segment.reader is not None and (idle or not segment.filling):
                slots = {tensor.slot for tensor, _ in segment.live.values()}
                occupied = set(segment.reader.occupied())
                assert slots == occupied if segment.filling else slots <= occupied, f"slots {slots} of {occupied}"

    def close(self) -> None:
        """Lets go of all memory; the hosts are dead."""
        self._is_closed = True
        for segment in self._segments.values():
            os.close(segment.fd)
        self._segments.clear()
        self._rings.clear()
