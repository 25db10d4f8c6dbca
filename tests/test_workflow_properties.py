"""What holds for every workflow, over many that nobody thought of."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hexrt.errors import BadRequest
from hexrt.values import decode
from hexrt.workflow.check import check_workflow
from hexrt.workflow.graph import TaskGraph
from hexrt.workflow.load import dump_workflow, load_workflow
from hexrt.workflow.model import MapSpec, StepSpec, Workflow
from hexrt.workflow.references import parse_path, write_path
from hexrt.workflow.syntax import parse, write
from tests.workflow_ops import LIMITS, OPS, check


def with_settings(examples: int) -> settings:
    """The same cases in every run, and no clock: the machine may be busy."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )


EXAMPLES = Path(__file__).parent / "data" / "workflows"
PLAIN = [
    msgspec.to_builtins(load_workflow(path)) for path in sorted(EXAMPLES.iterdir()) if path.suffix in {".yaml", ".json"}
]

texts = st.text(max_size=12) | st.sampled_from(
    ["yes", "1e3", "0o7", "12:30", "2020-01-01", "~", "null", "<<", "010", " a", "a: b", "#"]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(texts, v, max_size=4), max_leaves=12)


@st.composite
def dags(draw: st.DrawFn) -> list[StepSpec]:
    """Steps in an order of their own; each depends on some that rank below it, by `after`, data or map."""
    n = draw(st.integers(1, 14))
    steps = []
    for rank in range(n):
        below, most = st.integers(0, max(0, rank - 1)), 3 if rank else 0
        after = tuple(f"s{i}" for i in draw(st.lists(below, max_size=most)))
        data = [{"$ref": f"s{i}"} for i in draw(st.lists(below, max_size=most))]
        mapped = {"$ref": f"s{draw(below)}"} if rank and draw(st.booleans()) else None
        inputs = {"value": {"x": data, "y": draw(scalars)}} if data else {}
        steps.append(
            StepSpec(f"s{rank}", "noop", inputs=inputs, after=after, map=None if mapped is None else MapSpec(mapped))
        )
    return draw(st.permutations(steps))


def assert_consistent(graph: TaskGraph) -> None:
    n = len(graph.nodes)
    position = {i: at for at, i in enumerate(graph.order)}
    assert sorted(graph.order) == list(range(n))
    for i, node in enumerate(graph.nodes):
        assert node.index == i
        assert len(set(node.predecessors)) == len(node.predecessors)
        assert all(position[p] < position[i] for p in node.predecessors)
    links = {(p, node.index) for node in graph.nodes for p in node.predecessors}
    assert {(node.index, s) for node in graph.nodes for s in node.successors} == links
    assert sum(len(node.successors) for node in graph.nodes) == len(links)
    assert {(e.producer, e.consumer) for e in graph.edges} <= links
    for node in graph.nodes:
        inputs = decode(node.inputs)
        for ref in node.refs:
            hole: Any = inputs
            for key in ref.to:
                hole = hole[key]
            assert hole is None


@with_settings(100)
@given(dags())
def test_neighbours_and_order_of_any_dag_agree(steps: list[StepSpec]) -> None:
    graph = check(*steps)
    assert_consistent(graph)
    named = {s.id: i for i, s in enumerate(steps)}
    for spec, node in zip(steps, graph.nodes, strict=True):
        assert {named[a] for a in spec.after} <= set(node.predecessors)
    assert [name for name, _, _ in graph.outputs] == [n.id for n in graph.nodes if not n.successors]


@with_settings(100)
@given(dags(), st.data())
def test_any_dag_with_one_way_back_is_refused_as_a_cycle(steps: list[StepSpec], data: st.DataObject) -> None:
    graph = check(*steps)
    links = [(p, node.index) for node in graph.nodes for p in node.predecessors]
    if not links:
        return
    first, last = data.draw(st.sampled_from(links))
    back = msgspec.structs.replace(steps[first], after=(*steps[first].after, steps[last].id))
    try:
        check(*steps[:first], back, *steps[first + 1 :])
    except BadRequest as error:
        assert " -> " in error.message
    else:
        raise AssertionError("a cycle was let through")


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [at, *(p for key, part in inner for p in places(part, (*at, key)))]


