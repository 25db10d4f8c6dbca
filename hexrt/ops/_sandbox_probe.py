"""The sandbox's own test, run as a program inside it: tries what must fail and prints, as JSON, what did not.

Standard library only. Given one argument, JSON: the paths that must not be there, the top level that must be, where something
listens outside, and the limits.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
import sys
from collections.abc import Iterator
from typing import Any

CLONE_NEWUSER = 0x10000000
PR_GET_NO_NEW_PRIVS, PR_GET_SECCOMP = 39, 21


def seen(expected: dict[str, Any]) -> Iterator[str]:
    if os.getuid() == 0 or (expected["uid"] and os.getuid() != expected["uid"]):
        yield f"it runs as uid {os.getuid()}"
    if os.getpid() > 10:
        yield "it shares the machine's process ids"
    extra = set(os.environ) - set(expected["environment"])
    if extra:
        yield f"the environment holds {sorted(extra)}"
    top = set(os.listdir("/")) ^ set(expected["top"])
    if top:
        yield f"the top folder differs by {sorted(top)}"
    for path in expected["hidden"]:
        if os.path.lexists(path):
            yield f"{path} can be seen"
    if os.listdir("/proc"):
        yield "/proc is not empty"


def written(expected: dict[str, Any]) -> Iterator[str]:
    for folder in expected["read_only"]:
        try:
            with open(os.path.join(folder, "hexrt-probe"), "w"):
                yield f"{folder} can be written"
        except OSError:
            continue


def reached(expected: dict[str, Any]) -> Iterator[str]:
    for family, address in (
        (socket.AF_INET, ("127.0.0.1", expected["port"])),
        (socket.AF_UNIX, "\0" + expected["abstract"]),
    ):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(2)
            try:
                probe.connect(address)
                yield f"a {family.name} socket outside can be reached"
            except OSError:
                pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing: only asks for a route
        try:
            probe.connect(("192.0.2.1", 9))
            yield "there is a route to the network"
        except OSError:
            pass


def done(expected: dict[str, Any]) -> Iterator[str]:
    library = ctypes.CDLL(None)
    for name, arguments in (
        ("unshare", (CLONE_NEWUSER,)),
        ("setuid", (0,)),
        ("chroot", (b"/",)),
        ("ptrace", (0, 0, 0, 0)),
    ):
        if getattr(library, name)(*arguments) == 0:
            yield f"{name} is allowed"
    if library.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1 or library.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) != 2:
        yield "it can gain rights, or has no system-call filter"
    for name, value in expected["limits"].items():
        if resource.getrlimit(getattr(resource, name))[1] > value:
            yield f"{name} is {resource.getrlimit(getattr(resource, name))}, not {value}"
    try:
        child = os.fork()
    except OSError as error:
        yield f"it cannot start a process ({error.strerror})"
        return
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    print(json.dumps([*seen(told), *written(told), *reached(told), *done(told)]))
