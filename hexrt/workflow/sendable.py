"""Names the field of a workflow that no message can carry, for whoever encodes one on a user's side. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hexrt.errors import BadRequest, TaskFailed
from hexrt.values import encode
from hexrt.workflow.fields import place
from hexrt.workflow.model import Workflow
from hexrt.workflow.references import MOST_NESTING, Path

TOO_LARGE = "this whole number does not fit 64 bits, from -2^63 to 2^64 - 1: pass it as text"


def check_sendable(workflow: Workflow) -> None:
    """Raises BadRequest, its `where` the place of the value, unless all values of the workflow can be encoded."""
    for prefix, value in _values(workflow):
        fault = _fault(value)
        if fault:
            raise _named(value, fault, prefix, ())


def _values(workflow: Workflow) -> Iterator[tuple[str, Any]]:
    for step in workflow.steps:
        yield place("steps", (str(step.id),)), step
    for field in Workflow.__struct_fields__:
        if field != "steps":
            yield field, getattr(workflow, field)


def _fault(value: Any) -> str:
    try:
        encode(value)
    except TaskFailed as error:
        return error.message
    return ""


def _named(value: Any, fault: str, prefix: str, at: Path) -> BadRequest:
    """The fault of the innermost part that cannot be encoded."""
    if len(at) >= MOST_NESTING:
        return BadRequest(f"lists and dicts are nested deeper than {MOST_NESTING} levels", place(prefix, at[:4]))
    parts: Any = ()
    if isinstance(value, msgspec.Struct):
        parts = [(field, getattr(value, field)) for field in value.__struct_fields__]
    elif isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    for key, part in parts:
        inner = _fault(part)
        if inner:
            return _named(part, inner, prefix, (*at, key if isinstance(key, int) else str(key)))
    if isinstance(value, int):
        fault = TOO_LARGE
    return BadRequest(fault, place(prefix, at))