junk = values | st.sampled_from([
    float("nan"), float("inf"), 2**63, -1, 0, b"\x00", [], {}, {"$ref": ""}, {"$ref": "a.b"}, {"$item": ""}, {"$file": "x"},
    {"$ref": ["a"], "$item": 1}, {1: 2}, msgspec.msgpack.Ext(1, b"x"), msgspec.msgpack.Ext(9, b""), "first", "noop", "npu:0", "x" * 300,
])  # fmt: skip


@st.composite
def mutants(draw: st.DrawFn) -> Any:
    """An example with one to three places replaced, taken out, doubled or given one more key."""
    data = _listed(copy.deepcopy(draw(st.sampled_from(PLAIN))))
    for _ in range(draw(st.integers(1, 3))):
        *path, key = draw(st.sampled_from(places(data)[1:] or [("steps",)]))
        into = data
        for part in path:
            into = into[part]
        match draw(st.sampled_from(["replace", "remove", "double", "add"])):
            case "remove":
                del into[key]
            case "double" if isinstance(into, list):
                into.insert(key, copy.deepcopy(into[key]))
            case "add" if isinstance(into, dict):
                into[draw(texts)] = copy.deepcopy(draw(junk))
            case _:
                into[key] = copy.deepcopy(draw(junk))
        if not data:
            break
    return data


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(part) for key, part in value.items()}
    return [_listed(part) for part in value] if isinstance(value, list | tuple) else value


@with_settings(300)
@given(mutants())
def test_a_mutated_workflow_is_checked_or_refused_and_never_breaks_the_daemon(data: Any) -> None:
    raw = msgspec.msgpack.encode(data)
    try:
        workflow = msgspec.msgpack.decode(raw, type=Workflow)
    except msgspec.ValidationError:
        return
    try:
        graph = check_workflow(workflow, OPS, LIMITS, 600.0)
    except BadRequest as error:
        assert error.message and len(str(error)) < 5_000
    else:
        assert_consistent(graph)


@with_settings(150)
@given(mutants())
def test_a_mutated_file_is_loaded_or_refused(data: Any) -> None:
    try:
        text = json.dumps(data)
    except TypeError:
        return
    try:
        check_workflow(load_workflow(text, "json", base_dir=EXAMPLES), OPS, LIMITS, 600.0)
    except BadRequest as error:
        assert error.message and "\n" not in error.where


@with_settings(100)
@given(st.text(max_size=200) | st.text("[]{}:,-&*!|>'\"%@` \n\tab1#?<", max_size=60))
def test_any_text_is_loaded_or_refused(text: str) -> None:
    for format in ("yaml", "json"):
        try:
            load_workflow(text, format)
        except BadRequest as error:
            assert error.message


@with_settings(100)
@given(st.dictionaries(texts, values, max_size=5).filter(bool))
def test_what_is_written_is_read_back(data: Any) -> None:
    for format in ("yaml", "json"):
        assert parse(write(data, format), format) == data


@with_settings(100)
@given(dags())
def test_a_workflow_survives_its_file(steps: list[StepSpec]) -> None:
    workflow = Workflow(tuple(steps), name="w", priority=3)
    for format in ("yaml", "json"):
        assert load_workflow(dump_workflow(workflow, format), format) == workflow


@with_settings(100)
@given(st.lists(st.text(max_size=8) | st.integers(-(10**9) + 1, 10**9 - 1), min_size=1, max_size=6))
def test_a_written_path_is_read_back(path: list[str | int]) -> None:
    written = write_path(path)
    assert tuple(written) == tuple(path) if isinstance(written, list) else parse_path(written) == tuple(path)
