"""`TaskGraph`: a checked workflow, ready to be run. Made by `check.check_workflow` only; never changed afterwards.

Everything a turn of the daemon needs about a step is settled here, down to the encoded bytes that go to a host. The records that there are many of are Structs, which are
made several times faster than dataclasses and, holding no cycles, are none of the garbage collector's business. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from hexrt.core import TensorMeta
from hexrt.ops.spec import OpSpec

ITEM = -1
"""`InputRef.step` of a reference to the map element that the task was given."""


class InputRef(msgspec.Struct, frozen=True, gc=False):
    """A hole in the inputs: at `to`, put what lies at `path` in the output of step `step` (or in the map element)."""

    to: tuple[str | int, ...]
    step: int
    path: tuple[str | int, ...]


class MapOver(msgspec.Struct, frozen=True):
    """What a map step fans out over: literal elements, or the list at `path` in the output of step `step`."""

    elements: tuple[msgspec.Raw, ...] | None
    step: int
    path: tuple[str | int, ...]
    max_in_flight: int  # 0: no cap


class Node(msgspec.Struct, eq=False, gc=False):
    """One step. `inputs` is the encoded dict of literals with nil in place of each hole in `refs`."""

    index: int
    id: str
    op: OpSpec
    params: msgspec.Struct
    params_raw: msgspec.Raw
    inputs: msgspec.Raw
    refs: tuple[InputRef, ...]
    map: MapOver | None
    predecessors: tuple[int, ...]  # distinct, data and order alike
    successors: list[int]
    device: str | None  # a kind or a device name that is kept to
    memory_bytes: int
    priority: int
    deadline_ns: int  # after submission; 0: none
    timeout_ns: int  # of one attempt
    retries: int
    idempotent: bool


class Edge(msgspec.Struct, frozen=True, gc=False):
    """Data from one step to an input of another, with what is known of a tensor on it. `to` is empty for what a map goes over."""

    producer: int
    consumer: int
    to: tuple[str | int, ...]
    path: tuple[str | int, ...]
    tensor: TensorMeta | None


@dataclass(eq=False, slots=True)
class TaskGraph:
    name: str
    nodes: list[Node]  # in the user's order
    edges: tuple[Edge, ...]
    order: list[int]  # topological
    outputs: tuple[tuple[str, int, tuple[str | int, ...]], ...]  # (name, step, path)
    deadline_ns: int  # of the run, after submission; 0: none
    priority: int
    bytes: int  # of the literals and parameters
    tensors: tuple[tuple[int, int, str], ...] = ()  # whose bytes are elsewhere: (handle, bytes, where it is named)

    @property
    def recorded_bytes(self) -> int:
        """Of the literals and parameters once the bytes of tensors are in them, at each place that names one."""
        return self.bytes + sum(size for _, size, _ in self.tensors)
