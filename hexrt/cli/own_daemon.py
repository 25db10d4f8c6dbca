"""A `hexrtd` for one command (the demo, a measurement): its process, its socket and state in a temporary directory, its configuration.

Owns the process and the directory from `__enter__` to `__exit__`; whatever ends the command, nothing of either is left. Started from the
main thread only: the kernel ends the daemon when the thread that started it is gone.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hexrt.errors import Disconnected

START_S = 30.0
STOP_S = 20.0
PR_SET_PDEATHSIG = 1


def toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """TOML of tables of strings, numbers, booleans and lists of these; table names may be dotted and are written as given."""
    lines: list[str] = []
    for name, values in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class OwnDaemon:
    """`with OwnDaemon(tables) as daemon: daemon.socket`. Raises Disconnected, with its last words, where it does not start."""

    def __init__(self, tables: Mapping[str, Mapping[str, object]], log: Path | None = None) -> None:
        """`log` names a file that stays; without it the log goes with the directory."""
        self._tables = tables
        self._kept_log = log

    def __enter__(self) -> OwnDaemon:
        self._directory = Path(tempfile.mkdtemp(prefix="hexrt-"))
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)  # what the daemon tells its service manager
        self.socket = self._directory / "hexrt.sock"
        try:
            self._start()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._stop()
        finally:
            self._clean_up()

    def _start(self) -> None:
        config = self._directory / "hexrt.toml"
        config.write_text(toml(self._tables))
        self._log = self._kept_log or self._directory / "log"
        environ = {k: v for k, v in os.environ.items() if not k.startswith("HEXRT_")}
        notify = self._directory / "notify"
        self._manager.bind(os.fspath(notify))
        temporary = self._directory / "tmp"
        temporary.mkdir()
        with open(self._log, "wb") as log:
            command = [sys.executable, "-m", "hexrt.daemon", "--config", str(config), "--socket", str(self.socket)]
            command += ["--state-dir", str(self._directory / "state")]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ | {"NOTIFY_SOCKET": str(notify), "TMPDIR": str(temporary)},
                process_group=0,  # Ctrl-C in the terminal is the command's, which then stops the daemon in order
                preexec_fn=_die_with_parent,
            )
            self._wait_ready()

    def _wait_ready(self) -> None:
        """Waits for the daemon's READY=1, or for its end, whichever is first."""
        ready, ended = self._manager, os.pidfd_open(self._process.pid)
        try:
            while True:
                readable, _, _ = select.select([ready.fileno(), ended], [], [], START_S)
                if ready.fileno() in readable:
                    if b"READY=1" in ready.recv(4096):
                        return
                elif readable:
                    raise Disconnected(f"hexrtd ended at its start: {self.last_words()}")
                else:
                    raise Disconnected(f"hexrtd was not ready after {START_S:g} s: {self.last_words()}")
        except BaseException:
            self._stop()
            raise
        finally:
            os.close(ended)

    def last_words(self) -> str:
        """The last line that the daemon wrote."""
        return next(reversed(self._log.read_text(errors="replace").splitlines()), "it wrote nothing")

    @property
    def pid(self) -> int:
        return self._process.pid

    def _stop(self) -> None:
        """Asks the daemon to end and waits; what has not ended in time is killed with its process group."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except BaseException as error:  # a second Ctrl-C ends the waiting too
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise

    def _clean_up(self) -> None:
        self._manager.close()
        shutil.rmtree(self._directory, ignore_errors=True)
