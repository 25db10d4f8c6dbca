"""The memory that processes share: the HOST arena, sealed copies for clients, and the file of the NVME tier.

Owns nothing: each function returns a file descriptor (close-on-exec) or a view, which are the caller's. Everything is a memfd or a file
without a name, so that nothing is left in a folder whatever dies. Used by the daemon, the device hosts and the client alike; without
torch or NumPy. Promises nothing about who may touch which bytes when: that is the daemon's business.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hexrt.errors import BadRequest, OutOfMemory, Unavailable

ALIGN_BYTES = 4096  # of everything that O_DIRECT moves, in the file and in memory
HUGE_BYTES = 2 << 20
OFFSET_BYTES = 64  # between the buffers of a sealed copy: a cache line, and every dtype's alignment
KEEP_FREE_BYTES = 256 << 20  # of the page file's file system, which the store may share
MAX_BUFFERS = 512  # of one pwritev, which takes 1,024 parts
SEALS = {
    "SEAL": fcntl.F_SEAL_SEAL, "SHRINK": fcntl.F_SEAL_SHRINK, "GROW": fcntl.F_SEAL_GROW, "WRITE": fcntl.F_SEAL_WRITE,
}  # fmt: skip
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000


@dataclass(frozen=True, slots=True)
class ArenaFacts:
    """`pages`: "reserved" (2 MiB, set aside by the machine's operator), "transparent" (2 MiB, where the kernel has them) or "plain"."""

    bytes: int
    pages: str
    why: str


@dataclass(frozen=True, slots=True)
class FileFacts:
    bytes: int
    direct: bool
    why: str  # not direct; else empty


@dataclass(frozen=True, slots=True)
class Calls:
    """The system calls that may fail on a bad disk; tests put their own here."""

    open: Callable[[str, int, int], int] = os.open
    fallocate: Callable[[int, int, int], None] = os.posix_fallocate
    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, Sequence[memoryview], int], int] = os.pwritev


SYSTEM = Calls()


# --- the HOST arena ---------------------------------------------------------------------------------------------------


def create_host_arena(size: int, kernel: Path = Path("/sys/kernel/mm")) -> tuple[int, ArenaFacts]:
    """A memfd of `size` bytes whose size nobody can change; memory is taken as it is touched. Raises OutOfMemory.

    Its mode is 0400: who is handed `read_only(fd)` cannot open it again for writing, unless he is root or means to (the mode is its
    owner's to change).
    """
    why = ""
    if size % HUGE_BYTES == 0:
        free, reserved = (_number(kernel / "hugepages/hugepages-2048kB" / name) for name in ("free_hugepages", "resv_hugepages"))  # fmt: skip
        if size // HUGE_BYTES <= free - reserved:
            try:
                return _arena(size, os.MFD_HUGETLB | os.MFD_HUGE_2MB), ArenaFacts(size, "reserved", "")
            except OutOfMemory as error:  # somebody else was first
                why = f"; {error}"
        else:
            why = f"; {free - reserved} of {size // HUGE_BYTES} huge pages are reserved and free: raise vm.nr_hugepages"
    granted = _chosen(kernel / "transparent_hugepage/shmem_enabled")
    fd = _arena(size, 0)
    if granted in ("always", "within_size", "advise", "force"):
        return fd, ArenaFacts(size, "transparent", f"shmem_enabled is {granted}{why}")
    return fd, ArenaFacts(size, "plain", f"transparent_hugepage/shmem_enabled is {granted or 'not there'}{why}")


