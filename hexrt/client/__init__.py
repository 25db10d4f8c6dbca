"""The client library: `Client` (blocking) and `AsyncClient`, two faces over one schema (`calls`).

Both have the same methods and raise the errors of `hexrt.errors`. The asyncio face is loaded when it is first asked for. `shared_array`
makes an array that goes to the daemon without a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hexrt.client.blocking import Client
from hexrt.client.calls import Outcome, Outputs, run_key
from hexrt.client.tensors import SharedArray, shared_array

if TYPE_CHECKING:
    from hexrt.client.asynchronous import AsyncClient

__all__ = ["AsyncClient", "Client", "Outcome", "Outputs", "SharedArray", "run_key", "shared_array"]


def __getattr__(name: str) -> Any:
    if name == "AsyncClient":
        from hexrt.client.asynchronous import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
