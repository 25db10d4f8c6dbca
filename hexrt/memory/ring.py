"""A ring of variable-sized slots in one memfd, between one writer process and one reader process.

A `RingWriter` fills slots, a `RingReader` takes them in the order of their commits, or by number where it learns of them by messages. An
end belongs to one thread; nothing waits but `wait_x`. A peer may die between any two stores, or write what it likes: a slot is published
whole or not at all, and the reader believes no offset. What a hostile writer does to the bytes of a slot while they are read is not
prevented: they are its bytes, to be checked as any input is. Layout and states: `hexrt.memory.ring_memory`.
"""

from __future__ import annotations

import mmap
import select
import time
from array import array

import msgspec

from hexrt.errors import BadRequest, InvariantViolation, OutOfMemory
from hexrt.memory.gaps import Gaps
from hexrt.memory.ring_memory import (
    ALIGNMENT,
    BYTES,
    COMMITTED,
    FILLED,
    FIRST,
    FREE,
    LINE,
    OFFSET,
    ORDER,
    PROCESSING,
    READER_WAITS,
    RELEASED,
    REORDERS,
    SERIAL,
    STATE,
    WRITER_WAITS,
    Ring,
    RingEnd,
    drain,
    wake_fd,
)

__all__ = ["Ring", "RingWriter", "WriteSlot", "RingStatistics", "RingReader", "ReadSlot", "wake_fd"]


class WriteSlot(msgspec.Struct, eq=False, gc=False):
    """A slot to be filled. `offset` counts from the start of the memfd; the view is the writer's until commit or abort."""

    slot: int
    offset: int
    bytes: int
    view: memoryview


class ReadSlot(msgspec.Struct, eq=False, gc=False):
    """A slot to be read. `offset` counts from the start of the memfd; the read-only view is valid until release."""

    slot: int
    offset: int
    bytes: int
    view: memoryview


class RingStatistics(msgspec.Struct, frozen=True):
    capacity_bytes: int
    held_bytes: int
    held: int  # slots; so are the next three, which add up to it
    filling: int
    filled: int
    processing: int
    largest_gap_bytes: int


