"""The one union of events (facts): what happened, in the order in which the owner of the run state learnt it.

Owns the record types. `RunState.apply` takes exactly these; the store keeps those in `DURABLE`, the timeline and the recorder their
own subsets. A task is named by (run, step index, part), where part = map position x parts of the op + part of the op.
Times are monotonic nanoseconds of this boot unless the name says `wall`. Pure.
"""

from __future__ import annotations

import msgspec

from hexrt.core import Durability, TokenLogprob
from hexrt.errors import ErrorRecord
from hexrt.workflow.model import Workflow


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    run: bytes
    uid: int
    gid: int
    durability: Durability
    wall_ns: int
    at_ns: int
    workflow: Workflow


class Started(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Recorded before the launch of a task that is not idempotent; for others only seen by the timeline."""

    run: bytes
    step: int
    part: int
    attempt: int
    device: str
    at_ns: int


class Finished(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """A task ended well. `output` is msgpack (hexrt.values); for a large one see runtime.store."""

    run: bytes
    step: int
    part: int
    attempt: int
    device: str
    start_ns: int
    end_ns: int
    output: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """An attempt ended badly. `blame` is False where the attempt is not the cause (its worker died under another task, a device went away)."""

    run: bytes
    step: int
    part: int
    attempt: int
    device: str
    start_ns: int
    end_ns: int
    error: ErrorRecord
    blame: bool = True


class Emitted(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Token ids that an `llm.generate` or `llm.decode` task produced, with their text; `first` is the position of ids[0] in the answer."""

    run: bytes
    step: int
    part: int
    attempt: int
    first: int
    ids: tuple[int, ...]
    text: str
    at_ns: int
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of ids, where they were asked for


class CancelRequested(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    run: bytes
    uid: int
    wall_ns: int
    at_ns: int
    reason: str


class Placed(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """What `decide` chose; kept by the recorder and the timeline."""

    run: bytes
    step: int
    part: int
    attempt: int
    device: str
    at_ns: int
    predicted_ns: int


class DeviceUp(msgspec.Struct, frozen=True, array_like=True, tag=8, gc=False):
    device: str
    host_epoch: int
    at_ns: int


class DeviceDown(msgspec.Struct, frozen=True, array_like=True, tag=9, gc=False):
    device: str
    host_epoch: int
    at_ns: int
    reason: str


class Recovered(msgspec.Struct, frozen=True, array_like=True, tag=10, gc=False):
    """Written once after a replay: whatever is in flight by the facts before it was lost with the process."""

    wall_ns: int
    at_ns: int


class DeadlinePassed(msgspec.Struct, frozen=True, array_like=True, tag=11, gc=False):
    """The run's deadline, or with step >= 0 that step's, passed before it ended."""

    run: bytes
    step: int
    at_ns: int


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag=12, gc=False):
    """There was no room for more of this run, or with step >= 0 of that step: decided from what all runs held then, so it is recorded."""

    run: bytes
    step: int
    at_ns: int
    error: ErrorRecord


class TensorsLost(msgspec.Struct, frozen=True, array_like=True, tag=13, gc=False):
    """Bytes that a done step had put out, and that a ready one is to read, are gone with the memory they were in."""

    run: bytes
    step: int
    at_ns: int


Event = (
    Submitted | Started | Finished | Failed | Emitted | CancelRequested | Placed | DeviceUp | DeviceDown | Recovered
    | DeadlinePassed | Stopped | TensorsLost
)  # fmt: skip

DURABLE = (Submitted, Started, Finished, Failed, Emitted, CancelRequested, Recovered, DeadlinePassed, Stopped)
"""What the store keeps, for runs whose durability is not none. A Started of an idempotent task is not given to it."""
