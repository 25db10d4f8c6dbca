"""Finds out whether the sandbox can be set up here, and proves that it holds, before the first program of a process is run.

Owns the finding of bubblewrap and the reading of its complaints. Fails closed: nothing is run that the test has not passed for. The
result is kept for the life of the process; a failure is not, so that what an administrator mends counts at the next step.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import uuid
from pathlib import Path

import hexrt.ops._sandbox_probe as probe
from hexrt.errors import Unavailable
from hexrt.ops._sandbox import ENVIRONMENT, TOP, Box, Job, plan, rlimits, run, visible
from hexrt.ops._sandbox_watch import PRIVATE, Limits, Outcome

TEST_LIMITS = Limits(timeout_s=20.0)
HIDDEN = (
    "/etc/passwd",
    "/etc/shadow",
    "/home",
    "/run",
    "/var",
    "/sys",
    "/mnt",
    "/srv",
    "/boot",
    "/dev/tty",
    "/dev/ptmx",
)
HINTS = (
    (
        r"uid map|new namespace|user namespace|Creating new|Operation not permitted|Permission denied",
        "the kernel or the container refuses it the namespaces: allow unprivileged user namespaces (sysctl "
        "kernel.unprivileged_userns_clone=1 or user.max_user_namespaces, on Ubuntu an AppArmor profile for bwrap), or run "
        "hexrtd as root outside of a container",
    ),
    (r"Unknown option|unknown option", "it is too old: 0.7 or newer is needed"),
    (r"Can't find source path", "a folder that the config makes visible is not there"),
)


def find_bwrap(configured: str) -> str:
    """The path of bubblewrap. Raises Unavailable where it is missing or too old."""
    found = configured or shutil.which("bwrap", path=f"{os.environ.get('PATH', '')}:/usr/local/bin:/usr/bin:/bin")
    if not found or not os.access(found, os.X_OK):
        raise Unavailable(
            "no program is run without its sandbox, and bubblewrap (bwrap) is not installed: install the package bubblewrap"
        )
    told = subprocess.run([found, "--help"], capture_output=True, text=True, timeout=10, check=False, env={})
    if "--size" not in told.stdout + told.stderr:
        raise Unavailable(
            "no program is run without its sandbox, and this bubblewrap is too old: 0.7 or newer is needed"
        )
    return found


def explain(outcome: Outcome) -> str:
    """Why bwrap did not come up, in words, with its own but for paths."""
    text = outcome.stderr.decode("utf-8", "replace").strip()
    said = re.sub(
        r"(?<![\w/])/[^\s:'\"]+", "…", text.splitlines()[-1][:300] if text else f"exit code {outcome.exit_code}"
    )
    hint = next(
        (hint for pattern, hint in HINTS if re.search(pattern, text)), "see what `bwrap --unshare-all` says here"
    )
    return f"the sandbox cannot be set up ({said}); {hint}"


def _expected(box: Box, hidden: tuple[str, ...], port: int, abstract: str) -> str:
    tops = {path.split("/")[1] for path in (*visible(box), *PRIVATE, "/proc", "/dev", *filter(os.path.lexists, TOP))}
    shown = [f"{path}/" for path in (*visible(box), *PRIVATE)]
    return json.dumps({
        "uid": box.uid,
        "environment": [*ENVIRONMENT, "PYTHONPATH", "LC_CTYPE"],
        "top": sorted(tops),
        "hidden": [path for path in (*HIDDEN, *hidden) if path and not any(s.startswith(f"{path}/") for s in shown)],
        "read_only": ["/", "/dev", "/proc", *(path for path in visible(box) if os.path.isdir(path))],
        "port": port,
        "abstract": abstract,
        "limits": rlimits(box, TEST_LIMITS),
    })  # fmt: skip


def prove(box: Box, hidden: tuple[str, ...]) -> None:
    """Runs the test in `box`. Raises Unavailable, saying what does not hold, unless all of it does."""
    abstract = f"hexrt-probe-{uuid.uuid4().hex}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0{abstract}")
        local.listen(1)
        told = _expected(box, hidden, tcp.getsockname()[1], abstract)
        outcome = run(box, Job(Path(probe.__file__).read_bytes(), arguments=(told,)), TEST_LIMITS)
    if not outcome.started:
        raise Unavailable(explain(outcome))
    try:
        broken = json.loads(outcome.stdout) if outcome.complete and outcome.exit_code == 0 else None
    except ValueError:
        broken = None
    if broken is None:
        said = outcome.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"exit code {outcome.exit_code}"]
        raise Unavailable(f"the sandbox's own test did not run to its end, so no program is run: {said[0][:300]}")
    if broken:
        raise Unavailable(f"the sandbox does not hold here, so no program is run: {'; '.join(map(str, broken))[:1000]}")


@functools.cache
def ready(configured_bwrap: str, site_dir: str, read_only: tuple[str, ...], hidden: tuple[str, ...]) -> Box:
    """A sandbox that has passed its test in this process. Raises Unavailable, saying what to change, where there is none."""
    bwrap = find_bwrap(configured_bwrap)
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise Unavailable("the sandbox needs a kernel with CONFIG_PROC_CHILDREN, to add up a program's memory")
    box = plan(bwrap, True, site_dir, read_only)
    try:
        prove(box, hidden)
    except Unavailable:
        if box.uid:  # root has no user namespace to lock
            raise
        box = plan(bwrap, False, site_dir, read_only)  # the filter forbids new user namespaces all the same
        prove(box, hidden)
    return box
