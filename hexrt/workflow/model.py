"""The workflow as a user writes it: one schema for Python, YAML, JSON and the socket.

Owns the records and the reference notation. Says nothing about whether a workflow makes sense: that is `check`'s job.

A reference stands in `inputs`, at any depth, where a literal could stand:

    {"$ref": "hits.documents.0.text"}    output of step `hits`, then a path of keys and list positions into it
    {"$item": "title"}                   the element that this task of a `map` step was given, then a path into it
    {"$item": ""}                        the whole element
    {"$file": "photo.png"}               only in a file on the client's side: replaced by the file's bytes before sending

A path may be a list instead of text, `{"$ref": ["hits", "a.b", 0]}`, for keys that hold dots or are digits; -1 is the last position of a list.
A `$ref` that begins with `#` is a pointer of a JSON Schema that is passed as data, and no reference.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, NewType

import msgspec

StepName = NewType("StepName", str)

STEP_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""What a step may be called; no dots, since a dot starts the path of a reference."""

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$(?!\n)")]
Label = Annotated[str, msgspec.Meta(max_length=200)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=31_536_000)]
Priority = Annotated[int, msgspec.Meta(ge=-100, le=100)]

REF, ITEM, FILE = "$ref", "$item", "$file"


class MapSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fan out: one task for each element of a list that a literal or another step's output gives."""

    over: Any  # a literal list or {"$ref": ...}
    max_in_flight: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = (
        None  # tasks placed at a time; None: no cap
    )


class Needs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Resource needs. A device named here is kept to: the step never silently runs elsewhere."""

    device: str | None = None  # a kind (`npu`) or a device (`pool:0`)
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


class StepSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One step. `params` are settled when the workflow is checked; `inputs` may refer to other steps."""

    id: Name
    op: Label
    params: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    after: tuple[str, ...] = ()  # order without data
    map: MapSpec | None = None
    needs: Needs | None = None
    priority: Priority | None = None  # None: the run's
    deadline_s: Seconds | None = None  # from submission
    timeout_s: Seconds | None = None  # of one attempt; None: the daemon's default
    retries: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0  # further attempts after the step's own failure
    idempotent: bool | None = None  # None: what the op says


class Workflow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A DAG of steps. `outputs` names what the result holds; without it, the output of every step that nothing refers to."""

    steps: tuple[StepSpec, ...]
    name: Label = "workflow"
    outputs: dict[str, Any] = {}  # name -> {"$ref": ...}
    priority: Priority = 0
    deadline_s: Seconds | None = None
