"""The memory that a host process addresses by place: its own arena, HOST, and the segments that the daemon mapped into it.

Owns the mappings. Used by every host program, on any thread but for `map`, `unmap` and `add`, which the loop's thread calls. A mapping
ends when it is unmapped and the last view of it is gone, so that neither order crashes. Keeps no file descriptor open: a host may have
more segments than descriptors. What lies in a place, and who may touch it when, is the daemon's business.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass

from hexrt.errors import InvariantViolation, NotFound, OutOfMemory
from hexrt.memory.arena import map_at, map_fd
from hexrt.protocol.host import Map

MAP_NORESERVE = 0x4000  # nothing is set aside for what may never be touched


@dataclass(frozen=True, slots=True)
class Mapped:
    """A place whole. Whoever keeps it keeps the memory: `address` is good even after the place is unmapped."""

    memory: memoryview  # of bytes; read-only where the host may not write
    address: int
    bytes: int
    writable: bool
    read: memoryview  # the same bytes where the kernel refuses every write


class Places:
    def __init__(self) -> None:
        self.own_ring: int | None = None
        """The place of the ring that this host puts its outputs in, once the daemon has mapped one."""
        self._places: dict[int, Mapped] = {}

    def __contains__(self, place: int) -> bool:
        return place in self._places

    def map(self, message: Map, fd: int) -> None:
        """Maps the file behind `fd`, which is closed in any case, in place of what was there.

        Raises InvariantViolation where it is too short, BadRequest where it was opened for less, OutOfMemory.
        """
        try:
            if message.bytes < 1 or os.fstat(fd).st_size < message.bytes:
                raise InvariantViolation(
                    f"place {message.place} is said to have {message.bytes} bytes, its file has {os.fstat(fd).st_size}"
                )
            memory, address = map_at(fd, message.bytes, message.writable)
            read = map_fd(fd, message.bytes, False) if message.writable else memory
        finally:
            os.close(fd)
        self._places[message.place] = Mapped(memory, address, message.bytes, message.writable, read)
        if message.ring:
            self.own_ring = message.place

    def add(self, place: int, memory: mmap.mmap) -> None:
        """Makes memory of this process's own a place. Nobody else has its bytes, and so they are not guarded against a write in `read`."""
        whole = memoryview(memory)
        self._places[place] = Mapped(whole, address_of(memory), len(memory), True, whole.toreadonly())

    def unmap(self, place: int) -> None:
        """Forgets a place; views that are still out stay good. Raises NotFound."""
        if self._places.pop(place, None) is None:
            raise NotFound(f"no place {place} is mapped")
        if place == self.own_ring:
            self.own_ring = None

    def get(self, place: int) -> Mapped:
        """Raises NotFound for a place that is not mapped."""
        try:
            return self._places[place]
        except KeyError:
            raise NotFound(f"no place {place} is mapped") from None

    def view(self, place: int, offset: int = 0, length: int | None = None) -> memoryview:
        """`length` bytes from `offset` on, without it all that follow; valid as long as it is kept.

        Raises NotFound for a place that is not mapped, InvariantViolation for a range outside.
        """
        mapped = self.get(place)
        end = mapped.bytes if length is None else offset + length
        _check(mapped, place, offset, end)
        return mapped.memory[offset:end]

    def read(self, place: int, offset: int = 0, length: int | None = None) -> memoryview:
        """As `view`, for code that is not trusted to keep to it: a write through its address ends this process, writable place or not."""
        mapped = self.get(place)
        end = mapped.bytes if length is None else offset + length
        _check(mapped, place, offset, end)
        return mapped.read[offset:end]

    def address(self, place: int, offset: int, length: int, write: bool = False) -> int:
        """Where those bytes begin in this process; raises as `view` does, and where `write` is not allowed. Valid until the place is unmapped."""
        mapped = self.get(place)
        _check(mapped, place, offset, offset + length)
        if write and not mapped.writable:
            raise InvariantViolation(f"place {place} is mapped for reading alone")
        return mapped.address + offset

    def size(self, place: int) -> int:
        """Its bytes. Raises NotFound."""
        return self.get(place).bytes


def _check(mapped: Mapped, place: int, offset: int, end: int) -> None:
    if not 0 <= offset <= end <= mapped.bytes:
        raise InvariantViolation(f"bytes {offset} to {end} are outside place {place}, which has {mapped.bytes}")


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def anonymous(size: int) -> mmap.mmap:
    """Private memory of this process, zero and untaken until it is touched, in huge pages where they are granted. Raises OutOfMemory."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except (OSError, ValueError, OverflowError) as error:
        raise OutOfMemory(f"{size} bytes of memory are not to be had: {error}") from error
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages
        pass
    return memory
