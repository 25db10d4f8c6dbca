"""`text.template`: fills a Jinja template in a sandbox; the way to a prompt out of search hits."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from hexrt.core import DeviceKind
from hexrt.ops.spec import OpSpec, Part, Port, StepContext


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    template: Annotated[str, msgspec.Meta(max_length=1_000_000)]
    max_characters: Annotated[int, msgspec.Meta(ge=1, le=16_000_000)] = 1_000_000  # of the result; more is an error


def run(context: StepContext, params: Params, inputs: dict[str, Any]) -> str:
    from hexrt.ops._template import render

    return render(context.step, params.template, inputs.get("values") or {}, params.max_characters)


OP = OpSpec(
    name="text.template",
    doc="Text from a Jinja template and values. A value that is missing is an error; templates change nothing and reach nothing.",
    parts=(Part("run", (DeviceKind.POOL,), "hexrt.ops.text_template:run"),),
    params=Params,
    inputs={"values": Port(dict[str, Any] | None, required=False, doc="what the template may name")},
)
