"""Params and inputs of one step against what its op declares.

Owns the facts that are settled once for an op and shared by all its steps. `where` of what is raised is relative to the step. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from hexrt.errors import BadRequest, HexrtError
from hexrt.ops.spec import OpSpec, Port
from hexrt.values import elements, encode, tensor_meta
from hexrt.workflow.fields import did_you_mean, field_error, place, quoted
from hexrt.workflow.references import Hole, Walker

ELEMENTS = 1000
"""Elements of a listed map that are read without a pause."""
NO_PARAMS_REFERENCE = "params are settled before the run, so a reference cannot stand here, nor one to what would have to be fetched: pass a step's output in `inputs`"
NO_PARAMS_TENSOR = "params are settled before the run, so a large tensor cannot stand here: pass it in `inputs`"
NO_ELEMENT_REFERENCE = (
    "a listed element of `map.over` cannot hold a reference: refer to a step that gives the list, or use it in `inputs`"
)


@lru_cache(maxsize=1024)
def _field_names(params: type[msgspec.Struct]) -> tuple[str, ...]:
    """As a user writes them. Reading them off a type costs more than checking a small workflow."""
    return tuple(f.encode_name for f in msgspec.structs.fields(params))


class OpFacts(msgspec.Struct, eq=False):
    """What all steps of an op share. `fault` is why empty params will not do; without one, `params` and `params_raw` are those."""

    op: OpSpec
    parts: int
    kinds: frozenset[str]
    fields: tuple[str, ...]
    required: tuple[str, ...]
    defaults: dict[str, Any]
    needs_inputs: bool  # even when none are given
    params: msgspec.Struct
    params_raw: msgspec.Raw
    fault: BadRequest | None

    @classmethod
    def of(cls, op: OpSpec, reader: PortReader) -> OpFacts:
        ports = op.inputs
        required = tuple(name for name, port in ports.items() if port.required)
        defaults = {
            name: port.default for name, port in ports.items() if not port.required and port.default is not None
        }
        facts = cls(
            op, len(op.parts), frozenset(kind.value for part in op.parts for kind in part.kinds),
            _field_names(op.params), required, defaults,
            bool(required or defaults), msgspec.Struct(), msgspec.Raw(), None,
        )  # fmt: skip
        try:
            facts.params, facts.params_raw = reader.read_params(facts, {})
        except BadRequest as error:
            facts.fault = error
        return facts


@dataclass(eq=False, slots=True)
class PortReader:
    """Reads the params, inputs and map elements of step after step. `work` grows with what was done."""

    max_nesting: int
    work: int = 0
    _walker: Walker = field(init=False)

    def __post_init__(self) -> None:
        self._walker = Walker(self.max_nesting)

    @property
    def named(self) -> list[tuple[int, int, str]]:
        """The tensors met so far whose bytes are elsewhere: handle, bytes and where, to be taken out by the caller."""
        return self._walker.named

    def _walk(self, value: Any, prefix: str, on_reference: str | None, on_named: str | None = None) -> tuple[Any, list[Hole]]:  # fmt: skip
        walker = self._walker
        walker.start(prefix, on_reference, on_named)
        before = walker.seen
        walked = walker.walk(value, ())
        self.work += (walker.seen - before) >> 3
        return walked, walker.holes

    def read_params(self, facts: OpFacts, params: Mapping[str, Any]) -> tuple[msgspec.Struct, msgspec.Raw]:
        op = facts.op
        walked, _ = self._walk(params, "params", NO_PARAMS_REFERENCE, NO_PARAMS_TENSOR)
        try:
            made = msgspec.convert(walked, op.params)
            if op.check is not None:
                op.check(made)
        except msgspec.ValidationError as error:
            raise field_error(error, "params", facts.fields) from None
        except HexrtError as error:
            raise BadRequest(error.message, f"params.{error.where}" if error.where else "params") from None
        return made, _encode(made, "params")

    def read_inputs(self, facts: OpFacts, inputs: Mapping[str, Any]) -> tuple[msgspec.Raw, list[Hole]]:
        ports = facts.op.inputs
        for name in inputs:
            if name not in ports:
                raise BadRequest(
                    f"op {facts.op.name!r} has no input {quoted(name)}{did_you_mean(str(name), ports)}",
                    place("inputs", (str(name),)),
                )
        for name in facts.required:
            if name not in inputs:
                raise BadRequest(
                    'this input is required: give it a value, or another step\'s output by {"$ref": "STEP"}',
                    f"inputs.{name}",
                )
        walked, holes = self._walk(inputs, "inputs", None)
        open_ports = {hole.to[0] for hole in holes}
        if walked is inputs and facts.defaults:
            walked = dict(inputs)
        for name, default in facts.defaults.items():
            walked.setdefault(name, default)
        for name, value in walked.items():
            port = ports[name]
            if name not in open_ports and (port.type is not Any or port.tensor is not None):
                _fit(port, name, value)
        return _encode(walked, "inputs"), holes

    def read_elements(
        self, listed: Sequence[Any], add_bytes: Callable[[int], None]
    ) -> Generator[None, None, tuple[msgspec.Raw, ...]]:
        """The encoded elements of a list that a map goes over, yielding every thousand; `add_bytes` is told the size of each part."""
        walker, found = self._walker, []
        walker.start("map.over", NO_ELEMENT_REFERENCE)
        for first in range(0, len(listed), ELEMENTS):
            walked = walker.walk_part(listed[first : first + ELEMENTS], first)
            raw = _encode(walked, "map.over")
            add_bytes(len(raw))
            found += elements(raw)
            yield
        return tuple(found)


def _encode(value: Any, where: str) -> msgspec.Raw:
    try:
        return msgspec.Raw(encode(value))
    except HexrtError as error:
        raise BadRequest(error.message, where) from None


def _fit(port: Port, name: str, value: Any) -> None:
    """Raises BadRequest where a literal does not fit the port."""
    tensor = isinstance(value, msgspec.msgpack.Ext)
    if tensor and port.tensor is not None:
        found = tensor_meta(value)
        if not found.matches(port.tensor):
            raise BadRequest(f"this is a tensor {found}, and the input takes {port.tensor}", f"inputs.{name}")
    if port.type is not Any:
        try:
            msgspec.convert(value, port.type)
        except msgspec.ValidationError as error:
            fault = field_error(error, f"inputs.{name}")
            raise BadRequest(fault.message.replace("got `ext`", "got a tensor"), fault.where) from None
