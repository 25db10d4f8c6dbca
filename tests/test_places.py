"""Places: a host's mappings by number, their rights and their ends."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hexrt.devices.places import Places, anonymous
from hexrt.errors import BadRequest, InvariantViolation, NotFound, OutOfMemory
from hexrt.protocol.host import DEVICE, FIRST_SEGMENT, HOST, Map

PAGE = mmap.PAGESIZE


def memfd(size: int, content: bytes = b"") -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    os.pwrite(fd, content, 0)
    return fd


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_what_one_writes_in_a_place_another_mapping_of_the_file_reads() -> None:
    fd = memfd(3 * PAGE)
    places = Places()
    places.map(Map(HOST, 3 * PAGE, writable=True), os.dup(fd))
    places.map(Map(FIRST_SEGMENT, 3 * PAGE, ring=True), os.dup(fd))
    places.view(HOST, PAGE, 5)[:] = b"hello"
    assert bytes(places.view(FIRST_SEGMENT, PAGE, 5)) == b"hello"
    assert os.pread(fd, 5, PAGE) == b"hello"
    assert places.own_ring == FIRST_SEGMENT
    assert places.size(HOST) == len(places.view(HOST)) == 3 * PAGE
    os.close(fd)


def test_a_place_that_is_mapped_for_reading_is_not_written() -> None:
    places = Places()
    places.map(Map(HOST, PAGE), memfd(PAGE))
    view = places.view(HOST)
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1
    assert places.address(HOST, 0, PAGE)
    with pytest.raises(InvariantViolation, match="place 1 is mapped for reading alone"):
        places.address(HOST, 0, PAGE, write=True)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, PAGE + 1), (PAGE, 1), (PAGE + 1, 0), (1 << 70, 1)])
def test_a_range_outside_a_place_is_refused(offset: int, length: int) -> None:
    places = Places()
    places.map(Map(HOST, PAGE), memfd(PAGE))
    with pytest.raises(InvariantViolation, match="are outside place 1, which has 4096"):
        places.view(HOST, offset, length)
    with pytest.raises(InvariantViolation, match="are outside place 1"):
        places.address(HOST, offset, length)


def test_a_place_that_is_not_mapped_is_named() -> None:
    places = Places()
    for act in (
        lambda: places.view(7),
        lambda: places.unmap(7),
        lambda: places.size(7),
        lambda: places.address(7, 0, 0),
    ):
        with pytest.raises(NotFound, match="no place 7 is mapped"):
            act()


def test_a_file_shorter_than_it_is_said_to_be_is_refused_and_closed() -> None:
    places, before = Places(), open_fds()
    with pytest.raises(InvariantViolation, match="place 1 is said to have 8192 bytes, its file has 4096"):
        places.map(Map(HOST, 2 * PAGE), memfd(PAGE))
    with pytest.raises(InvariantViolation):
        places.map(Map(HOST, 0), memfd(PAGE))
    assert HOST not in places
    assert open_fds() == before


def test_what_may_lie_in_huge_pages_begins_at_a_multiple_of_their_size() -> None:
    places, size = Places(), 2 << 20
    for number in range(4):  # an odd page between them, so that chance does not align them
        places.map(Map(FIRST_SEGMENT + 2 * number, PAGE), memfd(PAGE))
        places.map(Map(FIRST_SEGMENT + 2 * number + 1, size, writable=number % 2 == 0), memfd(size, b"begin"))
        at = places.get(FIRST_SEGMENT + 2 * number + 1)
        assert at.address % size == 0
        assert ctypes.string_at(at.address, 5) == bytes(at.memory[:5]) == b"begin"


def test_memory_opened_for_reading_alone_is_not_mapped_for_writing() -> None:
    places, writable = Places(), memfd(PAGE)
    before = open_fds()
    with pytest.raises(BadRequest, match="opened for reading alone"):
        places.map(Map(HOST, PAGE, writable=True), os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC))
    assert HOST not in places and open_fds() == before
    os.close(writable)


def test_a_view_outlives_the_unmapping_of_its_place() -> None:
    places = Places()
    places.map(Map(FIRST_SEGMENT, PAGE, ring=True), memfd(PAGE, b"still here"))
    kept = places.view(FIRST_SEGMENT, 6, 4)
    before = mappings()
    places.unmap(FIRST_SEGMENT)
    assert FIRST_SEGMENT not in places
    assert places.own_ring is None
    assert bytes(kept) == b"here"
    assert mappings() == before
    del kept
    assert mappings() == before - 1


def test_a_place_mapped_anew_leaves_old_views_with_the_old_bytes() -> None:
    places = Places()
    places.map(Map(FIRST_SEGMENT, PAGE), memfd(PAGE, b"old"))
    old = places.view(FIRST_SEGMENT, 0, 3)
    places.map(Map(FIRST_SEGMENT, PAGE), memfd(PAGE, b"new"))
    assert (bytes(old), bytes(places.view(FIRST_SEGMENT, 0, 3))) == (b"old", b"new")


def test_a_thousand_segments_hold_no_descriptor_and_leave_no_mapping() -> None:
    places, fds, maps = Places(), open_fds(), mappings()
    for number in range(1000):
        places.map(Map(FIRST_SEGMENT + number, 2 * PAGE, writable=number % 2 == 0), memfd(2 * PAGE))
    assert open_fds() == fds
    assert mappings() >= maps + 500  # the kernel may join neighbours
    for number in range(1000):
        places.unmap(FIRST_SEGMENT + number)
    assert mappings() <= maps + 2  # those of the allocator
    assert open_fds() == fds


WRITE = """
import ctypes, os, sys
from hexrt.devices.places import Places
from hexrt.protocol.host import HOST, Map
places, fd = Places(), int(sys.argv[1])
places.map(Map(HOST, 4096, writable=True, ring=True), os.dup(fd))
places.view(HOST, 0, 5)[:] = b"right"
read = places.read(HOST, 0, 5)
assert bytes(read) == b"right" and read.readonly
import numpy
ctypes.memset(numpy.frombuffer(read, numpy.uint8).ctypes.data, 0x78, 5)
"""


def test_a_write_through_what_a_writable_place_gives_to_read_ends_the_process() -> None:
    fd = memfd(PAGE)
    done = subprocess.run([sys.executable, "-c", WRITE, str(fd)], pass_fds=(fd,), capture_output=True, timeout=30)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert os.pread(fd, 5, 0) == b"right"
    os.close(fd)


def test_what_is_read_of_a_writable_place_goes_with_its_last_view() -> None:
    places, before = Places(), mappings()
    places.map(Map(FIRST_SEGMENT, PAGE, writable=True), memfd(PAGE, b"still here"))
    kept = places.read(FIRST_SEGMENT, 6)
    with pytest.raises(InvariantViolation, match="are outside place 16"):
        places.read(FIRST_SEGMENT, 1, PAGE)
    places.unmap(FIRST_SEGMENT)
    assert bytes(kept[:4]) == b"here" and mappings() == before + 1
    del kept
    assert mappings() <= before


def test_memory_of_its_own_is_zero_and_taken_only_where_it_is_touched() -> None:
    memory = anonymous(1 << 40)  # more than any machine that runs this has
    places = Places()
    places.add(DEVICE, memory)
    before = resident_bytes()
    places.view(DEVICE, (1 << 40) - 3)[:] = b"end"
    assert bytes(places.view(DEVICE, (1 << 40) - 4, 4)) == b"\0end"
    assert resident_bytes() - before < 16 << 20
    with pytest.raises(OutOfMemory):
        anonymous(1 << 60)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
