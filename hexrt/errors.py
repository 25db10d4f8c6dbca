"""Every error that leaves a module, sorted by what its reader can do.

Owns the classes and their wire form, `ErrorRecord`. An error names the field or step concerned, says what to do,
and holds no path of the host. Pure.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class ErrorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error on a socket or a disk: its class by `kind`, one line of text, the place, and whether trying again may help."""

    kind: str
    message: str
    where: str = ""  # a field path (`steps[3].params.max_tokens`) or a step id
    retryable: bool = False


class HexrtError(Exception):
    """Base of all errors meant for a reader outside the module that raised it."""

    kind: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    def record(self) -> ErrorRecord:
        return ErrorRecord(self.kind, self.message, self.where, self.retryable)


class BadRequest(HexrtError):
    """The request is wrong; the same request will always be refused. `where` is the field's path."""

    kind = "bad_request"


class NotFound(HexrtError):
    """No such run, step, model or index, or it belongs to somebody else."""

    kind = "not_found"


class Overloaded(HexrtError):
    """A bounded queue or quota is full: try again later, or ask for less."""

    kind = "overloaded"
    retryable = True


class OutOfMemory(HexrtError):
    """The pages or bytes are not to be had now: try again later, or ask for less."""

    kind = "out_of_memory"
    retryable = True


class TaskFailed(HexrtError):
    """The step's own code or input failed."""

    kind = "task_failed"


class TimedOut(HexrtError):
    """The step ran past its timeout, or the run past its deadline."""

    kind = "timed_out"


class WorkerDied(HexrtError):
    """The process that ran the step died under it."""

    kind = "worker_died"
    retryable = True


class DeviceLost(HexrtError):
    """The device or its host went away; idempotent steps are run again elsewhere."""

    kind = "device_lost"
    retryable = True


class Unavailable(HexrtError):
    """What the step needs is not installed or not allowed here; the message says what to change."""

    kind = "unavailable"


class Cancelled(HexrtError):
    """The run was cancelled by a client or by shutdown."""

    kind = "cancelled"


class Disconnected(HexrtError):
    """The daemon cannot be reached, or the connection to it broke."""

    kind = "disconnected"
    retryable = True


class InvariantViolation(HexrtError):
    """A bug in hexrt: the story is persisted and the daemon exits."""

    kind = "invariant_violation"


BY_KIND: dict[str, type[HexrtError]] = {
    c.kind: c
    for c in (
        BadRequest, NotFound, Overloaded, OutOfMemory, TaskFailed, TimedOut, WorkerDied, DeviceLost,
        Unavailable, Cancelled, Disconnected, InvariantViolation,
    )
}  # fmt: skip


def from_record(record: ErrorRecord) -> HexrtError:
    """The exception a client raises for `record`; an unknown kind becomes a plain HexrtError."""
    return BY_KIND.get(record.kind, HexrtError)(record.message, record.where)
