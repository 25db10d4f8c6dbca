"""The tensors of one launch in a host process: views of those it was given, and slots in the host's ring for those it puts out.

Owns slots from their reservation until they are committed with the report that names them, or given back. Nothing waits: what finds no
room goes inline. Used by the thread that runs the bodies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from hexrt.errors import InvariantViolation, TaskFailed
from hexrt.memory.ring import RingWriter, WriteSlot
from hexrt.protocol.host import Located, Made
from hexrt.values import first_handle

SERIALS = 1 << 32


class Memory(Protocol):
    """Where a host finds bytes by place: `hexrt.devices.places`, or the daemon's own tables for io."""

    own_ring: int | None

    def view(self, place: int, offset: int = 0, length: int | None = None) -> memoryview: ...


class Output(msgspec.Struct, frozen=True, gc=False):
    """What a body put out: the encoded value, its tensors for the report, and views of them for a launch that takes it from here."""

    raw: bytes
    made: tuple[Made, ...] = ()
    views: Mapping[int, memoryview] = {}


class Desk:
    """Gives each launch of one host its tensors, and makes the handles of new ones."""

    def __init__(self, memory: Memory | None, host_epoch: int) -> None:
        self._memory = memory
        self._first = first_handle(host_epoch)
        self._serial = 0
        self._ring: tuple[int, RingWriter] | None = None

    def given(self, located: Iterable[Located]) -> dict[int, memoryview]:
        if self._memory is None:
            raise InvariantViolation("this host has no shared memory")
        return {at.handle: self._memory.view(at.place, at.offset, at.bytes).toreadonly() for at in located}

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
    """Takes the large arrays of one output. `given` are the launch's own tensors: an array that is one of them, whole, is passed on."""

    def __init__(self, desk: Desk, given: Mapping[int, memoryview]) -> None:
        self._desk = desk
        self._ring = desk.ring()
        self._given = given
        self._known: dict[tuple[int, int], int] | None = None  # address and bytes -> handle
        self._kept: list[Any] = []  # so that no address is used again meanwhile
        self._slots: list[tuple[int, WriteSlot]] = []
        self._passed: dict[int, None] = {}
        self.bytes = 0  # of the tensors named so far

    def place(self, array: Any) -> int | None:
        """Its handle, the bytes being in the ring now or where they were; None where there is no room."""
        at = (array.__array_interface__["data"][0], array.nbytes) if array.flags.c_contiguous else None
        if self._known is None:
            self._known = {(address_of(view), len(view)): handle for handle, view in self._given.items()}
        handle = self._known.get(at) if at is not None else None
        if handle is None:
            handle = self._fill(array)
            if handle is None:
                return None
            if at is not None:
                self._known[at] = handle
                self._kept.append(array)
        elif handle in self._given:
            self._passed[handle] = None
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
        made += [Made(handle, -1, 0, len(self._given[handle])) for handle in self._passed]
        views = {handle: slot.view.toreadonly() for handle, slot in self._slots}
        views.update((handle, self._given[handle]) for handle in self._passed)
        for _, slot in self._slots:
            assert self._ring is not None
            self._ring.commit(slot)
        return Output(raw, tuple(made), views)

    def abort(self) -> None:
        """Gives back what was reserved and not committed."""
        for _, slot in self._slots:
            assert self._ring is not None
            self._ring.abort(slot)


def address_of(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
