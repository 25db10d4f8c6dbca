"""Where a client looks for the daemon when nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest

from hexrt import paths
from hexrt.paths import SOCKET_NAME, client_socket


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    socket = tmp_path / "system" / SOCKET_NAME
    socket.parent.mkdir()
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", socket)
    return socket


def test_the_systems_daemon_is_taken_where_the_user_runs_none(system: Path, tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    own = tmp_path / "hexrt" / SOCKET_NAME
    assert client_socket(environ) == own
    system.touch()
    assert client_socket(environ) == system
    own.parent.mkdir()
    own.touch()
    assert client_socket(environ) == own
    assert client_socket(environ | {"HEXRT_SOCKET": "/named"}) == Path("/named")


def test_a_system_socket_that_cannot_be_looked_at_counts_as_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", tmp_path / ("x" * 300) / SOCKET_NAME)
    assert client_socket({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "hexrt" / SOCKET_NAME
