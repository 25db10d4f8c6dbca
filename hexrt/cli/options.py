"""What commands that talk to the daemon have in common: `--socket`, `--json`, `--durability`, and run ids.

Owns these options and nothing else.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from hexrt.client import Client, run_key
from hexrt.core import Durability, RunId
from hexrt.errors import BadRequest, NotFound
from hexrt.workflow.model import Workflow

F = TypeVar("F", bound=Callable[..., Any])
SHORTEST_PREFIX = 4
MOST_LISTED = 10_000


@dataclass(frozen=True, slots=True)
class Shared:
    """The options of a call. `json`: print JSON and nothing else on standard output."""

    socket: Path | None
    json: bool

    def connect(self) -> Client:
        """Raises Disconnected, saying what to do."""
        return Client(self.socket)


def shared_options(command: F) -> F:
    """Adds `--socket` and `--json`; the command is given a Shared first."""

    @click.option("--socket", type=click.Path(path_type=Path), help="The daemon's socket.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @functools.wraps(command)
    def wrapped(socket: Path | None, as_json: bool, **given: Any) -> Any:
        return command(Shared(socket or click.get_current_context().find_object(Path), as_json), **given)

    return wrapped  # type: ignore[return-value]


def durability_option(command: F) -> F:
    return click.option(
        "--durability",
        type=click.Choice([each.value for each in Durability]),
        default=Durability.SYNC.value,
        show_default=True,
        help="Whether the run outlives the daemon: sync (acknowledged once on disk), async (with a short lag), none.",
    )(command)


def read_workflow(file: str) -> Workflow:
    """The workflow in a file, or for `-` on standard input. Raises BadRequest."""
    from hexrt.workflow.load import load_workflow

    return load_workflow(sys.stdin.read(), base_dir=Path()) if file == "-" else load_workflow(Path(file))


def find_run(client: Client, text: str) -> RunId:
    """The run with this id, or with the only id that starts so. Raises BadRequest or NotFound."""
    if len(text) == 32:
        return run_key(text)
    if not (SHORTEST_PREFIX <= len(text) < 32 and re.fullmatch(r"[0-9a-fA-F]+", text)):
        raise BadRequest(
            f"{text!r} is not a run's id: give its 32 hex digits, or the first {SHORTEST_PREFIX} or more", "RUN"
        )
    found = [run.run for run in client.list(limit=MOST_LISTED) if run.run.hex().startswith(text.lower())]
    if not found:
        raise NotFound("there is no such run; `hexrt list` shows yours", text)
    if len(found) > 1:
        raise BadRequest(
            f"{len(found)} runs start so: {', '.join(run.hex()[:12] for run in found[:5])}; give more digits", text
        )
    return RunId(found[0])
