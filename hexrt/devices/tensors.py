"""The tensors of one launch in a host process: views of those it was given, and slots in the host's ring for those it puts out.

Owns slots from their reservation until they are committed with the report that names them, or given back. Nothing waits: what finds no
room goes inline. Used by the thread that runs the bodies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from hexrt.errors import InvariantViolation, NotFound, TaskFailed
from hexrt.memory.ring import RingWriter, WriteSlot
from hexrt.protocol.host import Located, Made
from hexrt.values import first_handle

SERIALS = 1 << 32


class Memory(Protocol):
    """Where a host finds bytes by place: `hexrt.devices.places`, or the daemon's own tables for io."""

    own_ring: int | None

    def view(self, place: int, offset: int = 0, length: int | None = None) -> memoryview: ...

    def read(self, place: int, offset: int = 0, length: int | None = None) -> memoryview: ...


class Output(msgspec.Struct, frozen=True, gc=False):
    """What a body put out: the encoded value, its tensors for the report, and views of them for a launch that takes it from here."""

    raw: bytes
    made: tuple[Made, ...] = ()
    views: Mapping[int, memoryview] = {}


class Given:
    """The tensors that the inputs of one launch may name: a view of each, and the arrays that they became."""

    __slots__ = ("flats", "views")

    def __init__(self, views: Mapping[int, memoryview]) -> None:
        self.views = views
        self.flats: dict[int, tuple[int, Any]] = {}  # by identity: the handle and the array

    def find(self, handle: int) -> memoryview:
        try:
            return self.views[handle]
        except KeyError:
            raise NotFound(f"there is no tensor {handle} among the inputs") from None

    def note(self, handle: int, flat: Any) -> None:
        self.flats[id(flat)] = handle, flat

    def handle_of(self, array: Any) -> int | None:
        """Of an array that is one of these, whole and in order."""
        found = self.flats.get(id(array.base))
        return found[0] if found is not None and array.nbytes == found[1].nbytes and array.flags.c_contiguous else None


NONE_GIVEN = Given({})


class Desk:
    """Gives each launch of one host its tensors, and makes the handles of new ones."""

    def __init__(self, memory: Memory | None, host_epoch: int) -> None:
        self._memory = memory
        self._first = first_handle(host_epoch)
        self._serial = 0
        self._ring: tuple[int, RingWriter] | None = None

    def views(self, located: Iterable[Located]) -> dict[int, memoryview]:
        if self._memory is None:
            raise InvariantViolation("this host has no shared memory")
        return {at.handle: self._memory.read(at.place, at.offset, at.bytes) for at in located}

    def filled(self, slot: WriteSlot) -> memoryview:
        """What a slot of the ring holds, for a body to read: by torch it could write to the view that filled it."""
        assert self._memory is not None and self._ring is not None
        return self._memory.read(self._ring[0], slot.offset, slot.bytes)

    def ring(self) -> RingWriter | None:
        """Where outputs go; None where none is mapped."""
        place = self._memory.own_ring if self._memory is not None else None
        if place is None:
            return None
        if self._ring is None or self._ring[0] != place:
            assert self._memory is not None
            self._ring = place, RingWriter(self._memory.view(place))
        return self._ring[1]

    def next_handle(self) -> int:
        self._serial = serial = (self._serial + 1) % SERIALS
        return self._first + serial


class Placing:
    """Takes the large arrays of one output. An array that is one of those `given`, whole, is passed on."""

    def __init__(self, desk: Desk, given: Given) -> None:
        self._desk = desk
        self._ring = desk.ring()
        self._given = given
        self._known: dict[int, tuple[int, Any]] = {}  # by identity: the handle and the array
        self._slots: list[tuple[int, WriteSlot]] = []
        self._passed: dict[int, None] = {}
        self.bytes = 0  # of the tensors named so far

    def place(self, array: Any) -> int | None:
        """Its handle, the bytes being in the ring now or where they were; None where there is no room."""
        handle = self._given.handle_of(array)
        if handle is not None:
            self._passed[handle] = None
        elif (known := self._known.get(id(array))) is not None:
            handle = known[0]
        else:
            handle = self._fill(array)
            if handle is None:
                return None
            self._known[id(array)] = handle, array
        self.bytes += array.nbytes
        return handle

    def _fill(self, array: Any) -> int | None:
        import numpy as np

        slot = self._ring.reserve_nowait(array.nbytes) if self._ring is not None else None
        if slot is None:
            return None
        handle = self._desk.next_handle()
        self._slots.append((handle, slot))
        np.copyto(np.frombuffer(slot.view, array.dtype).reshape(array.shape), array)
        return handle

    def commit(self, raw: bytes, most_bytes: int) -> Output:
        """The encoded output with its tensors. Raises TaskFailed where it has more bytes than allowed, those of its tensors included."""
        size = len(raw) + self.bytes
        if size > most_bytes:
            raise TaskFailed(f"the output has {size} bytes, more than the {most_bytes} allowed")
        if not self._slots and not self._passed:
            return Output(raw)
        made = [Made(handle, slot.slot, slot.offset, slot.bytes) for handle, slot in self._slots]
        made += [Made(handle, -1, 0, len(self._given.views[handle])) for handle in self._passed]
        views = {handle: self._desk.filled(slot) for handle, slot in self._slots}
        views.update((handle, self._given.views[handle]) for handle in self._passed)
        for _, slot in self._slots:
            assert self._ring is not None
            self._ring.commit(slot)
        return Output(raw, tuple(made), views)

    def abort(self) -> None:
        """Gives back what was reserved and not committed."""
        for _, slot in self._slots:
            assert self._ring is not None
            self._ring.abort(slot)