class RingWriter(RingEnd):
    """The only allocator. `filled_fd` wakes the reader, `freed_fd` wakes this end; without them nobody is woken.

    A writer of a ring that an earlier one left counts what is not free yet as held.
    """

    def __init__(self, memory: int | mmap.mmap | memoryview, filled_fd: int = -1, freed_fd: int = -1) -> None:
        super().__init__(memory)
        self._filled_fd = filled_fd
        self._freed_fd = freed_fd
        self.capacity_bytes = (self.bytes - self.data_start) // ALIGNMENT * ALIGNMENT
        self._gaps = Gaps(self.data_start, self.capacity_bytes)
        self._held: dict[int, tuple[int, int]] = {}  # slot -> start and size, the oldest first
        self._filling: set[int] = set()
        self._released = self._words[RELEASED]
        self._serial = self._words[COMMITTED]
        self._free_words = array(
            "Q", self._words[FIRST : FIRST + self._slots * LINE : LINE]
        )  # its word when it is free
        if any(self._free_words):
            self._take_over()
        self._free = [slot for slot in range(self._slots - 1, -1, -1) if slot not in self._held]  # a stack

    def _take_over(self) -> None:
        words = self._words
        for slot, word in enumerate(self._free_words):
            line = FIRST + slot * LINE
            self._serial = max(self._serial, words[line + SERIAL])
            self._free_words[slot] = word & ~STATE
            if word & STATE != FREE:
                start, size = words[line + OFFSET], _rounded(words[line + BYTES])
                if start % ALIGNMENT or not self._gaps.take_at(start, size):
                    raise BadRequest("what an earlier writer left in this ring cannot be")
                self._held[slot] = start, size

    def reserve_nowait(self, size: int) -> WriteSlot | None:
        """A slot of `size` bytes at the lowest address that has room; None while there is none, and always above `capacity_bytes`."""
        rounded = _rounded(size)
        released = self._words[RELEASED]
        if released != self._released:
            self._take_back(released - self._released)
            self._released = released
        start = self._gaps.take(rounded) if len(self._held) < self.most else -1
        if start < 0:
            self._take_back(len(self._held))  # a reader that was killed may have freed one without counting it
            start = self._gaps.take(rounded) if len(self._held) < self.most else -1
            if start < 0:
                return None
        slot = self._free.pop()
        self._held[slot] = start, rounded
        self._filling.add(slot)
        return WriteSlot(slot, start, size, self._view[start : start + size])

    def wait_reserve(self, size: int, timeout_s: float) -> WriteSlot:
        """The same, waiting for the reader. Raises OutOfMemory, that says what is held, at the timeout, or at once where waiting is no use."""
        made = self.reserve_nowait(size)
        if made is not None:
            return made
        if self._freed_fd < 0 or size > self.capacity_bytes:
            raise self._full(size)
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._freed_fd, select.POLLIN)
        self._words[WRITER_WAITS] = 1
        try:
            while True:
                drain(self._freed_fd)
                self._fence()
                made = self.reserve_nowait(size)
                if made is not None:
                    return made
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise self._full(size)
                poll.poll(left_s * 1e3)
        finally:
            self._words[WRITER_WAITS] = 0

    def commit(self, slot: WriteSlot) -> None:
        """Publishes the slot and wakes a reader that waits. Its bytes are the reader's from here on."""
        self._end_filling(slot)
        number = slot.slot
        words, line = self._words, FIRST + number * LINE
        self._serial = serial = self._serial + 1
        words[line + OFFSET] = slot.offset
        words[line + BYTES] = slot.bytes
        words[line + SERIAL] = serial
        words[FIRST + serial % self._slots * LINE + ORDER] = number
        free = self._free_words[number] + STATE + 1
        self._free_words[number] = free
        if REORDERS:
            self._fence()
        words[line] = free + FILLED - FREE
        words[COMMITTED] = serial
        if self._filled_fd >= 0:
            self._fence()
            if words[READER_WAITS]:
                self._wake(self._filled_fd)

    def abort(self, slot: WriteSlot) -> None:
        """Gives back a slot that was reserved and shall not be read."""
        self._end_filling(slot)
        self._give_back(slot.slot)

    def _end_filling(self, slot: WriteSlot) -> None:
        if slot.slot not in self._filling or self._held[slot.slot][0] != slot.offset:
            raise InvariantViolation(f"slot {slot.slot} is not being filled")
        self._filling.remove(slot.slot)

    def _take_back(self, most: int) -> None:
        """Takes back what the reader has released, the oldest first, up to `most` slots."""
        words, free_words, filling = self._words, self._free_words, self._filling
        found: list[int] = []
        for slot in self._held:
            if words[FIRST + slot * LINE] == free_words[slot] and slot not in filling:
                found.append(slot)
                if len(found) == most:
                    break
        for slot in found:
            self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        self._gaps.give(*self._held.pop(slot))
        self._free.append(slot)

    def statistics(self) -> RingStatistics:
        self._take_back(len(self._held))
        states = [self._words[FIRST + slot * LINE] & STATE for slot in self._held if slot not in self._filling]
        return RingStatistics(
            self.capacity_bytes, sum(size for _, size in self._held.values()), len(self._held), len(self._filling),
            states.count(FILLED), states.count(PROCESSING), self._gaps.largest,
        )  # fmt: skip

    def _full(self, size: int) -> OutOfMemory:
        now = self.statistics()
        return OutOfMemory(
            f"{size} bytes are needed in a ring of {now.capacity_bytes}, whose largest gap has {now.largest_gap_bytes}; {now.held} of "
            f"at most {self.most} slots hold {now.held_bytes}: {now.filling} being filled, {now.filled} unread, {now.processing} being read"
        )

    def check_integrity(self) -> None:
        """Raises InvariantViolation unless gaps and held slots make up the data area, and free and held slots the table."""
        self._gaps.check_integrity(self._held.values())
        if sorted([*self._free, *self._held]) != list(range(self._slots)) or len(self._held) > self.most:
            raise InvariantViolation(f"{len(self._free)} slots free and {len(self._held)} held of {self._slots}")
        if not self._filling <= self._held.keys():
            raise InvariantViolation(f"slots {sorted(self._filling)} are filled and {sorted(self._held)} held")


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT or ALIGNMENT


