"""Memory that a test passes over the client socket."""

from __future__ import annotations

from typing import Any

from hexrt import values
from hexrt.memory.arena import sealed_copy
from hexrt.protocol import messages as m
from tests.serving import RawClient, step, workflow


def named(handle: int, size: int) -> Any:
    return values.descriptor(handle, "uint8", (size,))


def submit(
    number: int, tensors: list[Any] | None = None, value: Any = None, follow: str = "none", **fields: Any
) -> dict[str, Any]:
    sent = {
        "type": "submit",
        "request": number,
        "workflow": workflow(step(inputs={"value": value}), **fields),
        "follow": follow,
    }
    return sent if tensors is None else sent | {"tensors": tensors}


def place(handle: int, offset: int, size: int) -> dict[str, int]:
    return {"handle": handle, "offset": offset, "bytes": size}


def sealed(*contents: bytes) -> int:
    return sealed_copy([memoryview(content) for content in contents])[0]


async def lives(client: RawClient, number: int = 900) -> None:
    assert isinstance(await client.ask(m.Statistics(number)), m.StatisticsReport)
