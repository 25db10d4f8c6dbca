"""The shared words: ids, states and device kinds that every other module speaks in.

Owns no data and does no work. Pure: importable from anywhere, imports nothing of hexrt.
"""

from __future__ import annotations

import enum
from typing import NewType

import msgspec

RunId = NewType("RunId", bytes)
"""128 random bits; shown to people as 32 hex digits."""
DeviceName = NewType("DeviceName", str)
"""`kind:index`, for example `pool:1`, `cpu:0`, `io:0`."""
Command = NewType("Command", int)
"""Counted per host epoch from 1; names one instruction to one host process."""
HostEpoch = NewType("HostEpoch", int)
"""Grows by one with every host process that is spawned; a report of an older one is dropped."""
SequenceId = NewType("SequenceId", int)
"""An LLM sequence: token ids and the page table that holds their K and V."""


class DeviceKind(enum.StrEnum):
    POOL = "pool"  # CPU process pool, one host process per worker
    CPU = "cpu"  # torch on the CPU as an accelerator
    NPU = "npu"  # ONNX Runtime sessions behind a queue
    IO = "io"  # network waits, in the daemon's own loop
    DISK = "disk"  # the host of the NVME tier: runs no steps
    CUDA = "cuda"  # an NVIDIA GPU or MIG instance
    ENDPOINT = "endpoint"  # a server of one model, spoken to by HTTP in the daemon's own loop


class TaskState(enum.IntEnum):
    WAITING = 0  # some predecessor has not ended
    READY = 1  # may be placed
    PLACED = 2  # sent to a host, not known to run yet
    RUNNING = 3  # reported as started
    DONE = 4
    FAILED = 5  # its own attempts are used up
    CANCELLED = 6
    SKIPPED = 7  # an ancestor failed
    UNKNOWN = 8  # not idempotent and in flight when the daemon died: it may or may not have happened


TASK_ENDED = frozenset({TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED, TaskState.SKIPPED, TaskState.UNKNOWN})


class RunState(enum.StrEnum):
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Durability(enum.StrEnum):
    SYNC = "sync"  # a reply waits until what it shows is on disk
    ASYNC = "async"  # recorded with a bounded lag
    NONE = "none"  # not recorded: lost with the daemon


class Peer(msgspec.Struct, frozen=True):
    """Who is at the other end of a client's socket, as the kernel says."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    pid: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How likely one answer token was, as natural logarithms of the model's own distribution (before temperature, penalties and cuts).

    `top`: (id, log-probability) of the likeliest tokens, likeliest first; empty where only the drawn one's was asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TensorMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a tensor on an edge: dtype by NumPy name, shape with None for an unknown extent."""

    dtype: str
    shape: tuple[int | None, ...]

    def matches(self, other: TensorMeta) -> bool:
        """True unless both sides know a dtype, rank or extent and they differ."""
        return (
            self.dtype == other.dtype
            and len(self.shape) == len(other.shape)
            and all(a is None or b is None or a == b for a, b in zip(self.shape, other.shape, strict=True))
        )

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if n is None else str(n) for n in self.shape)}]"
