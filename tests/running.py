"""A real `hexrtd` for tests: its own socket and state, stopped or killed at the end, with nothing left behind."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from hexrt.client import Client
from hexrt.workflow.build import WorkflowBuilder

ROOT = Path(__file__).resolve().parent.parent
CONFIG = """
[cpu]
enabled = false
[npu]
enabled = false
[pool]
workers = 2
[daemon]
drain_s = 5
[ops."map.python"]
modules = ["tests.hostile"]
"""


def settled(client: Client) -> dict[str, float]:
    """The counters once every chunk has come back that names a sequence that has ended: pages are given back a little after an answer.

    Chunks come back in order, and none after its own names a step of one token.
    """
    w = WorkflowBuilder()
    w.step("llm.generate", inputs={"prompt": "Say yes."}, params={"max_tokens": 1})
    client.run(w.build()).check()
    found: dict[str, float] = client.statistics()
    assert not [name for name, value in found.items() if name.endswith("_leaving") and value], found
    return found


class Running:
    """`with Running(tmp_path) as daemon: daemon.client()`. The state directory lasts over `kill` and `start`."""

    def __init__(self, directory: Path, config: str = CONFIG, name: str = "d") -> None:
        self.directory = directory
        self.socket = directory / f"{name}.sock"
        self.state = directory / f"{name}.state"
        self.config = directory / f"{name}.toml"
        self.config.write_text(config)
        self.log = directory / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Running:
        notify = self.directory / "notify"
        environ = {k: v for k, v in os.environ.items() if not k.startswith("HEXRT_")}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, open(self.log, "ab") as log:
            notify.unlink(missing_ok=True)
            ready.bind(str(notify))
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hexrt.daemon", "--config", str(self.config), "--socket", str(self.socket), "--state-dir", str(self.state)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=environ | {"NOTIFY_SOCKET": str(notify), "HEXRT_DAEMON_CHECK_INTEGRITY": "true"}, start_new_session=True,
            )  # fmt: skip
            ended = os.pidfd_open(self.process.pid)
            try:
                readable, _, _ = select.select([ready.fileno(), ended], [], [], 30)
                assert ready.fileno() in readable, f"hexrtd did not start:\n{self.log.read_text()}"
            finally:
                os.close(ended)
        return self

    def client(self) -> Client:
        return Client(self.socket)

    def hosts(self) -> list[int]:
        """Pids of the device hosts."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children]

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def __enter__(self) -> Running:
        return self if self.process is not None and self.process.poll() is None else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:  # fmt: skip
        if self.process is not None and self.process.poll() is None:
            self.stop()
        if kind is None:
            log = self.log.read_text(errors="replace")
            assert "check_integrity" not in log, f"hexrtd counted over, and found a difference:\n{log[-10_000:]}"


def is_alive(pid: int) -> bool:
    """False for a zombie too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pids: list[int], timeout_s: float = 10.0) -> None:
    """Returns when none of the processes is alive; fails naming those that stay."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([fd], [], [], timeout_s)
        finally:
            os.close(fd)
    assert not [pid for pid in pids if is_alive(pid)]
