"""What a client and the daemon say to each other over the Unix socket: one message a frame.

Owns the message types of both directions, one schema for every client. The first message is ClientHello, the first answer Welcome.
Each request carries a number of the client's choice that every answer repeats; answers of different requests may interleave. A message
with `tensors` brings one file descriptor, a sealed memfd, with its frame's first byte; the descriptors in its values name them. Pure.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from hexrt.core import Durability, RunState
from hexrt.errors import ErrorRecord
from hexrt.protocol.models import ModelStatus, WeightsBudget
from hexrt.workflow.model import Workflow

VERSION = 2
MOST_TENSORS = 10_000  # of one message
RunKey = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", omit_defaults=True):
    pass


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Where the bytes of the tensor `handle` lie in the message's memfd."""

    handle: Number  # a client's: from 1, below 2**32
    offset: Number
    bytes: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


Tensors = Annotated[tuple[Tensor, ...], msgspec.Meta(max_length=MOST_TENSORS)]


# --- requests ---------------------------------------------------------------------------------------------------


class ClientHello(Message, tag="hello"):
    versions: tuple[Number, ...]  # that the client speaks; the daemon picks one
    client: Annotated[str, msgspec.Meta(max_length=200)] = ""


class Submit(Message, tag="submit"):
    """Answered by Accepted once the run is as durable as it asked; with `follow`, then by Update... and at last RunResult."""

    request: Number
    workflow: Workflow
    durability: Durability = Durability.SYNC
    follow: Literal["none", "result", "events"] = "none"
    tensors: Tensors = ()  # that do not overlap in a memfd sealed against SHRINK, GROW and WRITE; each named in `workflow`


class Cancel(Message, tag="cancel"):
    """Answered by Done once no work of the run goes on."""

    request: Number
    run: RunKey
    reason: Annotated[str, msgspec.Meta(max_length=1000)] = ""


class Status(Message, tag="status"):
    request: Number
    run: RunKey


class List(Message, tag="list"):
    request: Number
    state: RunState | None = None
    limit: Count = 100


class Watch(Message, tag="watch"):
    """Answered by Update... from the run's beginning (as far as it is kept) and, when the run ends, RunResult without outputs."""

    request: Number
    run: RunKey


class Result(Message, tag="result"):
    request: Number
    run: RunKey
    wait: bool = True  # False: refused with NotFound-like BadRequest while the run goes on


class Timeline(Message, tag="timeline"):
    request: Number
    run: RunKey


class Devices(Message, tag="devices"):
    request: Number


class Memory(Message, tag="memory"):
    """Answered by MemoryReport. Of other users' runs only root, the daemon's uid and admins are told."""

    request: Number


class Models(Message, tag="models"):
    """Answered by ModelList. Where a model lies on this machine, and by what URL a server answers, only root, the daemon's uid and admins are told."""

    request: Number


class Statistics(Message, tag="statistics"):
    request: Number


class Forget(Message, tag="forget"):
    """Ends a Watch, the following of a Submit, or a wait, by its request number: it gets no further answer. The run goes on. Answered by Done."""

    request: Number
    target: Number


class Shutdown(Message, tag="shutdown"):
    """Only root and the daemon's own uid. `drain`: let running steps end first."""

    request: Number
    drain: bool = True


Request = (
    Submit | Cancel | Status | List | Watch | Result | Timeline | Devices | Memory | Models | Statistics | Forget
    | Shutdown
)  # fmt: skip
FromClient = ClientHello | Request

# --- answers ----------------------------------------------------------------------------------------------------


class Welcome(Message, tag="welcome"):
    version: int
    daemon: str
    max_frame_bytes: int


class Accepted(Message, tag="accepted"):
    request: int
    run: bytes


class Update(Message, tag="update"):
    """Something happened in a watched run. `number` counts from 1 within the run.

    `event`: ready, placed, started, tokens, done, failed, cancelled, skipped, unknown, expanded (a map's tasks became known).
    """

    request: int
    number: int
    event: str
    step: str
    part: int  # position in the map, 0 elsewhere
    device: str = ""
    attempt: int = 0
    at_ns: int = 0
    text: str = ""
    error: ErrorRecord | None = None


class StepStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    id: str
    op: str
    state: str
    tasks: int
    tasks_done: int
    device: str = ""
    attempts: int = 0
    queued_s: float = 0.0
    run_s: float = 0.0
    error: ErrorRecord | None = None
    waits: str = ""  # what a step that was placed waits for, and who holds it


class RunSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    run: bytes
    name: str
    uid: int
    state: RunState
    submitted_wall_ns: int
    duration_s: float
    steps: int
    steps_done: int
    durability: Durability
    error: ErrorRecord | None = None


class RunStatus(Message, tag="run_status"):
    request: int
    summary: RunSummary
    steps: tuple[StepStatus, ...]


class RunList(Message, tag="run_list"):
    request: int
    runs: tuple[RunSummary, ...]


