"""What runs first inside the sandbox: unpacks the job, gives up its rights, runs the program, hands back its result files.

Run as `python -c SOURCE JOB_FD RESULT_FD`, with the standard library alone. It trusts nothing that the program left: it does all its
work under the program's own uid, follows no link, and the other side checks whatever it says. The program may kill or stop it; that
ends the program, by the namespace or by the wall clock.

Both ways one message: a little-endian u64, that many bytes of JSON, then the files' bytes one after the other. The answer
begins with HELLO, which says that the sandbox stands.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import stat
import sys
import time
from typing import Any

WORK = "/box"
OUT = "/box/out"
DEPTH = 16
NICE = 10  # a program may use idle processors, and yields busy ones to the daemon and the models
HELLO = b"+"


def read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError("the job is cut short")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def drop_rights(uid: int) -> None:
    """Becomes `uid`, for good, where that is not done by a user namespace. Leaving uid 0 clears all capabilities."""
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def unpack(fd: int, files: list[tuple[str, int]]) -> None:
    os.makedirs(OUT, exist_ok=True)
    for name, size in files:
        path = os.path.join(WORK, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as target:
            target.write(read_exactly(fd, size))


def start(job: dict[str, Any]) -> int:
    """Forks and runs the program under its limits; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.closerange(3, 1 << 20)
        os.nice(NICE)
        for name, value in job["limits"].items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        os.execve(job["argv"][0], job["argv"], job["env"])
    except (OSError, ValueError) as error:
        os.write(2, f"the program cannot be started: {error}\n".encode())
    finally:
        os._exit(127)


def wait(pid: int, result_fd: int) -> int:
    """The program's wait status. Kills everything once nobody is left to take the result."""
    program = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(program, select.POLLIN)
    poll.register(result_fd, 0)
    while True:
        for fd, _ in poll.poll():
            if fd == result_fd:
                os.kill(-1, signal.SIGKILL)
                os._exit(1)
            return os.waitpid(pid, 0)[1]


def end_the_rest() -> None:
    """Kills and reaps whatever the program left running in this process id namespace, but for its init and this process."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def collect(max_files: int, max_bytes: int) -> tuple[list[tuple[str, bytes]], list[str]]:
    """The regular files under OUT, links not followed, and a line for each thing left out."""
    found: list[tuple[str, bytes]] = []
    left_out: list[str] = []
    total = 0

    def leave(path: str, why: str) -> None:
        if len(left_out) < 20:
            left_out.append(f"{ascii(os.path.relpath(path, OUT))[1:-1][:200]}: {why}")

    def walk(folder: str, depth: int) -> None:
        nonlocal total
        try:
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            leave(folder, f"cannot be listed ({error.strerror})")
            return
        for entry in entries:
            path = entry.path
            if not entry.name.isprintable() or entry.name.encode("utf-8", "replace") != os.fsencode(entry.name):
                leave(path, "its name is not printable text")
            elif entry.is_dir(follow_symlinks=False):
                if depth == DEPTH:
                    leave(path, "too deep")
                else:
                    walk(path, depth + 1)
            elif not entry.is_file(follow_symlinks=False):
                leave(path, "not a plain file")
            elif len(found) == max_files:
                leave(path, f"more than {max_files} files")
                return
            else:
                content = read_plain(path, max_bytes - total)
                if isinstance(content, str):
                    leave(path, content)
                else:
                    total += len(content)
                    found.append((os.path.relpath(path, OUT), content))

    if os.path.islink(OUT):
        leave(OUT, "not a folder")
    else:
        walk(OUT, 1)
    return found, left_out


def read_plain(path: str, room: int) -> bytes | str:
    """The bytes of a plain file of at most `room` bytes, or why not."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            return "not a plain file"
        if state.st_size > room:
            return f"{state.st_size} bytes, more than what is left of the cap"
        return read_exactly(fd, state.st_size)
    finally:
        os.close(fd)


def send(fd: int, header: dict[str, Any], contents: list[bytes]) -> None:
    head = json.dumps(header).encode()
    data = memoryview(b"".join([len(head).to_bytes(8, "little"), head, *contents]))
    while data:
        data = data[os.write(fd, data) :]


def main(job_fd: int, result_fd: int) -> None:
    os.write(result_fd, HELLO)
    job = json.loads(read_exactly(job_fd, int.from_bytes(read_exactly(job_fd, 8), "little")))
    drop_rights(job["uid"])
    os.umask(0o077)
    try:
        unpack(job_fd, job["files"])
    except (OSError, EOFError) as error:
        send(result_fd, {"error": f"the files do not fit into the sandbox: {error}"}, [])
        return
    os.chdir(WORK)
    begun = time.monotonic()
    status = wait(start(job), result_fd)
    seconds = time.monotonic() - begun
    end_the_rest()
    files, left_out = collect(job["max_files"], job["max_bytes"])
    header = {
        "status": status, "seconds": seconds, "files": [(name, len(content)) for name, content in files],
        "left_out": left_out,
    }  # fmt: skip
    send(result_fd, header, [content for _, content in files])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
