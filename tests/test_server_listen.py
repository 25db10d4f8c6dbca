"""The listening socket: locks, modes, what a dead daemon left, and sockets handed over."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hexrt.errors import BadRequest, Unavailable
from hexrt.protocol import messages as m
from hexrt.server.listen import bind, from_fd, inherited
from hexrt.server.server import Server
from tests.memory_backend import MemoryBackend
from tests.serving import connected, limits, on_uvloop, serving


@on_uvloop
async def test_a_second_daemon_on_the_path_is_refused_and_the_first_serves_on(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here:
        with pytest.raises(Unavailable, match=rf"pid {os.getpid()}.*--socket"):
            bind(here.path)
        async with connected(here.path) as client:
            assert isinstance(await client.ask(m.Statistics(1)), m.StatisticsReport)


@on_uvloop
async def test_two_daemons_with_different_paths_live_side_by_side(tmp_path: Path) -> None:
    async with serving(tmp_path / "s"), serving(tmp_path / "t") as other, connected(other.path) as client:
        assert isinstance(await client.ask(m.Statistics(1)), m.StatisticsReport)


def test_the_path_can_be_taken_again_after_a_close_and_nothing_is_left_between(tmp_path: Path) -> None:
    for _ in range(3):
        listener = bind(tmp_path / "s")
        assert sorted(os.listdir(tmp_path)) == ["s", "s.lock"]
        listener.close()
        listener.close()
        assert os.listdir(tmp_path) == []


def test_the_mode_is_0660_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        listener = bind(tmp_path / "new" / "s")
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(tmp_path / "new" / "s").st_mode) == 0o660
    assert stat.S_IMODE(os.stat(tmp_path / "new").st_mode) == 0o700
    listener.close()


BIND_AND_DIE = """
import os, signal, sys; from pathlib import Path; from hexrt.server.listen import bind
kept = bind(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_daemon_left_is_cleared_away(tmp_path: Path) -> None:
    path = tmp_path / "s"
    killed = subprocess.run([sys.executable, "-c", BIND_AND_DIE, str(path)], check=False, timeout=60)
    assert killed.returncode == -9 and path.exists()
    bind(path).close()
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(BadRequest, match="no socket"):
        bind(tmp_path / "s")
    assert (tmp_path / "s").read_text() == "precious" and os.listdir(tmp_path) == ["s"]


def test_a_socket_that_another_program_listens_on_is_left_alone(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()
        with pytest.raises(Unavailable, match="another program"):
            bind(tmp_path / "s")
        assert os.listdir(tmp_path) == ["s"]


def test_a_lock_that_is_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "s.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(Unavailable, match="choose another --socket"):
        bind(tmp_path / "s")
    assert not (tmp_path / "victim").exists()


def test_a_path_that_is_too_long_or_whose_folder_is_missing_is_refused_clearly(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="107"):
        bind(tmp_path / ("x" * 120))
    with pytest.raises(Unavailable, match="No such file"):
        bind(tmp_path / "no" / "such" / "s")


def test_a_socket_that_was_replaced_by_somebody_is_not_removed_at_the_end(tmp_path: Path) -> None:
    listener = bind(tmp_path / "s")
    os.unlink(tmp_path / "s")
    (tmp_path / "s").write_text("theirs")
    listener.close()
    assert os.listdir(tmp_path) == ["s"]


@on_uvloop
async def test_a_socket_handed_over_is_served_without_lock_and_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "given"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        server = Server(MemoryBackend(), limits())
        server.start(from_fd(os.dup(sock.fileno())))
        async with connected(path) as client:
            assert isinstance(await client.ask(m.Statistics(1)), m.StatisticsReport)
        await server.close()
        assert os.listdir(tmp_path) == ["given"]


def test_what_is_handed_over_must_be_one_listening_unix_socket() -> None:
    assert inherited({}) is None and inherited({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) is None
    with pytest.raises(BadRequest, match="one socket"):
        inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"})
    with open("/dev/null") as file, pytest.raises(BadRequest, match="no socket"):
        from_fd(file.fileno())
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(BadRequest, match="not a listening"):
        from_fd(os.dup(sock.fileno()))
