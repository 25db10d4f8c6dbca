"""What an op declares: parameters, ports, devices, cost features, idempotency and where its body is.

Owns the record types and the `StepContext` that a body is given. Importing an op's file must import nothing heavy: the body
imports what it needs inside its function, in the host process. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from hexrt.core import DeviceKind, TensorMeta


class NoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For an op without parameters."""


class Port(msgspec.Struct, frozen=True):
    """A named input. `type` is what msgspec checks a value against (in the host, and for a literal when the workflow is checked)."""

    type: Any = Any
    required: bool = True
    default: Any = None
    tensor: TensorMeta | None = None  # what is known of a tensor that arrives here
    doc: str = ""


class Part(msgspec.Struct, frozen=True):
    """One scheduled unit of a step. Parts of a step form a chain; each is given the output of the one before as input `previous`.

    `body` is "module:function", imported in the host; None where the device's LLM engine carries the part out, by `name`
    ("prefill" or "decode").
    """

    name: str
    kinds: tuple[DeviceKind, ...]
    body: str | None


def by_input_bytes(params: Any, input_bytes: int) -> int:
    """The default cost feature."""
    return input_bytes


class OpSpec(msgspec.Struct, frozen=True):
    """A step type.

    `work` gives the number that run time grows with; the cost model keeps one estimate per power of two of it.
    `check` may raise BadRequest about a combination of parameters; `where` is filled in by the caller.
    `idempotent` may depend on the parameters (an HTTP GET is, a POST is not): ask `is_idempotent`.
    """

    name: str
    doc: str
    parts: tuple[Part, ...]
    params: type[msgspec.Struct] = NoParams
    inputs: Mapping[str, Port] = msgspec.field(default_factory=dict)
    output: TensorMeta | None = None  # where the whole output is a tensor of known form
    outputs: Mapping[str, TensorMeta] = msgspec.field(default_factory=dict)  # by key: a dict that holds tensors
    idempotent: bool | Callable[[Any], bool] = True
    work: Callable[[Any, int], int] = by_input_bytes
    check: Callable[[Any], None] | None = None

    def is_idempotent(self, params: Any) -> bool:
        return self.idempotent if isinstance(self.idempotent, bool) else self.idempotent(params)


class StepContext(msgspec.Struct, frozen=True, gc=False):
    """What a body knows of its surroundings. Bodies are `def body(context, params, inputs) -> output` (`async def` on io).

    `inputs` is a dict by port name; values are those of `hexrt.values`. Arrays among them are read-only views of memory that is used again
    once the body has returned: it keeps no view of them (a copy where it must), but may return one, which costs nothing where it is
    returned whole. `torch.from_dlpack(array)` reads it in place. `settings` is the `[ops.NAME]` table of the config.
    `state_dir` is private to hexrtd; a body keeps what must last under `state_dir / "ops" / <op name>`. `models` is the [models] table,
    {name: {path, dtype}} in the config's order; a path is relative to `models_dir`.
    """

    run: bytes
    step: str
    part: int
    attempt: int
    uid: int
    device: str
    timeout_s: float
    state_dir: str
    models_dir: str
    settings: dict[str, Any]
    models: dict[str, Any] = {}
