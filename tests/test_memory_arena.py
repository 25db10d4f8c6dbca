"""The memory that processes share, and the page file: real memfds, real files, and each system call failing in turn."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from hexrt.errors import BadRequest, OutOfMemory, Unavailable
from hexrt.memory.arena import (
    ALIGN_BYTES,
    HUGE_BYTES,
    SEALS,
    SYSTEM,
    Calls,
    check_sealed,
    create_host_arena,
    map_fd,
    open_page_file,
    read_only,
    remainder,
    sealed_copy,
)

pytestmark = pytest.mark.timeout(60)
MIB = 1 << 20
F_ADD_SEALS = 1033


@pytest.fixture(autouse=True)
def descriptors_are_given_back() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def memfd(size: int, *seals: str) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, F_ADD_SEALS, sum(SEALS[name] for name in seals))
    return fd


class TestHostArena:
    def test_takes_memory_only_as_it_is_touched_and_says_which_pages_it_has(self) -> None:
        fd, facts = create_host_arena(64 * MIB)
        assert facts.bytes == os.fstat(fd).st_size == 64 * MIB
        assert facts.pages in ("reserved", "transparent", "plain") and (facts.why or facts.pages == "reserved")
        if facts.pages != "reserved":
            assert os.fstat(fd).st_blocks == 0
        os.close(fd)

    def test_nobody_can_change_its_size_or_seal_its_bytes(self) -> None:
        fd, _ = create_host_arena(4 * MIB)
        for size in (0, 8 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, F_ADD_SEALS, SEALS["WRITE"])
        os.close(fd)

    def test_a_reader_sees_what_a_writer_writes_and_cannot_write(self) -> None:
        fd, _ = create_host_arena(4 * MIB)
        reader = read_only(fd)
        ours, theirs = map_fd(fd, 4 * MIB, True), map_fd(reader, 4 * MIB, False)
        with pytest.raises(OSError):
            os.pwrite(reader, b"x", 0)
        os.close(fd)
        os.close(reader)
        ours[MIB : MIB + 5] = b"bytes"
        assert theirs.readonly and bytes(theirs[MIB : MIB + 5]) == b"bytes"
        with pytest.raises(TypeError):
            theirs[0] = 1

    def test_its_mode_lets_nobody_write_who_is_handed_a_reader(self) -> None:
        fd, _ = create_host_arena(MIB)
        assert os.fstat(fd).st_mode & 0o777 == 0o400
        os.close(fd)

    def test_a_machine_without_huge_pages_is_named_with_what_to_change(self, tmp_path: Path) -> None:
        fd, facts = create_host_arena(4 * MIB, tmp_path)
        assert facts.pages == "plain" and "shmem_enabled is not there" in facts.why and "vm.nr_hugepages" in facts.why
        os.close(fd)

    def test_huge_pages_that_are_promised_and_gone_leave_plain_ones(self, tmp_path: Path) -> None:
        pool = tmp_path / "hugepages/hugepages-2048kB"
        pool.mkdir(parents=True)
        (pool / "free_hugepages").write_text("1000000\n")
        (pool / "resv_hugepages").write_text("0\n")
        (tmp_path / "transparent_hugepage").mkdir()
        (tmp_path / "transparent_hugepage/shmem_enabled").write_text("always within_size [advise] never\n")
        fd, facts = create_host_arena(1_000_000 * HUGE_BYTES, tmp_path)
        assert facts.pages == "transparent" and "not to be had" in facts.why
        os.close(fd)

    def test_a_size_that_no_file_can_have_is_out_of_memory(self) -> None:
        with pytest.raises(OutOfMemory):
            create_host_arena(1 << 63)


class TestMapping:
    def test_begins_where_huge_pages_can_and_outlives_its_descriptor(self) -> None:
        fd = memfd(3 * MIB)
        view = map_fd(fd, 3 * MIB, True)
        os.close(fd)
        view[:] = bytes(3 * MIB)
        assert len(view) == 3 * MIB

    def test_no_byte_past_the_file_can_be_mapped(self) -> None:
        fd = memfd(ALIGN_BYTES)
        for size in (0, -1, ALIGN_BYTES + 1):
            with pytest.raises(BadRequest, match=r"of a file of 4096"):
                map_fd(fd, size, False)
        os.close(fd)

    def test_a_file_opened_for_reading_alone_is_not_mapped_for_writing(self) -> None:
        fd = memfd(ALIGN_BYTES)
        reader = read_only(fd)
        with pytest.raises(BadRequest, match="for reading alone"):
            map_fd(reader, ALIGN_BYTES, True)
        os.close(fd)
        os.close(reader)

    def test_a_descriptor_that_is_not_open_cannot_be_shared(self) -> None:
        with pytest.raises(Unavailable, match="/proc"):
            read_only(1 << 20)


class TestSealedCopy:
    def test_holds_each_buffer_at_a_multiple_of_64(self) -> None:
        buffers = [b"", b"a", bytes(range(64)), os.urandom(100_000), b"end"]
        fd, offsets = sealed_copy([memoryview(buffer) for buffer in buffers])
        assert offsets == (0, 0, 64, 128, 100_160) and not any(offset % 64 for offset in offsets)
        for buffer, offset in zip(buffers, offsets, strict=True):
            assert os.pread(fd, len(buffer), offset) == buffer
        assert check_sealed(fd, 100_163) == 100_163
        os.close(fd)

    def test_takes_more_buffers_than_one_write_does(self) -> None:
        buffers = [n.to_bytes(4, "little") for n in range(3_000)]
        fd, offsets = sealed_copy([memoryview(buffer) for buffer in buffers])
        assert all(os.pread(fd, 4, offset) == buffer for buffer, offset in zip(buffers, offsets, strict=True))
        os.close(fd)

    def test_takes_arrays_of_any_dtype_and_shape(self) -> None:
        array: Any = numpy.arange(24, dtype=numpy.float64).reshape(2, 3, 4)
        fd, _ = sealed_copy([memoryview(array)])
        assert os.pread(fd, array.nbytes, 0) == array.tobytes()
        os.close(fd)

    def test_of_nothing_is_a_memfd_that_can_be_mapped(self) -> None:
        fd, offsets = sealed_copy([])
        assert offsets == () and len(map_fd(fd, 1, False)) == 1
        os.close(fd)

    def test_nobody_can_change_it_in_any_way(self) -> None:
        fd, _ = sealed_copy([memoryview(b"bytes")])
        for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 1), lambda: mmap.mmap(fd, 5)):
            with pytest.raises(PermissionError):
                change()
        os.close(fd)


class TestCheckOfWhatAClientPasses:
    @pytest.mark.parametrize("missing", ["SHRINK", "GROW", "WRITE"])
    def test_each_missing_seal_is_named(self, missing: str) -> None:
        fd = memfd(100, *({"SHRINK", "GROW", "WRITE"} - {missing}))
        with pytest.raises(BadRequest, match=f"missing: {missing}$"):
            check_sealed(fd, 1)
        os.close(fd)

    def test_one_that_is_too_small_is_refused_and_never_read(self) -> None:
        fd = memfd(100, "SHRINK", "GROW", "WRITE")
        with pytest.raises(BadRequest, match="100 bytes where 101"):
            check_sealed(fd, 101)
        assert check_sealed(fd, 100) == 100
        os.close(fd)

    def test_other_files_are_refused_without_a_wait(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"x" * 100)
        os.mkfifo(tmp_path / "fifo")
        for open_it in (
            lambda: os.open(tmp_path / "file", os.O_RDONLY),
            lambda: os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK),
            lambda: os.open("/dev/zero", os.O_RDONLY),
            lambda: os.eventfd(0),
        ):
            fd = open_it()
            with pytest.raises(BadRequest, match="memfd with the seals"):
                check_sealed(fd, 1)
            os.close(fd)


def fail(number: int) -> Callable[..., Any]:
    def call(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


class TestPageFile:
    def test_is_whole_empty_nameless_and_goes_with_its_descriptor(self, tmp_path: Path) -> None:
        fd, facts = open_page_file(str(tmp_path / "made" / "pages"), 8 * MIB)
        found = os.fstat(fd)
        assert facts.bytes == found.st_size == 8 * MIB and found.st_blocks * 512 >= 8 * MIB and found.st_nlink == 0
        assert found.st_mode & 0o777 == 0o600 and not os.get_inheritable(fd)
        assert bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT) == facts.direct and bool(facts.why) != facts.direct
        assert os.listdir(tmp_path / "made") == []
        os.close(fd)

    def test_what_lies_at_its_path_is_neither_read_nor_touched(self, tmp_path: Path) -> None:
        old = tmp_path / "pages"
        old.write_bytes(b"secret" * 10_000)
        fd, _ = open_page_file(str(old), MIB)
        block = memoryview(mmap.mmap(-1, MIB))
        assert os.preadv(fd, [block], 0) == MIB and not any(block)
        assert old.read_bytes() == b"secret" * 10_000
        os.close(fd)

    def test_a_size_that_is_no_multiple_of_a_block_is_refused(self, tmp_path: Path) -> None:
        for size in (0, 1, 4095, 4097, -4096):
            with pytest.raises(BadRequest, match=r"memory\.nvme_mib"):
                open_page_file(str(tmp_path), size)

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_a_full_file_system_is_out_of_memory_and_says_what_to_change(self, tmp_path: Path, number: int) -> None:
        with pytest.raises(OutOfMemory, match=r"lower memory\.nvme_mib") as raised:
            open_page_file(str(tmp_path), MIB, replace(SYSTEM, fallocate=fail(number)))
        assert str(tmp_path) not in str(raised.value) and os.listdir(tmp_path) == []

    def test_a_file_larger_than_what_is_free_is_refused_before_it_takes_anything(self, tmp_path: Path) -> None:
        with pytest.raises(OutOfMemory, match=r"MiB are free, 256 of which are left alone"):
            open_page_file(str(tmp_path), 1 << 50)

    @pytest.mark.parametrize("call", ["open", "fallocate", "pwritev", "preadv"])
    @pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EROFS])
    def test_each_call_that_fails_makes_it_unavailable_and_leaves_nothing(
        self, tmp_path: Path, call: str, number: int
    ) -> None:
        with pytest.raises(Unavailable, match=r"memory\.nvme_path") as raised:
            open_page_file(str(tmp_path / "sub" / "pages"), MIB, replace(SYSTEM, **{call: fail(number)}))
        assert str(tmp_path) not in str(raised.value) and os.listdir(tmp_path / "sub") == []

    @pytest.mark.parametrize(
        "calls", [replace(SYSTEM, pwritev=fail(errno.EINVAL)), replace(SYSTEM, preadv=lambda *_: 512)]
    )
    def test_a_file_system_without_direct_io_gives_a_buffered_file_that_says_so(
        self, tmp_path: Path, calls: Calls
    ) -> None:
        fd, facts = open_page_file(str(tmp_path), MIB, calls)
        assert not facts.direct and "cache" in facts.why and not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        os.close(fd)

    def test_a_file_system_without_unnamed_files_keeps_no_name_either(self, tmp_path: Path) -> None:
        (tmp_path / ".pages.hexrt-0123").touch()  # of a host that died between two calls
        (tmp_path / ".pages.hexrt-4567").write_bytes(b"somebody's")

        def named_only(path: str, flags: int, mode: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no")
            return os.open(path, flags, mode)

        fd, _ = open_page_file(str(tmp_path / "pages"), MIB, replace(SYSTEM, open=named_only))
        assert os.fstat(fd).st_nlink == 0 and os.listdir(tmp_path) == [".pages.hexrt-4567"]
        os.close(fd)

    def test_a_path_under_a_file_is_unavailable(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(Unavailable):
            open_page_file(str(tmp_path / "file" / "pages"), MIB)


def test_the_remainder_begins_where_the_bytes_that_are_done_end() -> None:
    views = [memoryview(b"abc"), memoryview(b"de"), memoryview(b"f")]
    assert [b"".join(remainder(views, done)) for done in range(7)] == [b"abcdef"[done:] for done in range(7)]
