"""The ring: states, room, order and wake-ups, against a dictionary, and against a writer that writes what it likes."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hexrt.errors import BadRequest, InvariantViolation, OutOfMemory
from hexrt.memory.gaps import Gaps
from hexrt.memory.ring import ReadSlot, Ring, RingReader, RingWriter, WriteSlot, wake_fd
from hexrt.memory.ring_memory import FIRST, LINE, RELEASED, data_start
from tests.running import ROOT

PAGE = mmap.PAGESIZE
pytestmark = pytest.mark.timeout(60)


@contextmanager
def ends(size: int = PAGE, slots: int = 8, most: int = 0) -> Iterator[tuple[RingWriter, RingReader]]:
    filled, freed = wake_fd(), wake_fd()
    with Ring.create(size, slots, most) as ring:
        writer, reader = RingWriter(ring.fd, filled, freed), RingReader(ring.fd, filled, freed)
        yield writer, reader
        writer.check_integrity()
        writer.close()
        reader.close()
    os.close(filled)
    os.close(freed)


def put(writer: RingWriter, data: bytes) -> WriteSlot:
    slot = writer.reserve_nowait(len(data))
    assert slot is not None
    slot.view[:] = data
    writer.commit(slot)
    return slot


def get(reader: RingReader) -> bytes | None:
    taken = reader.take_nowait()
    if taken is None:
        return None
    data = bytes(taken.view)
    reader.release(taken.slot)
    return data


def is_readable(fd: int) -> bool:
    try:
        return bool(os.eventfd_read(fd))
    except BlockingIOError:
        return False


# --- one record ---------------------------------------------------------------------------------------------------


def test_a_record_is_seen_when_it_is_committed_and_its_room_returns_when_it_is_released() -> None:
    with ends() as (writer, reader):
        slot = writer.reserve_nowait(5)
        assert slot is not None
        slot.view[:] = b"hello"
        assert (reader.take_nowait(), reader.occupied(), writer.statistics().filling) == (None, (), 1)
        writer.commit(slot)
        assert (reader.occupied(), writer.statistics().filled) == ((slot.slot,), 1)
        taken = reader.take_nowait()
        assert taken is not None
        assert (taken.slot, taken.offset, taken.bytes, bytes(taken.view)) == (slot.slot, slot.offset, 5, b"hello")
        assert (reader.occupied(), writer.statistics().processing) == ((slot.slot,), 1)
        reader.release(taken.slot)
        assert (reader.occupied(), writer.statistics().held) == ((), 0)


def test_records_come_in_the_order_of_their_commits() -> None:
    with ends() as (writer, reader):
        first, second = writer.reserve_nowait(1), writer.reserve_nowait(1)
        assert first is not None and second is not None
        first.view[:], second.view[:] = b"1", b"2"
        writer.commit(second)
        writer.commit(first)
        assert [get(reader), get(reader), get(reader)] == [b"2", b"1", None]


def test_an_offset_counts_from_the_start_of_the_memfd_and_is_aligned_for_any_tensor() -> None:
    with Ring.create(PAGE, 8) as ring:
        writer = RingWriter(ring.fd)
        put(writer, b"x")
        slot = put(writer, b"other hosts see this")
        fd = ring.reopen_read_only()
        with mmap.mmap(fd, ring.bytes, prot=mmap.PROT_READ) as seen:
            assert seen[slot.offset : slot.offset + slot.bytes] == b"other hosts see this"
        with pytest.raises(PermissionError):
            mmap.mmap(fd, ring.bytes)
        with pytest.raises(BadRequest, match="open for reading and writing"):
            RingReader(fd)
        os.close(fd)
        assert slot.offset % 64 == 0 and data_start(8) % PAGE == 0
        slot = None  # type: ignore[assignment]
        writer.close()


REOPEN = """
import ctypes, os
from hexrt.memory.ring import Ring
if os.geteuid() == 0:
    os.setresuid(1234, 1234, 1234)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE, which the change of identity took away: without it /proc/self/fd is root's
