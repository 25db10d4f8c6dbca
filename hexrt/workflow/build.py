"""Builds a `Workflow` in Python: steps refer to each other by handles.

    w = WorkflowBuilder("rag")
    query = w.step("embed.text", id="query", inputs={"texts": ["what is a page fault?"]})
    hits = w.step("search.vector", inputs={"vectors": query})
    answers = w.step("llm.generate", map_over=hits["documents"], inputs={"prompt": ITEM["text"]})
    w.output("answers", answers)
    workflow = w.build()

Literals are copied when a step is added, and small arrays become the tensor extension then. Large ones are kept as they are, so that they
go to the daemon without a further copy: they must not change until the workflow was submitted, and `values.encode` encodes them. Checks names and types of fields; whether the graph makes sense is `check`'s to say.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from hexrt.errors import BadRequest
from hexrt.values import DESCRIPTOR, is_array, tensor
from hexrt.workflow.fields import field_error, place, quoted
from hexrt.workflow.model import ITEM as ITEM_KEY
from hexrt.workflow.model import REF, StepSpec, Workflow
from hexrt.workflow.references import MOST_NESTING, Path, write_path

_PLAIN = frozenset({str, bool, int, float, bytes, msgspec.msgpack.Ext})
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Reference:
    """What a step will give, or a part of it: `hits["documents"][0]`. Stands in `inputs`, `map_over`, `after` and outputs.

    Its value is not known while the workflow is built, so it cannot be looped over, formatted or tested.
    """

    builder: WorkflowBuilder | None  # None: the map element
    step: str
    path: Path = ()

    def __getitem__(self, key: str | int) -> Reference:
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise BadRequest(f"a reference is indexed by a key (text) or a position, not by {quoted(key)}", self.step)
        return Reference(self.builder, self.step, (*self.path, key))

    def written(self) -> dict[str, Any]:
        """The reference as `model` describes it."""
        if self.builder is None:
            return {ITEM_KEY: write_path(self.path)}
        return {REF: write_path((self.step, *self.path))}

    def _refuse(self, doing: str) -> NoReturn:
        raise TypeError(
            f"what step {self.step!r} gives is not known while the workflow is built, so it cannot be {doing}"
        )

    def __iter__(self) -> NoReturn:
        self._refuse("looped over: use map_over")

    def __bool__(self) -> NoReturn:
        self._refuse("tested")

    def __format__(self, spec: str) -> NoReturn:
        self._refuse("put into text: pass it in the inputs of a step")

    def __repr__(self) -> str:
        return f"<reference {place(self.step, self.path)}>"


ITEM = Reference(None, "map element")
"""The element that a task of a `map` step is given; `ITEM["title"]` is a part of it."""


class WorkflowBuilder:
    """Collects steps. The values of one builder's references mean nothing in another's."""

    def __init__(self, name: str = "workflow", *, priority: int = 0, deadline_s: float | None = None) -> None:
        self._fields: dict[str, Any] = {"name": name, "priority": priority, "deadline_s": deadline_s}
        self._steps: dict[str, StepSpec] = {}
        self._outputs: dict[str, Any] = {}
        self._numbers: dict[str, int] = {}  # the next for ids made of an op's name

    def step(
        self,
        op: str,
        *,
        id: str | None = None,
        params: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
        map_over: Reference | Iterable[Any] | None = None,
        max_in_flight: int | None = None,
        after: Reference | str | Iterable[Reference | str] = (),
        device: str | None = None,
        memory_bytes: int = 0,
        priority: int | None = None,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
        idempotent: bool | None = None,
    ) -> Reference:
        """Adds a step and returns the reference to its whole output. Without `id` it is called after its op. Raises BadRequest."""
        name = self._free_id(op) if id is None else id
        place_of = place("steps", (str(name),))
        if name in self._steps:
            raise BadRequest(f"there is a step {name!r} already: give each its own id", f"{place_of}.id")
        fields: dict[str, Any] = {
            "id": name, "op": op, "params": self._named(params, f"{place_of}.params"),
            "inputs": self._named(inputs, f"{place_of}.inputs"), "after": self._after(after, place_of),
            "map": self._map(map_over, max_in_flight, place_of), "priority": priority, "deadline_s": deadline_s,
            "needs": {"device": device, "memory_bytes": memory_bytes} if device is not None or memory_bytes else None,
            "timeout_s": timeout_s, "retries": retries, "idempotent": idempotent,
        }  # fmt: skip
        try:
            self._steps[name] = msgspec.convert(fields, StepSpec)
        except msgspec.ValidationError as error:
            raise field_error(error, place_of) from None
        return Reference(self, name)

    def output(self, name: str, reference: Reference) -> None:
        """Names a part of the result. Without any, the result holds the output of every step that nothing refers to."""
        if name in self._outputs:
            raise BadRequest("there is an output of this name already", f"outputs.{name}")
        if not isinstance(reference, Reference) or reference.builder is None:
            raise BadRequest("an output is a reference to what a step gives", f"outputs.{name}")
        self._outputs[name] = self._written(reference, f"outputs.{name}")

    def build(self) -> Workflow:
        """The workflow as it stands; the builder may go on and build again. Raises BadRequest."""
        if not self._steps:
            raise BadRequest("a workflow needs at least one step: call step()", "steps")
        try:
            fields = {**self._fields, "steps": [], "outputs": dict(self._outputs)}
            workflow = msgspec.convert(fields, Workflow)
        except msgspec.ValidationError as error:
            raise field_error(error, "") from None
        return msgspec.structs.replace(workflow, steps=tuple(self._steps.values()))

    def _named(self, values: Mapping[str, Any] | None, where: str) -> Any:
        if values is not None and not isinstance(values, Mapping):
            raise BadRequest(f"this is a dict by name, not a {type(values).__name__}", where)
        return self._literal(values or {}, where, ())

    def _free_id(self, op: str) -> str:
        base = _NOT_IN_ID.sub("_", str(op))[:48] or "step"
        if base[0].isdigit() or base[0] == "-":
            base = f"_{base}"
        number = self._numbers.get(base, 1)
        while f"{base}_{number}" in self._steps:
            number += 1
        self._numbers[base] = number + 1
        return f"{base}_{number}"

    def _after(self, after: Reference | str | Iterable[Reference | str], place_of: str) -> list[Any]:
        names: list[Any] = []
        for one in (after,) if isinstance(after, Reference | str) else after:
            if isinstance(one, Reference):
                self._written(one, f"{place_of}.after")
                names.append(one.step)
            else:
                names.append(one)
        return names

    def _map(self, over: Reference | Iterable[Any] | None, max_in_flight: int | None, place_of: str) -> Any:
        if over is None:
            if max_in_flight is not None:
                raise BadRequest("max_in_flight needs map_over", f"{place_of}.map.max_in_flight")
            return None
        where = f"{place_of}.map.over"
        if not isinstance(over, Reference) and not (isinstance(over, dict) and REF in over):
            if isinstance(over, str | bytes | Mapping):
                raise BadRequest(f"a map goes over a list or a reference, not over a {type(over).__name__}", where)
            over = list(over)
        return {"over": self._literal(over, where, ()), "max_in_flight": max_in_flight}

    def _written(self, reference: Reference, where: str) -> dict[str, Any]:
        if reference.builder is not None and reference.builder is not self:
            raise BadRequest(f"step {reference.step!r} belongs to another workflow: add it to this one", where)
        return reference.written()

    def _literal(self, value: Any, prefix: str, at: Path) -> Any:
        """A copy of `value` in plain data, references written out and small arrays as tensors."""
        if value is None or type(value) in _PLAIN:
            return value
        if isinstance(value, enum.Enum):
            return self._literal(value.value, prefix, at)
        if isinstance(value, Reference):
            return self._written(value, place(prefix, at))
        if len(at) >= MOST_NESTING:
            raise BadRequest(f"lists and dicts are nested deeper than {MOST_NESTING} levels", place(prefix, at[:4]))
        if isinstance(value, Mapping):
            return {self._key(key, prefix, at): self._literal(part, prefix, (*at, key)) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._literal(part, prefix, (*at, i)) for i, part in enumerate(value)]
        if isinstance(value, bytearray | memoryview):
            return bytes(value)
        try:
            if is_array(value):
                found = tensor(value, lambda _: 1)
                return value if isinstance(found, msgspec.msgpack.Ext) and found.code == DESCRIPTOR else found
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadRequest(str(error), place(prefix, at)) from None
        raise BadRequest(
            f"a value of type {type(value).__name__} cannot be sent: use text, numbers, bytes, lists, dicts, arrays and references",
            place(prefix, at),
        )

    def _key(self, key: Any, prefix: str, at: Path) -> str:
        if not isinstance(key, str):
            raise BadRequest(f"the key {quoted(key)} is a {type(key).__name__}: keys are text", place(prefix, at))
        return key