class RunResult(Message, frozen=True, tag="run_result"):
    """`outputs` by name: msgpack values of hexrt.values. Failed and skipped steps are in `errors` by step id."""

    request: int
    run: bytes
    state: RunState
    outputs: dict[str, msgspec.Raw]
    errors: dict[str, ErrorRecord]
    tensors: tuple[Tensor, ...] = ()


class AttemptRecord(msgspec.Struct, frozen=True, array_like=True):
    """One attempt of one task, as the timeline keeps it: nanoseconds on the monotonic clock, 0 for what did not happen."""

    step: int
    part: int
    part_name: str
    attempt: int
    device: str
    stream: int
    ready_ns: int
    placed_ns: int
    start_ns: int
    end_ns: int
    state: str  # done, failed, cancelled, running, ...
    predicted_ns: int = 0
    tokens: int = 0
    pages_migrated: int = 0  # brought up, from NVME or HOST, for it
    migration_bytes: int = 0


class RunTimeline(Message, tag="run_timeline"):
    """What a trace is written from. `steps` are (id, op); `edges` are (producer step index, consumer step index)."""

    request: int
    run: bytes
    name: str
    state: RunState
    submitted_ns: int
    submitted_wall_ns: int
    ended_ns: int  # 0 while it runs
    steps: tuple[tuple[str, str], ...]
    edges: tuple[tuple[int, int], ...]
    attempts: tuple[AttemptRecord, ...]


class DeviceStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    kind: str
    state: str  # starting, ready, lost, absent
    running: int = 0
    queued: int = 0
    done: int = 0
    facts: dict[str, Any] = {}
    why: str = ""  # for absent and lost
    memory: str = ""  # what is wrong with the tiers of memory that it moves pages between


class DeviceList(Message, tag="device_list"):
    request: int
    devices: tuple[DeviceStatus, ...]


class TierStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tier of the paged memory. `copies` are of pages, since the daemon started, and so is what follows them."""

    name: str
    level: str  # device, host, nvme
    state: str  # ok, unstarted (until it is needed), starting, degraded, closed (takes no pages), lost
    why: str  # for the last three
    bytes: int
    used_bytes: int
    free_bytes: int
    largest_free_bytes: int  # in one run
    fragmentation: float  # 1 - largest free run / free
    pages: int  # that have a copy here
    dirty_pages: int  # whose only copy is here
    pinned_pages: int
    moving_pages: int
    copies_in: int
    copies_out: int
    bytes_in: int
    bytes_out: int
    evictions: int  # dropped with a copy elsewhere
    discards: int  # dropped to be computed again
    faults: int  # pages that could not be read or written


class LinkStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast copies from tier to tier are taken to be."""

    source: str
    target: str
    bytes_per_s: float
    latency_ns: float  # of each piece
    copies: int  # that it was learnt from, a measurement at start included; 0: a guess


class Moved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was moved since the daemon started."""

    loaded_pages: int  # to a higher tier, or in from a segment
    loaded_bytes: int
    stored_pages: int  # to a lower one
    stored_bytes: int
    relocated_pages: int  # within a tier, so that free memory is in one piece
    relocated_bytes: int
    copied_pages: int  # within a tier, for sequences that part ways
    copied_bytes: int
    faults: int
    open_moves: int  # that have not ended


class TensorTotals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors of all runs, by where they lie: in a client's memory or the ring they were put out in, in HOST, or in NVME alone."""

    segment_tensors: int = 0
    segment_bytes: int = 0
    host_tensors: int = 0
    host_bytes: int = 0
    nvme_tensors: int = 0
    nvme_bytes: int = 0


class Holder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run holds: pages of its sequences in whatever tier, shared ones in full, and tensors."""

    run: bytes
    name: str
    uid: int
    state: RunState
    pages: int
    page_bytes: int
    tensors: int
    tensor_bytes: int


class MemoryReport(Message, tag="memory_report"):
    request: int
    tiers: tuple[TierStatus, ...]
    links: tuple[LinkStatus, ...]
    moved: Moved
    tensors: TensorTotals
    host_pages: str  # of HOST: reserved, transparent (huge ones both) or plain
    host_pages_why: str
    holders: tuple[Holder, ...]  # the largest, those that hold most first


class ModelList(Message, tag="model_list"):
    request: int
    models: tuple[ModelStatus, ...]
    budgets: tuple[WeightsBudget, ...]


class StatisticsReport(Message, tag="statistics_report"):
    request: int
    values: dict[str, float]


class Done(Message, tag="done"):
    request: int


class Refused(Message, tag="refused"):
    """`request` is None where the frame could not be read far enough to know; the connection closes then."""

    request: int | None
    error: ErrorRecord


FromDaemon = (
    Welcome | Accepted | Update | RunStatus | RunList | RunResult | RunTimeline | DeviceList | MemoryReport | ModelList
    | StatisticsReport | Done | Refused
)  # fmt: skip
