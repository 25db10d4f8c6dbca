"""`map.python`: calls a plain Python function that is installed on the daemon's side and that its config or package offers."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from hexrt.core import DeviceKind
from hexrt.ops.spec import OpSpec, Part, Port, StepContext


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # `module:function`, or the name of an entry point of the group `hexrt.functions`
    function: Annotated[
        str,
        msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,199}(:[A-Za-z][A-Za-z0-9_]{0,99})?$(?!\n)", max_length=300),
    ]


def run(context: StepContext, params: Params, inputs: dict[str, Any]) -> Any:
    from hexrt.ops._functions import call

    positional = (inputs["value"],) if "value" in inputs else ()
    return call(context, params.function, positional, inputs.get("arguments") or {})


OP = OpSpec(
    name="map.python",
    doc="Calls function(value, **arguments) and returns what it returns. Only functions registered by entry point"
    " (group hexrt.functions) or in modules that the config allows: none by default.",
    parts=(Part("run", (DeviceKind.POOL,), "hexrt.ops.map_python:run"),),
    params=Params,
    inputs={
        "value": Port(required=False, doc="the first argument; left out where the function takes none"),
        "arguments": Port(dict[str, Any] | None, required=False, doc="arguments by name"),
    },
    idempotent=False,  # nobody knows what the function does; a step that knows better says so
)