with Ring.create(4096, 8) as ring:
    fd = ring.reopen_read_only()
    print(os.fstat(fd).st_size == ring.bytes)
    try:
        os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    except PermissionError:
        print("refused")
"""


def test_who_was_given_a_ring_for_reading_cannot_open_it_for_writing_even_with_the_uid_of_its_maker() -> None:
    with Ring.create(PAGE, 8) as ring:
        assert os.fstat(ring.fd).st_mode & 0o777 == 0o400
    done = subprocess.run([sys.executable, "-c", REOPEN], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["True", "refused"]


def test_numpy_arrays_lie_in_a_slot_without_a_copy_and_cannot_be_written_by_the_reader() -> None:
    with ends(64 * PAGE) as (writer, reader):
        tensor = np.arange(6000, dtype=np.float32).reshape(60, 100)
        slot = writer.reserve_nowait(tensor.nbytes)
        assert slot is not None
        np.copyto(np.frombuffer(slot.view, np.float32).reshape(60, 100), tensor)
        writer.commit(slot)
        taken = reader.take_nowait()
        assert taken is not None
        seen = np.frombuffer(taken.view, np.float32).reshape(60, 100)
        assert not seen.flags.owndata and not seen.flags.writeable
        np.testing.assert_array_equal(seen, tensor)
        reader.release(taken.slot)


def test_an_empty_record_is_a_record() -> None:
    with ends() as (writer, reader):
        put(writer, b"")
        assert get(reader) == b""


def test_an_end_that_is_closed_while_a_view_is_left_unmaps_with_the_view() -> None:
    with Ring.create(PAGE, 1) as ring:
        writer, reader = RingWriter(ring.fd), RingReader(ring.fd)
        put(writer, b"left")
        taken = reader.take_nowait()
        assert taken is not None
        reader.close()
        assert bytes(taken.view) == b"left"
        writer.close()


# --- room ---------------------------------------------------------------------------------------------------------


def test_a_full_ring_gives_nothing_until_something_is_released() -> None:
    with ends(PAGE) as (writer, reader):
        put(writer, bytes(3000))
        assert writer.reserve_nowait(2000) is None
        assert get(reader) == bytes(3000)
        assert writer.reserve_nowait(PAGE) is not None


def test_at_most_so_many_slots_are_taken_as_an_edge_allows() -> None:
    with ends(PAGE, slots=8, most=4) as (writer, reader):
        for _ in range(4):
            put(writer, b"x")
        assert writer.reserve_nowait(1) is None
        get(reader)
        assert writer.reserve_nowait(1) is not None
        assert writer.reserve_nowait(1) is None


def test_slots_run_out_before_bytes_do() -> None:
    with ends(PAGE, slots=2) as (writer, _):
        assert [writer.reserve_nowait(1) is None for _ in range(3)] == [False, False, True]


def test_the_lowest_address_is_used_again_so_that_few_pages_are_touched() -> None:
    with ends(64 * PAGE) as (writer, reader):
        offsets = set()
        for _ in range(100):
            offsets.add(put(writer, bytes(PAGE)).offset)
            get(reader)
        assert offsets == {writer.data_start}


def test_slots_released_out_of_order_join_to_one_gap() -> None:
    with ends(PAGE) as (writer, reader):
        slots = [put(writer, bytes(1024)) for _ in range(4)]
        taken = [reader.take_nowait() for _ in range(4)]
        for index in (2, 0, 3, 1):
            reader.release(slots[index].slot)
            writer.check_integrity()
        assert None not in taken and writer.statistics().largest_gap_bytes == PAGE
        assert writer.reserve_nowait(PAGE) is not None


def test_an_aborted_slot_is_never_seen_and_its_room_returns_at_once() -> None:
    with ends(PAGE) as (writer, reader):
        slot = writer.reserve_nowait(PAGE)
        assert slot is not None
        writer.abort(slot)
        put(writer, bytes(PAGE))
        assert get(reader) == bytes(PAGE)


def test_what_is_larger_than_the_ring_is_refused_at_once_and_a_wait_says_who_holds_what() -> None:
    with ends(PAGE, most=3) as (writer, reader):
        assert writer.reserve_nowait(PAGE + 1) is None
        with pytest.raises(OutOfMemory, match="4097 bytes are needed in a ring of 4096"):
            writer.wait_reserve(PAGE + 1, 60)
        put(writer, bytes(100))
        put(writer, bytes(100))
        assert reader.take_nowait() is not None
        assert writer.reserve_nowait(1) is not None
        with pytest.raises(OutOfMemory, match="3 of at most 3 slots hold 320: 1 being filled, 1 unread, 1 being read"):
            writer.wait_reserve(1, 0.01)


def test_using_a_slot_after_its_end_is_a_bug_and_named() -> None:
    with ends() as (writer, reader):
        slot = put(writer, b"x")
        for act in (writer.commit, writer.abort):
            with pytest.raises(InvariantViolation, match="is not being filled"):
                act(slot)
        assert get(reader) == b"x"
        with pytest.raises(InvariantViolation, match="is not being read"):
            reader.release(slot.slot)
        again = writer.reserve_nowait(1)
        assert again is not None and again.slot == slot.slot
        with pytest.raises(InvariantViolation, match="is not being filled"):
            writer.commit(slot)


def test_gaps_that_overlap_what_is_held_are_found() -> None:
    gaps = Gaps(64, 640)
    held = [(gaps.take(64), 64), (gaps.take(128), 128)]
    gaps.check_integrity(held)
    for wrong in (held[:1], [*held, (0, 64)], [(64, 128), held[1]]):
        with pytest.raises(InvariantViolation):
            gaps.check_integrity(wrong)


# --- by number ----------------------------------------------------------------------------------------------------


def test_a_reader_that_learns_of_slots_by_messages_accepts_them_in_any_order() -> None:
    with ends() as (writer, reader):
        slots = [put(writer, bytes([n])) for n in range(4)]
        for slot in (slots[2], slots[0]):
            assert bytes(reader.accept(slot.slot).view) == bytes([slots.index(slot)])
        assert get(reader) == b"\x01"
        with pytest.raises(BadRequest, match="holds nothing to be read"):
            reader.accept(slots[2].slot)
        reader.release(slots[2].slot)
        reader.release(slots[0].slot)
        put(writer, b"\x09")
        assert [get(reader), get(reader), get(reader)] == [b"\x03", b"\x09", None]


@pytest.mark.parametrize("slot", [-1, 8, 1 << 70])
def test_a_slot_that_the_ring_does_not_have_is_refused(slot: int) -> None:
    with ends(slots=8) as (_, reader), pytest.raises(BadRequest, match="no slot"):
        reader.accept(slot)


# --- waking -------------------------------------------------------------------------------------------------------


def test_a_reader_is_woken_by_the_first_commit_after_it_found_nothing_and_by_no_other() -> None:
    with ends() as (writer, reader):
        put(writer, b"1")
        assert is_readable(reader._filled_fd), "a reader that never looked is woken"
        get(reader)
        put(writer, b"2")
        assert not is_readable(reader._filled_fd)
        assert [get(reader), get(reader)] == [b"2", None]
        put(writer, b"3")
        assert is_readable(reader._filled_fd)


def test_a_loop_that_takes_until_there_is_none_is_not_called_again() -> None:
    with ends() as (writer, reader):
        for _ in range(3):
            put(writer, b"x")
        while get(reader) is not None:
            assert reader._filled_fd
        assert not is_readable(reader._filled_fd)


def test_a_writer_that_does_not_wait_is_not_woken() -> None:
    with ends() as (writer, reader):
        put(writer, b"x")
        get(reader)
        assert not is_readable(writer._freed_fd)


def test_a_wait_ends_when_the_other_end_acts() -> None:
    with ends(PAGE) as (writer, reader):
        got: list[bytes] = []

        def read() -> None:
            for _ in range(200):
                taken = reader.wait_take(30)
                assert taken is not None
                got.append(bytes(taken.view))
                reader.release(taken.slot)

        thread = threading.Thread(target=read)
        thread.start()
        for number in range(200):
            slot = writer.wait_reserve(3000, 30)
            slot.view[:] = bytes([number]) * 3000
            writer.commit(slot)
        thread.join(30)
        assert got == [bytes([number]) * 3000 for number in range(200)]


def test_a_wait_for_a_record_ends_at_its_timeout() -> None:
    with ends() as (writer, reader):
        assert reader.wait_take(0) is None
        assert reader.wait_take(0.01) is None
        put(writer, b"x")
        assert reader.wait_take(0) is not None


def test_nobody_can_be_waited_for_without_an_eventfd() -> None:
    with Ring.create(PAGE, 1) as ring:
        writer, reader = RingWriter(ring.fd), RingReader(ring.fd)
        with pytest.raises(InvariantViolation, match="nobody wakes this reader"):
            reader.wait_take(60)
        put(writer, bytes(PAGE))
        with pytest.raises(OutOfMemory):
            writer.wait_reserve(1, 60)


def test_an_eventfd_that_a_peer_has_filled_up_still_wakes() -> None:
    with ends() as (writer, reader):
        os.eventfd_write(reader._filled_fd, (1 << 64) - 2)
        put(writer, b"x")
        taken = reader.wait_take(30)
        assert taken is not None and bytes(taken.view) == b"x"


# --- dead and hostile peers ---------------------------------------------------------------------------------------


def test_what_a_dead_reader_was_reading_is_freed_and_the_rest_is_taken_in_order() -> None:
    with ends() as (writer, dead):
        for number in range(5):
            put(writer, bytes([number]))
        assert get(dead) == b"\x00"
        assert dead.take_nowait() is not None
        with_fds = RingReader(memoryview(dead._map), dead._filled_fd, dead._freed_fd)  # type: ignore[arg-type]
        assert with_fds.recover() == 1
        assert is_readable(dead._freed_fd), "the writer may sleep"
        assert [get(with_fds) for _ in range(4)] == [b"\x02", b"\x03", b"\x04", None]
        assert writer.statistics().held == 0
        with_fds.close()


def test_room_that_a_reader_freed_and_could_not_count_any_more_is_found_when_it_is_needed() -> None:
    with ends(PAGE) as (writer, reader):
        put(writer, bytes(PAGE))
        taken = reader.take_nowait()
        assert taken is not None
        reader._words[FIRST + taken.slot * LINE] = reader._held[taken.slot]
        assert writer.reserve_nowait(PAGE) is not None


def test_released_slots_are_taken_back_without_a_look_at_those_that_are_held() -> None:
    with ends(slots=8) as (writer, reader):
        first = put(writer, b"kept")
        assert reader.take_nowait() is not None
        for number in range(20):
            slot = put(writer, bytes([number]))
            assert get(reader) == bytes([number])
            writer._take_back()
            assert list(writer._held.values()) == [first] and slot.slot != first.slot


def test_a_writer_whose_reader_counts_nonsense_still_finds_what_was_released() -> None:
    with ends(PAGE) as (writer, reader):
        for count in (0, 1 << 63, (1 << 64) - 1):
            put(writer, bytes(PAGE))
            assert get(reader) == bytes(PAGE)
            writer._words[RELEASED] = count
            writer.check_integrity()


def test_the_next_record_is_found_without_a_look_at_every_slot() -> None:
    with ends(slots=8) as (writer, reader):
        for number in range(20):
            slot = put(writer, bytes([number]))
            assert reader._find_next() == slot.slot
            assert get(reader) == bytes([number])


def test_recovering_frees_nothing_that_this_reader_reads() -> None:
    with ends() as (writer, reader):
        put(writer, b"x")
        taken = reader.take_nowait()
        assert taken is not None
        assert reader.recover() == 0
        reader.release(taken.slot)


def test_a_new_writer_goes_on_where_a_dead_one_stopped() -> None:
    with ends(PAGE) as (dead, reader):
        first, second, third = (put(dead, bytes([n]) * 100) for n in range(3))
        assert dead.reserve_nowait(1000) is not None, "half filled"
        assert get(reader) == bytes(100)
        writer = RingWriter(dead._view)
        writer.check_integrity()
        assert writer.statistics().held == 2
        slot = put(writer, b"\x03" * 100)
        assert slot.offset == first.offset and slot.slot not in (second.slot, third.slot)
        assert [get(reader) for _ in range(4)] == [bytes([n]) * 100 for n in (1, 2, 3)] + [None]
        assert writer.statistics().held == 0
        del slot
        writer.close()


@pytest.mark.parametrize("offset", [0, PAGE - 64, PAGE + 1, 1 << 40, (1 << 64) - 64])
def test_a_slot_that_names_bytes_outside_the_ring_is_dropped(offset: int) -> None:
    with ends(slots=8) as (writer, reader):
        slot = put(writer, b"x")
        writer._words[FIRST + slot.slot * LINE + 1] = offset
        with pytest.raises(BadRequest, match="names bytes outside"):
            reader.take_nowait()
        assert (reader.take_nowait(), reader.occupied()) == (None, ())
        put(writer, b"y")
        assert get(reader) == b"y"


def test_a_slot_longer_than_the_ring_is_dropped() -> None:
    with ends() as (writer, reader):
        slot = put(writer, b"x")
        writer._words[FIRST + slot.slot * LINE + 2] = (1 << 64) - 1
        with pytest.raises(BadRequest, match="names bytes outside"):
            reader.accept(slot.slot)


@pytest.mark.parametrize("seed", range(20))
def test_a_writer_that_scribbles_on_the_table_neither_leads_the_reader_out_of_the_ring_nor_holds_it(seed: int) -> None:
    chance = random.Random(seed)
    with Ring.create(PAGE, 4) as ring, mmap.mmap(ring.fd, ring.bytes) as memory:
        filled, freed = wake_fd(), wake_fd()
        reader, words = RingReader(ring.fd, filled, freed), memoryview(memory).cast("Q")
        table = range(3, FIRST + 4 * LINE)  # also the reader's own words
        acts = (reader.take_nowait, lambda: reader.accept(chance.randrange(4)), reader.recover, reader.occupied)
        kept: list[ReadSlot] = []
        for _ in range(1000):
            for _ in range(chance.randrange(4)):
                value = chance.choice(
                    (chance.randrange(8), chance.randrange(1 << 14), chance.getrandbits(64), 257, 513)
                )
                words[chance.choice(table)] = value
            os.eventfd_write(filled, 1)
            try:
                done = chance.choice(acts)()
            except BadRequest:
                continue
            if isinstance(done, ReadSlot):
                assert reader.data_start <= done.offset <= done.offset + done.bytes <= ring.bytes
                assert len(done.view) == done.bytes
                kept.append(done)
            while kept and chance.random() < 0.5:
                reader.release(kept.pop().slot)
        kept.clear()
        done = None
        words.release()
        reader.close()
        os.close(filled)
        os.close(freed)


def test_the_memfd_of_a_ring_cannot_change_its_size_or_its_seals() -> None:
    with Ring.create(PAGE, 1) as ring:
        for size in (0, ring.bytes * 2):
            with pytest.raises(PermissionError):
                os.ftruncate(ring.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(ring.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_memory_that_is_no_ring_is_refused() -> None:
    with pytest.raises(BadRequest, match="no ring"):
        RingReader(memoryview(bytearray(PAGE * 2)))
    for strange in (memoryview(b""), memoryview(bytearray(1001))):
        with pytest.raises(BadRequest, match="no ring"):
            RingReader(strange)
    bare = os.memfd_create("bare")
    os.ftruncate(bare, PAGE)
    with pytest.raises(BadRequest, match="sealed against shrinking"):
        RingWriter(bare)
    os.close(bare)
    with pytest.raises(BadRequest, match="must be a memfd"):
        RingWriter(bare)


@pytest.mark.parametrize(("size", "slots", "most"), [(0, 1, 0), (1, 0, 0), (1, 1 << 17, 0), (1, 2, 3), (1, 2, -1)])
def test_a_ring_that_cannot_be_is_a_bug(size: int, slots: int, most: int) -> None:
    with pytest.raises(InvariantViolation):
        Ring.create(size, slots, most)


# --- against a dictionary -----------------------------------------------------------------------------------------

SLOTS, MOST, BYTES = 6, 5, PAGE
sizes = st.one_of(st.integers(0, 200), st.integers(0, BYTES + 64))


class AgainstDictionary(RuleBasedStateMachine):
    """Records by number: those being filled, those committed in their order, those being read. Either end may be replaced at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring.create(BYTES, SLOTS, MOST)
        self.writer, self.reader = RingWriter(self.ring.fd), RingReader(self.ring.fd)
        self.filling: dict[int, WriteSlot] = {}
        self.committed: dict[int, int] = {}  # number -> slot, in order
        self.reading: dict[int, ReadSlot] = {}
        self.sizes: dict[int, int] = {}
        self.count = 0

    def held(self) -> list[int]:
        return [*self.filling, *self.committed, *self.reading]

    def content(self, number: int) -> bytes:
        return (number.to_bytes(4, "little") * (self.sizes[number] // 4 + 1))[: self.sizes[number]]

    @rule(size=sizes)
    def reserve(self, size: int) -> None:
        slot = self.writer.reserve_nowait(size)
        taken = sum(-(-max(1, self.sizes[number]) // 64) * 64 for number in self.held())
        if slot is None:
            assert len(self.held()) == MOST or max(1, size) > self.writer.statistics().largest_gap_bytes
            return
        assert len(self.held()) < MOST and taken + size <= BYTES
        self.count += 1
        self.sizes[self.count] = size
        self.filling[self.count] = slot
        slot.view[:] = self.content(self.count)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.filling)))
        slot = self.filling.pop(number)
        self.writer.commit(slot)
        self.committed[number] = slot.slot

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.writer.abort(self.filling.pop(data.draw(st.sampled_from(sorted(self.filling)))))

    @rule()
    def take(self) -> None:
        taken = self.reader.take_nowait()
        assert (taken is None) == (not self.committed)
        if taken is not None:
            number = next(iter(self.committed))
            assert taken.slot == self.committed.pop(number)
            self.reading[number] = taken

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.committed)))
        self.reading[number] = self.reader.accept(self.committed.pop(number))

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.reader.release(self.reading.pop(data.draw(st.sampled_from(sorted(self.reading)))).slot)

    @rule()
    def replace_reader(self) -> None:
        self.reader = RingReader(self.ring.fd)
        assert self.reader.recover() == len(self.reading)
        self.reading.clear()

    @rule()
    def replace_writer(self) -> None:
        self.filling.clear()
        self.writer = RingWriter(self.ring.fd)

    @invariant()
    def agrees(self) -> None:
        self.writer.check_integrity()
        for number, slot in (*self.filling.items(), *self.reading.items()):
            assert bytes(slot.view) == self.content(number)
        occupied = [*self.committed.values(), *(slot.slot for slot in self.reading.values())]
        assert list(self.reader.occupied()) == sorted(occupied)
        now = self.writer.statistics()
        assert (now.filling, now.filled, now.processing) == (len(self.filling), len(self.committed), len(self.reading))

    def teardown(self) -> None:
        self.filling.clear()
        self.reading.clear()
        self.writer.close()
        self.reader.close()
        self.ring.close()


class Long(AgainstDictionary):
    pass


TestAgainstDictionary = AgainstDictionary.TestCase
TestAgainstDictionary.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLongAgainstDictionary = pytest.mark.campaign(pytest.mark.timeout(600)(Long.TestCase))
TestLongAgainstDictionary.settings = settings(max_examples=1000, stateful_step_count=100, deadline=None)
