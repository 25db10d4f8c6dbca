"""`noop`: returns what it is given, or nothing. For measuring hexrt itself and for wiring workflows."""

from __future__ import annotations

from typing import Any

from hexrt.core import DeviceKind
from hexrt.ops.spec import NoParams, OpSpec, Part, Port, StepContext


def run(context: StepContext, params: NoParams, inputs: dict[str, Any]) -> Any:
    return inputs.get("value")


OP = OpSpec(
    name="noop",
    doc="Returns its input `value`, or null.",
    parts=(Part("run", (DeviceKind.POOL,), "hexrt.ops.noop:run"),),
    inputs={"value": Port(required=False, doc="anything")},
)