class RingReader(RingEnd):
    """Takes what was committed. `filled_fd` wakes this end, `freed_fd` wakes a writer that waits.

    A loop may watch `filled_fd`, and call `take_nowait` until that gives None, which asks to be woken again.
    """

    def __init__(self, memory: int | mmap.mmap | memoryview, filled_fd: int = -1, freed_fd: int = -1) -> None:
        super().__init__(memory)
        self._filled_fd = filled_fd
        self._freed_fd = freed_fd
        self._data = self._view.toreadonly()
        self._held: dict[int, int] = {}  # slot -> its word when it is free again
        self._next = 0  # the serial that comes next
        self._find_oldest()

    def take_nowait(self) -> ReadSlot | None:
        """The oldest committed record; None where there is none. Raises BadRequest, the slot dropped, where it lies outside the ring."""
        slot = self._find()
        if slot < 0:
            slot = self._find_again()
            if slot < 0:
                return None
        self._words[READER_WAITS] = 0
        self._next = self._words[FIRST + slot * LINE + SERIAL] + 1
        return self.accept(slot)

    def wait_take(self, timeout_s: float) -> ReadSlot | None:
        """The same, waiting for the writer; None at the timeout."""
        taken = self.take_nowait()
        if taken is not None or timeout_s <= 0:
            return taken
        if self._filled_fd < 0:
            raise InvariantViolation("nobody wakes this reader")
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._filled_fd, select.POLLIN)
        while taken is None and (left_s := deadline - time.monotonic()) > 0:
            poll.poll(left_s * 1e3)
            taken = self.take_nowait()
        return taken

    def accept(self, slot: int) -> ReadSlot:
        """The record in a slot that a message names. Raises BadRequest where none was committed there, or where it lies outside the ring."""
        if not 0 <= slot < self._slots:
            raise BadRequest(f"a ring of {self._slots} slots has no slot {slot}")
        words, line = self._words, FIRST + slot * LINE
        word = words[line]
        if word & STATE != FILLED or slot in self._held:
            raise BadRequest(f"slot {slot} of the ring holds nothing to be read")
        if REORDERS:
            self._fence()
        offset, size = words[line + OFFSET], words[line + BYTES]
        words[line] = word - FILLED + PROCESSING
        self._held[slot] = word - FILLED + FREE
        if offset < self.data_start or offset % ALIGNMENT or size > self.bytes - offset:
            self.release(slot)
            raise BadRequest(f"slot {slot} of the ring names bytes outside of it")
        return ReadSlot(slot, offset, size, self._data[offset : offset + size])

    def release(self, slot: int) -> None:
        """Frees a slot that was taken or accepted; nothing may read its bytes any more."""
        free = self._held.pop(slot, None)
        if free is None:
            raise InvariantViolation(f"slot {slot} is not being read")
        if REORDERS:
            self._fence()
        self._words[FIRST + slot * LINE] = free
        self._count_released(1)

    def recover(self) -> int:
        """Frees what a dead reader was reading, and returns how many slots. What it had not begun is still to be taken."""
        words, freed = self._words, 0
        for slot in range(self._slots):
            word = words[FIRST + slot * LINE]
            if word & STATE == PROCESSING and slot not in self._held:
                words[FIRST + slot * LINE] = word - PROCESSING + FREE
                freed += 1
        self._count_released(freed)
        if self._freed_fd >= 0:
            self._wake(self._freed_fd)  # it may have died between freeing and waking
        return freed

    def occupied(self) -> tuple[int, ...]:
        """The slots that hold a record, being read or not, in order of their numbers."""
        words = self._words
        return tuple(slot for slot in range(self._slots) if words[FIRST + slot * LINE] & STATE in (FILLED, PROCESSING))

    def _count_released(self, slots: int) -> None:
        words = self._words
        words[RELEASED] = (words[RELEASED] + slots) % (1 << 64)
        if self._freed_fd >= 0:
            self._fence()
            if words[WRITER_WAITS]:
                self._wake(self._freed_fd)

    def _find(self) -> int:
        """The slot of the oldest record that was not taken; -1 where there is none."""
        words = self._words
        slot = words[FIRST + self._next % self._slots * LINE + ORDER]
        if slot < self._slots:
            line = FIRST + slot * LINE
            if words[line + SERIAL] == self._next and words[line] & STATE == FILLED and slot not in self._held:
                return slot
        return self._find_oldest() if words[COMMITTED] >= self._next else -1

    def _find_oldest(self) -> int:
        """The same by a look at every slot: for a reader that is new here, or that accepted some by number."""
        words = self._words
        oldest, found = words[COMMITTED] + 1, -1
        self._fence()
        for slot in range(self._slots):
            line = FIRST + slot * LINE
            if words[line] & STATE == FILLED and slot not in self._held:
                serial = words[line + SERIAL]
                if found < 0 or serial < oldest:
                    oldest, found = serial, slot
        self._next = oldest
        return found

    def _find_again(self) -> int:
        """Asks to be woken, and finds what was committed just before that."""
        self._words[READER_WAITS] = 1
        if self._filled_fd >= 0:
            drain(self._filled_fd)
        self._fence()
        return self._find()
