"""Runs one program at a time in a bubblewrap sandbox: `Box` says how, `run` does it.

Owns the bwrap process and every process below it: when `run` returns or raises, none of them is left. The sandbox has namespaces of
its own (no network but an empty loopback), a read-only system with just the interpreter and its libraries, private tmpfs of bounded
size for /box and /tmp, an empty /proc, no devices but null, zero, full and random, no capabilities, a system-call filter and rlimits.
What rlimits cannot add up over forks (memory, files) is summed by `_sandbox_watch`. It does not hide timing or CPU load.

As root the program gets a uid of its own, which no user has; as a plain user a user namespace takes its place.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_WRITE, fcntl
from pathlib import Path
from typing import Any

import hexrt.ops._sandbox_inside as inside
from hexrt.errors import Unavailable
from hexrt.ops._sandbox_watch import MIB, PRIVATE, Limits, Outcome, Watch
from hexrt.ops._seccomp import build

SHM_BYTES = 16 * MIB
UNUSED_UIDS = 1_900_000_000  # that no distribution and no container manager hands out
SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
TOP = ("/bin", "/lib", "/lib32", "/lib64")
DEVICES = ("null", "zero", "full", "random", "urandom")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/box", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "USER": "sandbox", "LOGNAME": "sandbox",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    code: bytes
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    arguments: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Box:
    """A way to set up the sandbox on this machine."""

    bwrap: str
    python: str  # the interpreter itself, no link
    prefix: str  # of the interpreter
    uid: int  # 0: a user namespace; else the uid that root gives the program
    lock_userns: bool
    site_dir: str = ""  # a folder of packages, read-only, that programs may import from
    read_only: tuple[str, ...] = ()


def own_uid() -> int:
    """For root: a uid for this process's programs, so that the count of their processes is theirs alone. 0 for a plain user."""
    if os.geteuid() != 0:
        return 0
    uid = UNUSED_UIDS + os.getpid()
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= uid < first + count:
            return uid
    return 65534  # inside a container with few uids


def plan(bwrap: str, lock_userns: bool, site_dir: str = "", read_only: tuple[str, ...] = ()) -> Box:
    python = os.path.realpath(sys.executable)
    return Box(bwrap, python, os.path.realpath(sys.base_prefix), own_uid(), lock_userns, site_dir, read_only)


def visible(box: Box) -> Iterator[str]:
    """What of the machine's files is there, all read-only: of a home that holds the interpreter, only that."""
    libraries = (f"{box.prefix}/lib", f"{box.prefix}/lib64") if box.prefix != "/usr" else ()
    yield from filter(os.path.exists, (*SYSTEM, *libraries, *box.read_only, *filter(None, [box.site_dir])))
    if not box.python.startswith("/usr/bin/"):
        yield box.python


def _binds(box: Box) -> Iterator[str]:
    for path in TOP:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    shown = list(visible(box))
    for folder in sorted({str(parent) for path in shown for parent in Path(path).parents} - {"/", *PRIVATE}):
        yield from ("--perms", "0755", "--dir", folder)  # bwrap's own would be closed to the program's uid
    for path in shown:
        yield from ("--ro-bind", path, path)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for path in (f"{box.prefix}/lib/{version}/site-packages", "/usr/lib/python3/dist-packages"):
        if os.path.isdir(path) and path not in (box.site_dir, *box.read_only):
            yield from ("--tmpfs", path, "--remount-ro", path)


def _command(box: Box, limits: Limits, seccomp_fd: int, info_fd: int) -> list[str]:
    spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if box.uid:  # root: just enough to become that uid, which drops it all
        rights = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        rights = ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
        rights += ["--disable-userns"] if box.lock_userns else []
    disk, shm = str(limits.disk_bytes), str(min(SHM_BYTES, limits.disk_bytes))
    devices = [word for name in DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")]
    return [
        box.bwrap, *spaces, *rights, "--hostname", "sandbox", "--new-session", "--die-with-parent", "--clearenv",
        *(word for path in PRIVATE for word in ("--perms", "1777", "--size", disk, "--tmpfs", path)),
        *_binds(box), "--tmpfs", "/proc", "--remount-ro", "/proc", "--tmpfs", "/dev", *devices,
        "--perms", "1777", "--size", shm, "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/",
        "--seccomp", str(seccomp_fd), "--info-fd", str(info_fd), "--",
    ]  # fmt: skip


def rlimits(box: Box, limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_CPU": math.ceil(limits.timeout_s) + 1,  # of one process; two threads use it up before the wall clock
        "RLIMIT_NPROC": limits.processes
        + (1 if box.uid else 2),  # with the supervisor, and bwrap's init if it has the same uid
        "RLIMIT_FSIZE": limits.disk_bytes,
        "RLIMIT_NOFILE": 128,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }


def _job_bytes(box: Box, job: Job, limits: Limits) -> bytes:
    environment = dict(ENVIRONMENT)
    if box.site_dir:
        environment["PYTHONPATH"] = box.site_dir
    files = {"program.py": job.code, **job.files}
    header: dict[str, Any] = {
        "uid": box.uid,
        "limits": rlimits(box, limits),
        "files": [(name, len(content)) for name, content in files.items()],
        "argv": [box.python, "-s", "-S", "-B", "-X", "utf8", f"{inside.WORK}/program.py", *job.arguments],
        "env": environment,
        "max_files": limits.result_files,
        "max_bytes": limits.result_bytes,
    }
    head = json.dumps(header).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *files.values()])


def _sealed(name: str, content: bytes) -> int:
    """A memfd that holds `content`, at its start, and can no longer be changed."""
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)
    return fd


def run(box: Box, job: Job, limits: Limits) -> Outcome:
    """Runs the job to its end. Raises Unavailable where the sandbox cannot be started; a program's own failure is in the outcome."""
    with contextlib.ExitStack() as stack:

        def keep(fd: int) -> int:
            stack.callback(os.close, fd)
            return fd

        seccomp = keep(_sealed("filter", build(platform.machine())))
        job_fd = keep(_sealed("job", _job_bytes(box, job, limits)))
        stdin = keep(_sealed("stdin", job.stdin))
        (info_r, info_w), (result_r, result_w) = os.pipe(), os.pipe()
        keep(info_r)
        keep(result_r)
        source = Path(inside.__file__).read_text()
        command = [
            *_command(box, limits, seccomp, info_w),
            *(box.python, "-I", "-S", "-B", "-X", "utf8", "-c", source, str(job_fd), str(result_w)),
        ]
        try:
            process = subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}, cwd="/",
                pass_fds=(seccomp, job_fd, info_w, result_w),
            )  # fmt: skip
        except OSError as error:
            raise Unavailable(f"bubblewrap cannot be started: {error.strerror}") from error
        finally:
            os.close(info_w)
            os.close(result_w)
        stack.enter_context(process)
        watch = Watch(process, result_r, limits)
        try:
            watch.began(info_r)
            watch.follow()
        finally:
            watch.end()
        return watch.settle()
