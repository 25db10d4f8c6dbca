"""From what a user wrote to a `TaskGraph`, or a BadRequest that names the step and field and says what to do.

The only maker of a `TaskGraph`. Takes a `Workflow` whose field types are right already (it came out of a decoder, `load` or `build`).
Says nothing about devices or models that happen to be absent, quotas or rights. Pure.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from hexrt.core import DeviceKind
from hexrt.errors import BadRequest
from hexrt.ops.spec import OpSpec
from hexrt.workflow.edges import connect, produced
from hexrt.workflow.fields import did_you_mean, place, quoted
from hexrt.workflow.graph import ITEM, InputRef, MapOver, Node, TaskGraph
from hexrt.workflow.model import MapSpec, StepSpec, Workflow
from hexrt.workflow.order import SLICE, link
from hexrt.workflow.ports import OpFacts, PortReader
from hexrt.workflow.references import Path, as_reference

EMPTY = msgspec.Raw(b"\x80")
KINDS = frozenset(kind.value for kind in DeviceKind)
NO_REFS: tuple[InputRef, ...] = ()
MOST_OUTPUTS = 10_000  # or one a step
MOST_SECONDS = 31_536_000


class GraphLimits(msgspec.Struct, frozen=True):
    """What a workflow may be at most. `max_nesting` counts lists and dicts in each other in inputs and params, 100 at most."""

    max_steps: int = 100_000
    max_depth: int = 10_000
    max_bytes: int = 64 << 20
    max_nesting: int = 32
    max_tasks: int = 1_000_000


def check_workflow(
    workflow: Workflow, ops: Mapping[str, OpSpec], limits: GraphLimits, default_timeout_s: float
) -> TaskGraph:
    """The graph of `workflow`. Raises BadRequest."""
    slices = check_in_slices(workflow, ops, limits, default_timeout_s)
    while True:
        try:
            next(slices)
        except StopIteration as done:
            graph: TaskGraph = done.value
            return graph


def check_in_slices(
    workflow: Workflow,
    ops: Mapping[str, OpSpec],
    limits: GraphLimits,
    default_timeout_s: float,
    facts: dict[str, OpFacts] | None = None,
) -> Generator[None, None, TaskGraph]:
    """The same, yielding every few hundred steps or megabyte of literals; the return value is the graph.

    `facts` is filled with what is worked out about the ops, and spares the next check of the same ops that work.
    """
    steps = workflow.steps
    if not steps:
        raise BadRequest("a workflow needs at least one step", "steps")
    if len(steps) > limits.max_steps:
        raise BadRequest(
            f"{len(steps)} steps are more than the {limits.max_steps} allowed: split it or use `map`", "steps"
        )
    index = {step.id: i for i, step in enumerate(steps)}
    if len(index) < len(steps):
        raise _duplicate(steps)
    checker = _Checker(
        ops, limits, index, workflow.priority, _ns(default_timeout_s, "default_timeout_s"), {} if facts is None else facts
    )  # fmt: skip
    deadline_ns = 0 if workflow.deadline_s is None else _ns(workflow.deadline_s, "deadline_s")
    nodes: list[Node] = []
    named: list[tuple[int, int, str]] = []
    for i, step in enumerate(steps):
        try:
            listed = None
            if step.map is not None and isinstance(step.map.over, list | tuple):
                listed = yield from checker.listed(step, step.map.over)
            nodes.append(checker.node(i, step, listed))
        except BadRequest as error:
            raise BadRequest(error.message, f"steps.{step.id}.{error.where}".rstrip(".")) from None
        if checker.reader.named:
            named += [(handle, size, f"steps.{step.id}.{where}") for handle, size, where in checker.reader.named]
            checker.reader.named.clear()
        if checker.reader.work >= checker.pause_at:
            checker.pause_at = checker.reader.work + SLICE
            yield
    order = yield from link(nodes, limits.max_depth)
    edges = yield from connect(nodes, checker.consumers)
    return TaskGraph(
        workflow.name, nodes, edges, order, _outputs(workflow, nodes, index), deadline_ns, workflow.priority,
        checker.bytes, tuple(named),
    )  # fmt: skip


@dataclass(eq=False, slots=True)
class _Checker:
    """Makes the nodes, one after the other; `where` of what it raises is relative to the step."""

    ops: Mapping[str, OpSpec]
    limits: GraphLimits
    index: Mapping[str, int]
    priority: int
    timeout_ns: int
    facts: dict[str, OpFacts]
    reader: PortReader = field(init=False)
    bytes: int = 0
    tasks: int = 0
    consumers: list[int] = field(default_factory=list)  # of data
    pause_at: int = SLICE

    def __post_init__(self) -> None:
        self.reader = PortReader(self.limits.max_nesting)

    def listed(self, step: StepSpec, over: Sequence[Any]) -> Generator[None, None, tuple[msgspec.Raw, ...]]:
        """The elements that a map step lists, encoded."""
        facts = self.facts.get(step.op) or self._op(step.op)
        if self.tasks + facts.parts * len(over) > self.limits.max_tasks:
            raise BadRequest(
                f"with its {len(over)} elements there are more than the {self.limits.max_tasks} tasks allowed: list fewer and "
                "larger ones, or raise limits.max_tasks",
                "map.over",
            )
        return (yield from self.reader.read_elements(over, partial(self._add_bytes, where="map.over")))

    def node(self, i: int, step: StepSpec, listed: tuple[msgspec.Raw, ...] | None) -> Node:
        facts = self.facts.get(step.op) or self._op(step.op)
        if step.params:
            params, params_raw = self.reader.read_params(facts, step.params)
            self._add_bytes(len(params_raw), "params")
        else:
            if facts.fault is not None:
                raise facts.fault
            params, params_raw = facts.params, facts.params_raw
        over = None if step.map is None else self._map(step.map, listed)
        inputs, refs = EMPTY, NO_REFS
        if step.inputs or facts.needs_inputs:
            inputs, refs = self._inputs(facts, step.inputs, over is not None)
        self.reader.work += 1
        self.tasks += facts.parts if over is None or over.elements is None else facts.parts * len(over.elements)
        if refs or over is not None:
            self.consumers.append(i)
        if self.tasks > self.limits.max_tasks:
            raise BadRequest(
                f"with this step there are more than the {self.limits.max_tasks} tasks allowed", "map" if over else ""
            )
        op, needs, idempotent = facts.op, step.needs, step.idempotent
        if idempotent is None:
            idempotent = op.idempotent if op.idempotent is True or op.idempotent is False else op.is_idempotent(params)
        return Node(
            i, step.id, op, params, params_raw, inputs, refs, over,
            self._predecessors(i, step, refs, over) if step.after or refs or over is not None else (), [],
            None if needs is None or needs.device is None else _device(needs.device, facts),
            0 if needs is None else needs.memory_bytes,
            self.priority if step.priority is None else step.priority,
            0 if step.deadline_s is None else _ns(step.deadline_s, "deadline_s"),
            self.timeout_ns if step.timeout_s is None else _ns(step.timeout_s, "timeout_s"),
            step.retries, idempotent,
        )  # fmt: skip

    def _op(self, name: str) -> OpFacts:
        op = self.ops.get(name)
        if op is None:
            raise BadRequest(f"there is no op {quoted(name)}{did_you_mean(name, self.ops)}", "op")
        facts = self.facts[name] = OpFacts.of(op, self.reader)
        return facts

    def _add_bytes(self, size: int, where: str) -> None:
        self.bytes += size
        self.reader.work += size >> 11
        if self.bytes > self.limits.max_bytes:
            raise BadRequest(
                f"inputs and params hold more than the {self.limits.max_bytes} bytes allowed: pass large data by a step's "
                "output or a file on the daemon's machine",
                where,
            )

    def _find(self, name: str, where: str) -> int:
        i = self.index.get(name)
        if i is None:
            raise BadRequest(f"there is no step {quoted(name)}{did_you_mean(name, self.index)}", where)
        return i

    def _inputs(
        self, facts: OpFacts, inputs: Mapping[str, Any], mapped: bool
    ) -> tuple[msgspec.Raw, tuple[InputRef, ...]]:
        raw, holes = self.reader.read_inputs(facts, inputs)
        refs = []
        for hole in holes:
            name, path = hole.reference.step, hole.reference.path
            if name is None:
                if not mapped:
                    raise BadRequest(
                        "`$item` is only known in a step with `map`: add `map`, or use `$ref`", place("inputs", hole.to)
                    )
                step = ITEM
            else:
                step = self.index.get(name, ITEM)
                if step == ITEM:
                    self._find(name, place("inputs", hole.to))
            refs.append(InputRef(hole.to, step, path))
        self._add_bytes(len(raw), "inputs")
        return raw, tuple(refs)

    def _map(self, spec: MapSpec, listed: tuple[msgspec.Raw, ...] | None) -> MapOver:
        cap = spec.max_in_flight or 0
        if listed is not None:
            return MapOver(listed, 0, (), cap)
        over = spec.over
        try:
            reference = as_reference(over) if isinstance(over, dict) else None
            if reference is None or reference.step is None:
                raise BadRequest('a map goes over a list, or over a step\'s output: write {"$ref": "STEP.KEY"}')
        except BadRequest as error:
            raise BadRequest(error.message, "map.over") from None
        return MapOver(None, self._find(reference.step, "map.over"), reference.path, cap)

    def _predecessors(
        self, i: int, step: StepSpec, refs: tuple[InputRef, ...], over: MapOver | None
    ) -> tuple[int, ...]:
        if over is None and not refs:
            try:
                known = {*map(self.index.__getitem__, step.after)}
            except KeyError:
                known = {i}
            if i not in known:
                return tuple(known)
        found: dict[int, None] = {}
        for position, name in enumerate(step.after):
            if name == step.id:
                raise BadRequest("a step cannot come after itself: take it out", f"after[{position}]")
            found[self._find(name, f"after[{position}]")] = None
        for ref in refs:
            if ref.step != ITEM:
                found[ref.step] = None
        if over is not None and over.elements is None:
            found[over.step] = None
        return tuple(found)


def _duplicate(steps: tuple[StepSpec, ...]) -> BadRequest:
    first: dict[str, int] = {}
    for i, step in enumerate(steps):
        before = first.setdefault(step.id, i)
        if before != i:
            return BadRequest(f"steps[{before}] is called {step.id!r} too: give each step its own id", f"steps[{i}].id")
    raise AssertionError("no duplicate among steps that were found to hold one")


def _ns(seconds: float, where: str) -> int:
    if not 0 < seconds <= MOST_SECONDS:
        raise BadRequest(f"{seconds} seconds is not above 0 and at most {MOST_SECONDS}", where)
    return max(1, round(seconds * 1e9))


def _device(name: str, facts: OpFacts) -> str:
    kind, colon, number = name.partition(":")
    if kind not in KINDS:
        raise BadRequest(f"there is no device kind {quoted(kind)}{did_you_mean(kind, KINDS)}", "needs.device")
    if colon and not (number.isascii() and number.isdigit() and len(number) <= 4 and str(int(number)) == number):
        raise BadRequest(
            f"{quoted(name)} is no device: write a kind (`{kind}`) or a device (`{kind}:0`)", "needs.device"
        )
    if kind not in facts.kinds:
        kinds = ", ".join(sorted(facts.kinds))
        raise BadRequest(f"op {facts.op.name!r} runs on {kinds}, and no part of it on {kind}", "needs.device")
    return name


def _outputs(workflow: Workflow, nodes: list[Node], index: Mapping[str, int]) -> tuple[tuple[str, int, Path], ...]:
    if not workflow.outputs:
        return tuple([(node.id, node.index, ()) for node in nodes if not node.successors])
    if len(workflow.outputs) > max(MOST_OUTPUTS, len(nodes)):
        raise BadRequest(f"{len(workflow.outputs)} outputs are more than the {MOST_OUTPUTS} allowed", "outputs")
    found = []
    for name, value in workflow.outputs.items():
        where = place("outputs", (name,))
        if not name or len(name) > 200:
            raise BadRequest("an output's name has 1 to 200 characters", where)
        try:
            reference = as_reference(value) if isinstance(value, dict) else None
            if reference is None or reference.step is None:
                hint = value if isinstance(value, str) and value.partition(".")[0] in index else "STEP.KEY"
                raise BadRequest(f'an output is a reference: write {{"$ref": "{hint}"}}')
            if reference.step not in index:
                raise BadRequest(f"there is no step {quoted(reference.step)}{did_you_mean(reference.step, index)}")
            produced(nodes[index[reference.step]], reference.path)
        except BadRequest as error:
            raise BadRequest(error.message, where) from None
        found.append((name, index[reference.step], reference.path))
    return tuple(found)
