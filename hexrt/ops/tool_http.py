"""`tool.http`: one HTTP request to a host that the config allows, waited for in the daemon's loop."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from hexrt.core import DeviceKind
from hexrt.ops.spec import OpSpec, Part, Port, StepContext

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: Annotated[str, msgspec.Meta(max_length=8192)] = ""  # "": the input `url`
    method: Literal["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    headers: dict[Annotated[str, msgspec.Meta(max_length=256)], Annotated[str, msgspec.Meta(max_length=8192)]] = {}
    timeout_s: Seconds = 30.0  # of the whole exchange, redirects included
    connect_timeout_s: Seconds = 5.0
    max_body_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 8 << 20  # after decompression
    follow_redirects: bool = True
    fail_on_status: bool = True  # a status of 400 or more fails the step


async def run(context: StepContext, params: Params, inputs: dict[str, Any]) -> dict[str, Any]:
    import asyncio
    import importlib

    # The HTTP client takes long to import: in a thread, since this loop is the daemon's.
    http = await asyncio.to_thread(importlib.import_module, "hexrt.ops._http")
    answer: dict[str, Any] = await http.fetch(context, params, inputs)
    return answer


OP = OpSpec(
    name="tool.http",
    doc="An HTTP request: {status, headers, url, text or body, json}. Only to hosts that the config lists under allow in"
    ' [ops."tool.http"]: none by default.',
    parts=(Part("run", (DeviceKind.IO,), "hexrt.ops.tool_http:run"),),
    params=Params,
    inputs={
        "url": Port(str | None, required=False, doc="instead of params.url"),
        "query": Port(
            dict[str, str | int | float | bool] | None, required=False, doc="added to the query string of the URL"
        ),
        "json": Port(required=False, doc="sent as a JSON body"),
        "body": Port(required=False, doc="text (sent as UTF-8) or bytes, sent as they are; not together with json"),
    },
    idempotent=lambda params: params.method in ("GET", "HEAD", "OPTIONS"),
)
