"""Where things are when nobody says: the socket, the state directory and the configuration file.

Owns the rules only; makes and opens nothing. Used by the daemon and by clients alike, so that both look in the same place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hexrt.errors import BadRequest

SOCKET_NAME = "hexrt.sock"
SYSTEM_SOCKET = Path("/run/hexrt") / SOCKET_NAME


def _runtime_dir(environ: Mapping[str, str], uid: int) -> Path | None:
    named = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(named):
        return Path(named)
    usual = Path(f"/run/user/{uid}")
    return usual if uid and usual.is_dir() else None


def daemon_socket(environ: Mapping[str, str]) -> Path:
    """Where a daemon listens when its configuration names no socket. Raises BadRequest where this user has no runtime directory."""
    uid = os.geteuid()
    runtime = _runtime_dir(environ, uid)
    if runtime is not None:
        return runtime / "hexrt" / SOCKET_NAME
    if uid == 0:
        return SYSTEM_SOCKET
    raise BadRequest(
        "this user has no runtime directory: give --socket PATH, or set HEXRT_SOCKET or XDG_RUNTIME_DIR",
        "daemon.socket",
    )


def client_socket(environ: Mapping[str, str]) -> Path:
    """The socket a client uses when none is named: HEXRT_SOCKET, else this user's own daemon, else the system's."""
    for key in ("HEXRT_SOCKET", "HEXRT_DAEMON_SOCKET"):
        if environ.get(key):
            return Path(environ[key])
    runtime = _runtime_dir(environ, os.geteuid())
    own = runtime / "hexrt" / SOCKET_NAME if runtime is not None else SYSTEM_SOCKET
    return (
        SYSTEM_SOCKET if os.path.exists(SYSTEM_SOCKET) and not os.path.exists(own) else own
    )  # False where one may not look


def state_dir(environ: Mapping[str, str]) -> Path:
    """Where a daemon keeps its state when its configuration names no directory: systemd's, else the system's for root, else the user's."""
    given = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    named = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(named):
        return Path(named) / "hexrt"
    return Path("/var/lib/hexrt") if os.geteuid() == 0 else Path.home() / ".local" / "state" / "hexrt"


def config_file(environ: Mapping[str, str]) -> Path | None:
    """The configuration file that is read when none is named: HEXRT_CONFIG, else the user's, else the system's, if there is one."""
    if environ.get("HEXRT_CONFIG"):
        return Path(environ["HEXRT_CONFIG"])
    home = environ.get("XDG_CONFIG_HOME", "")
    user = (Path(home) if os.path.isabs(home) else Path.home() / ".config") / "hexrt" / "hexrt.toml"
    return next((path for path in (user, Path("/etc/hexrt/hexrt.toml")) if path.is_file()), None)