def _arena(size: int, flags: int) -> int:
    try:
        fd = os.memfd_create("hexrt-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    except OSError as error:
        raise OutOfMemory(f"no memory to share: {error.strerror}") from error
    try:
        os.ftruncate(fd, size)
        os.fchmod(fd, 0o400)
        if flags:
            mmap.mmap(fd, size).close()  # the first mapping sets the huge pages aside for this file, for good
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS["SHRINK"] | SEALS["GROW"] | SEALS["SEAL"])
    except (OSError, ValueError, OverflowError) as error:
        os.close(fd)
        raise OutOfMemory(f"an arena of {size} bytes is not to be had: {error}") from error
    return fd


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _chosen(path: Path) -> str:
    """The bracketed word of a kernel setting; empty where the kernel has none."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def read_only(fd: int) -> int:
    """The same memory, opened again for reading alone. Raises Unavailable where there is no /proc, the only way to open a memfd again.

    The caller then hands out copies (`sealed_copy`), never the writable descriptor.
    """
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"memory cannot be shared for reading alone: /proc/self/fd: {error.strerror}; mount /proc") from error  # fmt: skip


def map_fd(fd: int, size: int, writable: bool) -> memoryview:
    """The first `size` bytes of a file as one view, read-only unless `writable`; unmapped when the last view is gone.

    The descriptor may be closed at once. Raises BadRequest where the file is shorter or was opened for less, OutOfMemory.
    """
    return map_at(fd, size, writable)[0]


def map_at(fd: int, size: int, writable: bool) -> tuple[memoryview, int]:
    """As `map_fd`, and the address of the first byte, which is good as long as a view is left.

    Python's own mapping would keep a duplicate of the descriptor open. So an empty area is taken, which Python owns, and the file is mapped
    over it; from 2 MiB on at a multiple of that, which huge pages need.
    """
    held = os.fstat(fd).st_size
    if not 0 < size <= held:
        raise BadRequest(f"{size} bytes are to be mapped of a file of {held}")
    room = size + HUGE_BYTES if size >= HUGE_BYTES else size
    try:
        area = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except (OSError, ValueError, OverflowError) as error:
        raise OutOfMemory(f"{size} bytes cannot be mapped: {error}") from error
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    skip = -start % HUGE_BYTES if room > size else 0
    _map_over(start + skip, fd, size, writable)
    if size >= HUGE_BYTES:
        try:
            area.madvise(mmap.MADV_HUGEPAGE, skip, size)
        except OSError:  # a kernel without them, or a file that has none
            pass
    view = memoryview(area)[skip : skip + size]
    return (view if writable else view.toreadonly()), start + skip


def _map_over(address: int, fd: int, size: int, writable: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    mapped = libc.mmap(address, size, protection, mmap.MAP_SHARED | MAP_FIXED, fd, 0)
    if mapped != address and ctypes.get_errno() == errno.EPERM and not writable:
        # Linux before 6.7 takes any shared mapping for one that might be written, and refuses it of a sealed memfd.
        mapped = libc.mmap(address, size, protection, mmap.MAP_PRIVATE | MAP_FIXED, fd, 0)
    if mapped != address:
        if ctypes.get_errno() == errno.EACCES:
            raise BadRequest("a file that was opened for reading alone cannot be mapped for writing")
        raise OutOfMemory(f"{size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")


# --- memory of a client's, and for a client ---------------------------------------------------------------------------


def sealed_copy(buffers: Sequence[memoryview]) -> tuple[int, tuple[int, ...]]:
    """A memfd that holds the buffers one after the other, and the offset of each, a multiple of 64. Nobody can change it any more.

    Written without a mapping, whose page faults cost more than the copy. Raises OutOfMemory.
    """
    parts: list[memoryview] = []
    offsets: list[int] = []
    end = 0
    zeros = memoryview(bytes(OFFSET_BYTES))
    for buffer in buffers:
        if end % OFFSET_BYTES:
            parts.append(zeros[: -end % OFFSET_BYTES])
            end += -end % OFFSET_BYTES
        offsets.append(end)
        if buffer.nbytes:
            parts.append(buffer.cast("B") if buffer.ndim != 1 or buffer.itemsize != 1 else buffer)
            end += buffer.nbytes
    fd = os.memfd_create("hexrt-copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, max(end, 1))  # nothing can be mapped of an empty file
        position = 0
        while parts:
            written = os.pwritev(fd, parts[:MAX_BUFFERS], position)
            position += written
            parts = remainder(parts, written)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sum(SEALS.values()))
    except OSError as error:
        os.close(fd)
        raise OutOfMemory(f"{end} bytes of shared memory are not to be had: {error.strerror}") from error
    return fd, tuple(offsets)


def remainder(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What of `views` lies behind their first `done` bytes."""
    left = []
    for view in views:
        if done >= len(view):
            done -= len(view)
        else:
            left.append(view[done:] if done else view)
            done = 0
    return left


