"""A ring of variable-sized slots in one memfd, between one writer process and one reader process.

A `RingWriter` fills slots, a `RingReader` takes them in the order of their commits, or by number where it learns of them by messages. An
end belongs to one thread; nothing waits but `wait_x`. A peer may die between any two stores, or write what it likes: a slot is published
whole or not at all, and the reader believes no offset. What a hostile writer does to the bytes of a slot while they are read is not
prevented: they are its bytes, to be checked as any input is. Layout and states: `hexrt.memory.ring_memory`.
"""

from __future__ import annotations

import mmap
import os
import select
import time

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
    FREED,
    LINE,
    OFFSET,
    ORDER,
    PROCESSING,
    READER_WAITS,
    RELEASED,
    REORDERS,
    SERIAL_SHIFT,
    STATE,
    WRITER_WAITS,
    Ring,
    RingEnd,
    drain,
    wake_fd,
)

__all__ = ["Ring", "RingWriter", "WriteSlot", "RingStatistics", "RingReader", "ReadSlot", "wake_fd"]

SPIN_NS = 50_000
"""How long a reader stays awake for the next record. Measured on 2 cores: a wake-up takes 20 us more than a record found so."""
FILLING = -1  # no word of the table is that


class WriteSlot(msgspec.Struct, eq=False, gc=False):
    """A slot to be filled. `offset` counts from the start of the memfd; the view is the writer's until commit or abort."""

    slot: int
    offset: int
    bytes: int
    view: memoryview
    free_word: int = FILLING  # what its word is once the reader has released it


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
        self._held: dict[int, WriteSlot] = {}  # the oldest first
        self._released = self._words[RELEASED]
        self._serial = self._words[COMMITTED]
        self._take_over()
        self._free = list(range(self._slots - 1, -1, -1))  # a stack
        if self._held:
            self._free = [slot for slot in self._free if slot not in self._held]

    def _take_over(self) -> None:
        words = self._words
        first = words[FIRST + 1 % self._slots * LINE + ORDER]  # all that can be there before anything was counted
        for slot in range(self._slots) if words[COMMITTED] else (first,):
            line = FIRST + slot * LINE
            word = words[line]
            self._serial = max(self._serial, word >> SERIAL_SHIFT)
            if word & STATE != FREE:
                start, size = words[line + OFFSET], words[line + BYTES]
                if start % ALIGNMENT or not self._gaps.take_at(start, _rounded(size)):
                    raise BadRequest("what an earlier writer left in this ring cannot be")
                self._held[slot] = WriteSlot(slot, start, size, memoryview(b""), word & ~STATE)

    def reserve_nowait(self, size: int) -> WriteSlot | None:
        """A slot of `size` bytes at the lowest address that has room; None while there is none, and always above `capacity_bytes`."""
        if self._words[RELEASED] != self._released:
            self._take_back()
        held = self._held
        start = self._gaps.take(_rounded(size)) if len(held) < self.most else -1
        if start < 0:
            self._take_back_all()  # a reader that was killed may have freed one without counting it
            start = self._gaps.take(_rounded(size)) if len(held) < self.most else -1
            if start < 0:
                return None
        slot = self._free.pop()
        made = held[slot] = WriteSlot(slot, start, size, self._view[start : start + size])
        return made

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
        number = slot.slot
        if self._held.get(number) is not slot or slot.free_word != FILLING:
            raise InvariantViolation(f"slot {number} is not being filled")
        words, line = self._words, FIRST + number * LINE
        self._serial = serial = self._serial + 1
        slot.free_word = free = serial << SERIAL_SHIFT
        words[line + OFFSET] = slot.offset
        words[line + BYTES] = slot.bytes
        words[FIRST + serial % self._slots * LINE + ORDER] = number
        if REORDERS:
            self._fence()
        words[line] = free | FILLED
        words[COMMITTED] = serial
        if self._filled_fd >= 0:
            self._fence()
            if words[READER_WAITS]:
                self._wake(self._filled_fd)

    def abort(self, slot: WriteSlot) -> None:
        """Gives back a slot that was reserved and shall not be read."""
        if self._held.get(slot.slot) is not slot or slot.free_word != FILLING:
            raise InvariantViolation(f"slot {slot.slot} is not being filled")
        self._give_back(slot)

    def _take_back(self) -> None:
        """Takes back what the reader has noted as released since the last time."""
        words, held = self._words, self._held
        released = words[RELEASED]
        if REORDERS:
            self._fence()
        if not 0 < released - self._released <= self._slots:
            self._take_back_all()
        for number in range(self._released, released):
            slot = held.get(words[FIRST + number % self._slots * LINE + FREED])
            if slot is not None and words[FIRST + slot.slot * LINE] == slot.free_word:
                self._give_back(slot)
        self._released = released

    def _take_back_all(self) -> None:
        """The same by a look at every slot that is held."""
        self._released = self._words[RELEASED]
        words = self._words
        for slot in [slot for slot in self._held.values() if words[FIRST + slot.slot * LINE] == slot.free_word]:
            self._give_back(slot)

    def _give_back(self, slot: WriteSlot) -> None:
        del self._held[slot.slot]
        self._gaps.give(slot.offset, _rounded(slot.bytes))
        self._free.append(slot.slot)

    def statistics(self) -> RingStatistics:
        self._take_back_all()
        held = self._held.values()
        states = [self._words[FIRST + slot.slot * LINE] & STATE for slot in held if slot.free_word != FILLING]
        return RingStatistics(
            self.capacity_bytes, sum(_rounded(slot.bytes) for slot in held), len(held), len(held) - len(states),
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
        self._gaps.check_integrity((slot.offset, _rounded(slot.bytes)) for slot in self._held.values())
        if sorted([*self._free, *self._held]) != list(range(self._slots)) or len(self._held) > self.most:
            raise InvariantViolation(f"{len(self._free)} slots free and {len(self._held)} held of {self._slots}")

    def close(self) -> None:
        self._held.clear()
        super().close()


def _rounded(size: int) -> int:
    return (size + ALIGNMENT - 1) & -ALIGNMENT or ALIGNMENT


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
        self._next = 1  # the serial that comes next
        if self._words[COMMITTED]:
            self._find_oldest()

    def take_nowait(self) -> ReadSlot | None:
        """The oldest committed record; None where there is none. Raises BadRequest, the slot dropped, where it lies outside the ring."""
        slot = self._find()
        if slot < 0:
            if self._filled_fd >= 0:
                drain(self._filled_fd)
            slot = self._ask_and_find()
        return self._take(slot) if slot >= 0 else None

    def wait_take(self, timeout_s: float) -> ReadSlot | None:
        """The same, waiting for the writer; None at the timeout.

        Before it sleeps it looks again for SPIN_NS, yielding the processor each time: an answer of a quick peer needs no wake-up then.
        """
        slot = self._find()
        if slot < 0 and timeout_s > 0:
            awake_ns = time.monotonic_ns() + SPIN_NS
            while slot < 0 and time.monotonic_ns() < awake_ns:
                os.sched_yield()
                slot = self._find()
        if slot < 0:
            slot = self._ask_and_find()
        if slot < 0 and timeout_s > 0:
            slot = self._sleep(timeout_s)
        return self._take(slot) if slot >= 0 else None

    def _sleep(self, timeout_s: float) -> int:
        if self._filled_fd < 0:
            raise InvariantViolation("nobody wakes this reader")
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._filled_fd, select.POLLIN)
        slot = -1
        while slot < 0 and (left_s := deadline - time.monotonic()) > 0:
            if poll.poll(left_s * 1e3):
                drain(self._filled_fd)
            slot = self._ask_and_find()
        return slot

    def _take(self, slot: int) -> ReadSlot:
        words = self._words
        words[READER_WAITS] = 0
        self._next = (words[FIRST + slot * LINE] >> SERIAL_SHIFT) + 1
        return self.accept(slot)

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
        self._free(slot, free)
        if self._freed_fd >= 0:
            self._fence()
            if self._words[WRITER_WAITS]:
                self._wake(self._freed_fd)

    def recover(self) -> int:
        """Frees what a dead reader was reading, and returns how many slots. What it had not begun is still to be taken."""
        words, freed = self._words, 0
        for slot in range(self._slots):
            word = words[FIRST + slot * LINE]
            if word & STATE == PROCESSING and slot not in self._held:
                self._free(slot, word - PROCESSING + FREE)
                freed += 1
        if self._freed_fd >= 0:
            self._wake(self._freed_fd)  # it may have died between freeing and waking
        return freed

    def occupied(self) -> tuple[int, ...]:
        """The slots that hold a record, being read or not, in order of their numbers."""
        words = self._words
        return tuple(slot for slot in range(self._slots) if words[FIRST + slot * LINE] & STATE in (FILLED, PROCESSING))

    def _free(self, slot: int, free: int) -> None:
        words = self._words
        if REORDERS:
            self._fence()
        words[FIRST + slot * LINE] = free
        released = words[RELEASED]
        words[FIRST + released % self._slots * LINE + FREED] = slot
        if REORDERS:
            self._fence()
        words[RELEASED] = (released + 1) % (1 << 64)

    def _find(self) -> int:
        """The slot of the oldest record that was not taken; -1 where there is none."""
        slot = self._find_next()
        if slot < 0 and self._words[COMMITTED] >= self._next:
            slot = self._find_oldest()
            if slot < 0:
                slot = self._find_next()
        return slot

    def _find_next(self) -> int:
        words = self._words
        slot = words[FIRST + self._next % self._slots * LINE + ORDER]
        if (
            slot >= self._slots
            or words[FIRST + slot * LINE] != self._next << SERIAL_SHIFT | FILLED
            or slot in self._held
        ):
            return -1
        return slot

    def _find_oldest(self) -> int:
        """Looks at every slot: for a reader that is new here, or that accepted some by number.

        Younger records than were committed before the look are left alone: it may have missed older ones among them.
        """
        words = self._words
        committed = words[COMMITTED]
        self._fence()
        found, self._next = -1, committed + 1
        for slot in range(self._slots):
            word = words[FIRST + slot * LINE]
            if word & STATE == FILLED and word >> SERIAL_SHIFT < self._next and slot not in self._held:
                found, self._next = slot, word >> SERIAL_SHIFT
        return found

    def _ask_and_find(self) -> int:
        """Asks to be woken, and finds what was committed just before that."""
        self._words[READER_WAITS] = 1
        self._fence()
        return self._find()

    def close(self) -> None:
        self._data.release()
        super().close()