def check_sealed(fd: int, least_bytes: int) -> int:
    """The size of a memfd that neither its sender nor anybody else can change any more; raises BadRequest for any other file.

    Asks for the seals first: only memory has them, and so no strange file system is asked anything that might wait.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise BadRequest("memory that is passed must be a memfd with the seals SHRINK, GROW and WRITE; this is another file") from error  # fmt: skip
    if missing := [name for name in ("SHRINK", "GROW", "WRITE") if not seals & SEALS[name]]:
        raise BadRequest(f"memory that is passed must have the seals SHRINK, GROW and WRITE; missing: {', '.join(missing)}")  # fmt: skip
    size = os.fstat(fd).st_size
    if size < least_bytes:
        raise BadRequest(f"memory that is passed has {size} bytes where {least_bytes} are named")
    return size


# --- the file of the NVME tier ----------------------------------------------------------------------------------------


def open_page_file(path: str, size: int, calls: Calls = SYSTEM) -> tuple[int, FileFacts]:
    """A file of `size` bytes, all of them set aside, without a name in the folder of `path` (in `path` itself where that is a folder).

    Nothing of an earlier life can be read from it, and it goes with its last descriptor. Raises OutOfMemory where the file system has not
    the room, Unavailable where there can be no file; no file is left then.
    """
    if size < ALIGN_BYTES or size % ALIGN_BYTES:
        raise BadRequest(f"a page file of {size} bytes: it must be a multiple of {ALIGN_BYTES}", "memory.nvme_mib")
    fd = -1
    try:
        fd = _unnamed(path, calls)
        room = os.fstatvfs(fd)
        free = room.f_bavail * room.f_frsize
        if free < size + KEEP_FREE_BYTES:
            raise _no_room(size, free)
        calls.fallocate(fd, 0, size)
        why = _go_direct(fd, calls)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _no_room(size, 0) from error
        raise Unavailable(f"no page file: {error.strerror}; name a folder that can be written", "memory.nvme_path") from error  # fmt: skip
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return fd, FileFacts(size, not why, why)


def _no_room(size: int, free: int) -> OutOfMemory:
    room = f"{free >> 20} MiB are free, {KEEP_FREE_BYTES >> 20} of which are left alone" if free else "it is full, or a quota ends there"  # fmt: skip
    return OutOfMemory(f"no room for a page file of {size >> 20} MiB: {room}; lower memory.nvme_mib, or name another place in memory.nvme_path")  # fmt: skip


def _unnamed(path: str, calls: Calls) -> int:
    folder, name = (path, "pages") if os.path.isdir(path) else os.path.split(path)
    os.makedirs(folder or ".", mode=0o700, exist_ok=True)
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return calls.open(folder or ".", flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    # A file system that gives no unnamed file: the name lives for a moment, and a death in that moment leaves an empty file.
    prefix = f".{name}.hexrt-"
    for entry in os.listdir(folder or "."):
        full = os.path.join(folder, entry)
        if entry.startswith(prefix) and stat.S_ISREG((found := os.lstat(full)).st_mode) and not found.st_size:
            os.unlink(full)
    full = os.path.join(folder, prefix + secrets.token_hex(8))
    fd = calls.open(full, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    os.unlink(full)
    return fd


def _go_direct(fd: int, calls: Calls) -> str:
    """Switches the file to O_DIRECT and tries it; says why not where it stays buffered.

    After fallocate, whose emulation on old file systems writes single bytes.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    block = memoryview(mmap.mmap(-1, ALIGN_BYTES))
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        if calls.pwritev(fd, [block], 0) == ALIGN_BYTES and calls.preadv(fd, [block], 0) == ALIGN_BYTES:
            return ""
        raise OSError(errno.EINVAL, "a block was moved in part")
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return f"the file system does not move blocks of {ALIGN_BYTES} bytes past its cache"
