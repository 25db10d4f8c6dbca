"""A checked workflow is what its user meant; a wrong one is refused with the place and what to do."""

from __future__ import annotations

import datetime
import math
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from hexrt.core import DeviceKind, TensorMeta
from hexrt.errors import BadRequest
from hexrt.ops.spec import OpSpec, Part, Port
from hexrt.values import decode, encode, tensor
from hexrt.workflow.check import GraphLimits, check_in_slices, check_workflow
from hexrt.workflow.graph import ITEM, TaskGraph
from hexrt.workflow.model import MapSpec, Needs, StepSpec, Workflow
from tests.workflow_ops import LIMITS, OPS, check, graph, step


def refused(*steps: StepSpec, limits: GraphLimits = LIMITS, **fields: Any) -> tuple[str, str]:
    """(where, message) of the refusal."""
    with pytest.raises(BadRequest) as info:
        check(*steps, limits=limits, **fields)
    assert info.value.message
    return info.value.where, info.value.message


def ref(path: Any) -> dict[str, Any]:
    return {"$ref": path}


# --- what comes out ---------------------------------------------------------------------------------------------


def test_a_diamond_knows_its_neighbours_and_its_order() -> None:
    g = graph("a -> b, a -> c, b -> d, c -> d")
    assert [n.id for n in g.nodes] == ["a", "b", "c", "d"]
    assert [n.predecessors for n in g.nodes] == [(), (0,), (0,), (1, 2)]
    assert [n.successors for n in g.nodes] == [[1, 2], [3], [3], []]
    assert g.order == [0, 1, 2, 3]
    assert g.outputs == (("d", 3, ()),)


def test_steps_may_stand_before_those_they_wait_for() -> None:
    g = check(step("last", ref("middle")), step("middle", after=("first",)), step("first"))
    assert g.order == [2, 1, 0]
    assert g.nodes[0].predecessors == (1,)
    assert g.nodes[2].successors == [1]


def test_a_first_step_that_waits_for_a_later_one_is_put_in_order() -> None:
    assert check(step("a", after=("b",)), step("b")).order == [1, 0]


def test_references_become_holes_filled_with_nil() -> None:
    g = check(step("a"), step("b", {"x": [1, ref("a.rows.-1.text")], "y": "kept"}))
    node = g.nodes[1]
    assert decode(node.inputs) == {"value": {"x": [1, None], "y": "kept"}}
    (hole,) = node.refs
    assert (hole.to, hole.step, hole.path) == (("value", "x", 1), 0, ("rows", -1, "text"))
    (edge,) = g.edges
    assert (edge.producer, edge.consumer, edge.to, edge.path, edge.tensor) == (0, 1, hole.to, hole.path, None)


def test_a_listed_path_reaches_keys_with_dots_and_digits() -> None:
    g = check(step("a"), step("b", ref(["a", "x.y", "0", 0, ""])))
    assert g.nodes[1].refs[0].path == ("x.y", "0", 0, "")


def test_a_json_schema_passed_as_data_keeps_its_pointers() -> None:
    pointer = {"properties": {"p": {"$ref": "#/$defs/P", "description": "a part"}}}
    g = check(step("a", pointer))
    assert decode(g.nodes[0].inputs) == {"value": pointer}
    assert g.nodes[0].refs == ()


def test_two_references_to_one_step_make_one_predecessor() -> None:
    g = check(step("a"), step("b", [ref("a.x"), ref("a.y")], after=("a", "a")))
    assert g.nodes[1].predecessors == (0,)
    assert g.nodes[0].successors == [1]
    assert len(g.edges) == 2


def test_a_map_over_a_list_holds_its_elements_encoded() -> None:
    g = check(step("m", {"$item": "name"}, map=MapSpec([{"name": "x"}, {"name": "y"}], 2)))
    over = g.nodes[0].map
    assert over is not None and over.elements is not None and over.max_in_flight == 2
    assert [decode(e) for e in over.elements] == [{"name": "x"}, {"name": "y"}]
    assert (g.nodes[0].refs[0].step, g.nodes[0].refs[0].path) == (ITEM, ("name",))
    assert g.edges == ()


def test_a_map_over_an_output_is_an_edge_without_a_place() -> None:
    g = check(step("a"), step("m", {"$item": ""}, map=MapSpec(ref("a.rows"))))
    over = g.nodes[1].map
    assert over is not None and (over.elements, over.step, over.path, over.max_in_flight) == (None, 0, ("rows",), 0)
    assert [(e.producer, e.consumer, e.to, e.path) for e in g.edges] == [(0, 1, (), ("rows",))]
    assert g.nodes[1].predecessors == (0,)


def test_fields_of_a_step_override_those_of_the_run_and_the_daemon() -> None:
    g = check(
        step("a"),
        step("b", priority=7, deadline_s=1.5, timeout_s=0.25, retries=3, idempotent=False,
             needs=Needs(device="pool:1", memory_bytes=5)),
        priority=2, deadline_s=9.0, name="n",
    )  # fmt: skip
    a, b = g.nodes
    assert (a.priority, a.deadline_ns, a.timeout_ns, a.retries, a.idempotent) == (2, 0, 600 * 10**9, 0, True)
    assert (a.device, a.memory_bytes) == (None, 0)
    assert (b.priority, b.deadline_ns, b.timeout_ns, b.retries, b.idempotent) == (
        7,
        1_500_000_000,
        250_000_000,
        3,
        False,
    )
    assert (b.device, b.memory_bytes) == ("pool:1", 5)
    assert (g.name, g.priority, g.deadline_ns) == ("n", 2, 9 * 10**9)


def test_idempotency_may_depend_on_the_parameters() -> None:
    get, post = (StepSpec(m, "tool.http", {"url": "http://x", "method": m}) for m in ("GET", "POST"))
    assert [n.idempotent for n in check(get, post).nodes] == [True, False]


def test_params_are_settled_with_their_defaults() -> None:
    g = check(StepSpec("g", "llm.generate", {"model": "m", "stop": ["x"]}, {"prompt": "p"}))
    node = g.nodes[0]
    assert msgspec.to_builtins(node.params) == {
        "model": "m",
        "max_tokens": 128,
        "temperature": 0.0,
        "seed": 0,
        "stop": ("x",),
    }
    assert msgspec.msgpack.decode(node.params_raw, type=type(node.params)) == node.params
    assert g.bytes == len(node.params_raw) + len(node.inputs)


def test_a_port_left_out_gets_its_default() -> None:
    g = check(StepSpec("i", "image.encode", inputs={"image": b"x"}))
    assert decode(g.nodes[0].inputs) == {"image": b"x", "size": 224}


def test_named_outputs_are_what_the_result_holds() -> None:
    g = check(step("a"), step("b"), outputs={"x": ref("a.k.1"), "y": ref("b")})
    assert g.outputs == (("x", 0, ("k", 1)), ("y", 1, ()))


def test_a_literal_tensor_crosses_unopened() -> None:
    array = np.arange(6, dtype="float32").reshape(2, 3)
    workflow = Workflow((step("a", {"x": array}),))
    g = check_workflow(msgspec.msgpack.decode(encode(workflow), type=Workflow), OPS, LIMITS, 1.0)
    assert np.array_equal(decode(g.nodes[0].inputs)["value"]["x"], array)
    direct = check_workflow(workflow, OPS, LIMITS, 1.0)
    assert bytes(direct.nodes[0].inputs) == bytes(g.nodes[0].inputs)


def test_a_long_check_pauses_now_and_then_and_ends_in_the_same_graph() -> None:
    steps = tuple(step(f"s{i}", ref(f"s{i - 1}") if i else "x" * 10) for i in range(2_000))
    slices = check_in_slices(Workflow(steps), OPS, LIMITS, 1.0)
    pauses = 0
    result: TaskGraph | None = None
    while result is None:
        try:
            next(slices)
            pauses += 1
        except StopIteration as done:
            result = done.value
    assert pauses >= 8
    assert result.order == list(range(2_000))


# --- the graph as a whole ---------------------------------------------------------------------------------------


def test_no_steps_are_refused() -> None:
    assert refused()[0] == "steps"


def test_a_cycle_is_named_in_its_order() -> None:
    with pytest.raises(BadRequest) as info:
        graph("x -> a, a -> b, b -> c, c -> a, c -> y")
    assert "a -> b -> c -> a" in info.value.message
    assert info.value.where == "steps.a"


def test_a_cycle_over_data_and_map_is_found() -> None:
    where, message = refused(
        step("a", ref("b")), step("b", {"$item": ""}, map=MapSpec(ref("c"))), step("c", after=("a",))
    )
    assert where == "steps.a"
    assert "a -> c -> b -> a" in message


def test_a_long_cycle_is_cut() -> None:
    n = 300
    message = refused(*(step(f"s{i}", after=(f"s{(i - 1) % n}",)) for i in range(n)))[1]
    assert "s0 -> s1" in message and "288 more" in message and message.count("->") == 13


def test_a_step_that_reads_itself_is_refused() -> None:
    where, message = refused(step("a", ref("a.x")))
    assert where == "steps.a" and "its own output" in message


def test_a_step_after_itself_is_refused() -> None:
    assert refused(step("b"), step("a", after=("b", "a")))[0] == "steps.a.after[1]"


def test_duplicate_ids_are_refused_by_position() -> None:
    where, message = refused(step("a"), step("b"), step("a"))
    assert where == "steps[2].id" and "steps[0]" in message


@pytest.mark.parametrize(
    ("limits", "where"),
    [
        (GraphLimits(max_steps=2), "steps"),
        (GraphLimits(max_depth=2), "steps.c"),
        (GraphLimits(max_tasks=2), "steps.c.map"),
    ],
)
def test_a_chain_of_three_over_a_limit_of_two_is_refused(limits: GraphLimits, where: str) -> None:
    with pytest.raises(BadRequest) as info:
        graph("a -> b -> c", limits)
    assert info.value.where == where
    graph("a -> b", limits)


def test_depth_is_counted_in_whatever_order_the_steps_stand() -> None:
    steps = [step(f"s{i}", after=(f"s{i + 1}",) if i < 9 else ()) for i in range(10)]
    assert refused(*steps, limits=GraphLimits(max_depth=9))[0] == "steps.s0"
    check(*steps, limits=GraphLimits(max_depth=10))


def test_literals_over_the_byte_limit_are_refused_at_the_step_that_exceeds_it() -> None:
    limits = GraphLimits(max_bytes=250)
    assert refused(step("a", "x" * 100), step("b", "x" * 200), limits=limits)[0] == "steps.b.inputs"
    over = MapSpec(["x" * 100] * 3)
    assert refused(step("m", map=over), limits=limits)[0] == "steps.m.map.over"
    params = {"template": "x" * 300}
    assert refused(StepSpec("t", "text.template", params, {"values": {}}), limits=limits)[0] == "steps.t.params"


def test_a_map_of_more_tasks_than_allowed_is_refused() -> None:
    limits = GraphLimits(max_tasks=3)
    check(step("m", map=MapSpec([1, 2, 3])), limits=limits)
    assert refused(step("m", map=MapSpec([1, 2, 3, 4])), limits=limits)[0] == "steps.m.map.over"
    generate = StepSpec("g", "llm.generate", {"model": "m"}, {"prompt": "p"}, map=MapSpec([1, 2]))
    assert refused(generate, limits=limits)[0] == "steps.g.map"


# --- names ------------------------------------------------------------------------------------------------------


def test_an_unknown_op_is_refused_with_the_nearest_name() -> None:
    where, message = refused(step("a", op="embed.txt"))
    assert where == "steps.a.op" and "'embed.text'" in message


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        (step("b", ref("frist")), "steps.b.inputs.value"),
        (step("b", {"k": [0, ref("frist.x")]}), "steps.b.inputs.value.k[1]"),
        (step("b", after=("frist",)), "steps.b.after[0]"),
        (step("b", map=MapSpec(ref("frist"))), "steps.b.map.over"),
    ],
)
def test_a_reference_to_no_step_is_refused_with_the_nearest_name(bad: StepSpec, where: str) -> None:
    found, message = refused(step("first"), bad)
    assert found == where and "did you mean 'first'?" in message


def test_an_unknown_input_is_refused_with_the_nearest_name() -> None:
    where, message = refused(StepSpec("a", "embed.text", inputs={"text": "x", "texts": "x"}))
    assert where == "steps.a.inputs.text" and "'texts'" in message


def test_an_unknown_parameter_is_refused_with_the_nearest_name() -> None:
    where, message = refused(StepSpec("g", "llm.generate", {"model": "m", "max_token": 3}, {"prompt": "p"}))
    assert where == "steps.g.params.max_token" and "'max_tokens'" in message


def test_a_required_parameter_that_is_missing_is_named() -> None:
    for params in ({}, {"seed": 1}):
        where, message = refused(StepSpec("g", "llm.generate", params, {"prompt": "p"}))
        assert where == "steps.g.params.model" and "required" in message


def test_a_required_input_that_is_missing_is_named() -> None:
    where, message = refused(StepSpec("a", "embed.text"))
    assert where == "steps.a.inputs.texts" and "required" in message


def test_a_wrong_output_says_how_to_write_it() -> None:
    where, message = refused(step("a"), outputs={"x": "a.text"})
    assert where == "outputs.x" and '{"$ref": "a.text"}' in message
    assert refused(step("a"), outputs={"x": ref("b")})[0] == "outputs.x"
    assert refused(step("a"), outputs={"x": {"$item": ""}})[0] == "outputs.x"
    assert refused(step("a"), outputs={"": ref("a")})[0] == "outputs."


# --- references -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"$ref": ""}, "empty"),
        ({"$ref": []}, "empty"),
        ({"$ref": "a..b"}, "empty key"),
        ({"$ref": "a."}, "empty key"),
        ({"$ref": ".a"}, "empty key"),
        ({"$ref": "0.a"}, "begins with the id"),
        ({"$ref": [0, "a"]}, "begins with the id"),
        ({"$ref": ["a", 1.5]}, "keys"),
        ({"$ref": ["a", True]}, "keys"),
        ({"$ref": ["a", 10**12]}, "out of range"),
        ({"$ref": None}, "needs text"),
        ({"$ref": 3}, "needs text"),
        ({"$ref": {"$ref": "a"}}, "needs text"),
        ({"$ref": "a", "default": 1}, "take out 'default'"),
        ({"$ref": "a", "$item": ""}, "take out '$item'"),
        ({"$ref": "a" + ".b" * 100}, "at most"),
        ({"$file": "x.png"}, "client's side"),
        ({"$item": ""}, "add `map`"),
        ({"$item": None}, "needs text"),
    ],
)
def test_a_malformed_reference_is_refused_at_its_place(written: dict[str, Any], says: str) -> None:
    where, message = refused(step("a"), step("b", [1, {"k": written}]))
    assert where == "steps.b.inputs.value[1].k" and says in message


@pytest.mark.parametrize("written", [ref("a"), {"$item": ""}, {"$file": "x"}, {"$ref": 3}])
def test_params_hold_no_references(written: dict[str, Any]) -> None:
    bad = StepSpec("g", "llm.generate", {"model": "m", "stop": [written]}, {"prompt": "p"})
    where, message = refused(step("a"), bad)
    assert where == "steps.g.params.stop[0]" and "`inputs`" in message


def test_a_listed_map_element_holds_no_reference() -> None:
    assert refused(step("a"), step("m", map=MapSpec([1, {"x": ref("a")}])))[0] == "steps.m.map.over[1].x"


@pytest.mark.parametrize("over", [3, "abc", None, {}, {"$item": ""}, {"x": 1}, {"$file": "x"}, {"$ref": "a", "b": 1}])
def test_a_map_goes_over_a_list_or_an_output_only(over: Any) -> None:
    assert refused(step("a"), step("m", map=MapSpec(over)))[0] == "steps.m.map.over"


def test_an_empty_map_is_allowed() -> None:
    over = check(step("m", map=MapSpec([]))).nodes[0].map
    assert over is not None and over.elements == ()


def test_the_output_of_a_map_is_a_list() -> None:
    mapped = step("m", map=MapSpec([1, 2]))
    assert check(mapped, step("b", ref("m.1.text"))).nodes[1].refs[0].path == (1, "text")
    where, message = refused(mapped, step("b", ref("m.text")))
    assert where == "steps.b.inputs.value" and "`m.0.text`" in message
    assert "no position 2" in refused(mapped, step("b", ref("m.2")))[1]
    assert "no position -3" in refused(mapped, step("b", ref("m.-3")))[1]
    assert refused(mapped, outputs={"x": ref("m.text")})[0] == "outputs.x"


# --- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        (StepSpec("a", "embed.text", inputs={"texts": [1]}), "steps.a.inputs.texts[0]"),
        (StepSpec("a", "embed.text", inputs={"texts": None}), "steps.a.inputs.texts"),
        (StepSpec("a", "index.build", {"name": "x"}, {"documents": [{"id": "1"}]}), "steps.a.inputs.documents[0].text"),
        (StepSpec("a", "image.encode", inputs={"image": b"", "size": "big"}), "steps.a.inputs.size"),
        (StepSpec("a", "code.python", {"cpu_s": "2"}, {"code": "1"}), "steps.a.params.cpu_s"),
        (StepSpec("a", "index.build", {"name": "x", "kind": "tree"}, {"documents": []}), "steps.a.params.kind"),
        (StepSpec("a", "search.vector", {"index": "x", "k": 0}, {"vectors": []}), "steps.a.params.k"),
        (StepSpec("a", "tool.http", {"url": "ftp://x"}), "steps.a.params.url"),
    ],
)
def test_a_literal_of_the_wrong_type_is_refused_at_its_place(bad: StepSpec, where: str) -> None:
    assert refused(bad)[0] == where


def test_a_port_that_holds_a_reference_is_left_to_the_host() -> None:
    check(step("a"), StepSpec("b", "embed.text", inputs={"texts": ["x", ref("a")]}))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["inputs.value", "inputs.value.x[1]", "params.temperature", "map.over[2]"])
def test_a_number_that_is_not_finite_is_refused_wherever_it_stands(number: float, where: str) -> None:
    bad = {
        "inputs.value": step("a", number),
        "inputs.value.x[1]": step("a", {"x": [1.0, number]}),
        "params.temperature": StepSpec("a", "llm.generate", {"model": "m", "temperature": number}, {"prompt": ""}),
        "map.over[2]": step("a", map=MapSpec([1.0, 2.0, number])),
    }[where]
    found, message = refused(bad)
    assert found == f"steps.a.{where}" and "finite" in message


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0, 1e12])
def test_times_that_make_no_sense_are_refused(seconds: float) -> None:
    for field in ("deadline_s", "timeout_s"):
        fields: dict[str, Any] = {field: seconds}
        with pytest.raises(BadRequest) as info:
            check_workflow(Workflow((step("a", **fields),)), OPS, LIMITS, 1.0)
        assert info.value.where == f"steps.a.{field}"
    with pytest.raises(BadRequest):
        check_workflow(Workflow((step("a"),), deadline_s=seconds), OPS, LIMITS, 1.0)


@pytest.mark.parametrize(
    "value", [datetime.datetime(2020, 1, 1), {1, 2}, object(), 2**64, -(2**63) - 1, [1, 2**70], "\ud800"]
)
def test_a_value_that_cannot_be_sent_is_refused(value: Any) -> None:
    with pytest.raises(BadRequest) as info:
        check_workflow(Workflow((step("a", {"x": value}),)), OPS, LIMITS, 1.0)
    assert info.value.where.startswith("steps.a.inputs")


def test_a_date_on_the_wire_is_refused() -> None:
    when = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    assert refused(step("a", [when]))[0] == "steps.a.inputs.value[0]"


def test_keys_that_are_no_text_are_refused() -> None:
    where, message = refused(step("a", {"x": {1: 2}}))
    assert where == "steps.a.inputs.value.x" and "keys are text" in message


def nested(levels: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"k": value} if kind == "dict" else [value]
    return value


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_nesting_is_counted_with_the_dict_of_inputs(kind: str) -> None:
    limits = GraphLimits(max_nesting=4)
    check(step("a", nested(3, kind)), limits=limits)
    assert "deeper than the 4" in refused(step("a", nested(4, kind)), limits=limits)[1]
    assert refused(step("a", map=MapSpec([nested(4, kind)])), limits=limits)[0].startswith("steps.a.map.over")


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_very_deep_values_are_refused_whatever_the_limit_says(kind: str) -> None:
    for limits in (LIMITS, GraphLimits(max_nesting=10**6)):
        assert "nested" in refused(step("a", nested(900, kind)), limits=limits)[1]
        bad = StepSpec("a", "code.python", {"cpu_s": nested(900, kind)}, {"code": ""})
        assert refused(bad, limits=limits)[0].startswith("steps.a.params")


# --- tensors ----------------------------------------------------------------------------------------------------


def test_tensors_of_two_steps_must_agree() -> None:
    embed = StepSpec("e", "embed.text", inputs={"texts": "x"})
    g = check(embed, StepSpec("s", "search.vector", {"index": "i"}, {"vectors": ref("e")}))
    assert str(g.edges[0].tensor) == "float32[?, 384]"
    where, message = refused(embed, StepSpec("d", "tensor.double", inputs={"x": ref("e")}))
    assert where == "steps.d.inputs.x" and "float32[?, 384]" in message and "float64[2, ?]" in message


def test_a_tensor_under_a_key_must_agree_too() -> None:
    image = StepSpec("i", "image.encode", inputs={"image": b"x"})
    bad = StepSpec("s", "search.vector", {"index": "i"}, {"vectors": ref("i.embedding")})
    assert refused(image, bad)[0] == "steps.s.inputs.vectors"
    check(image, StepSpec("s", "search.vector", {"index": "i"}, {"vectors": ref("i.other")}))


def test_an_element_of_a_map_is_the_tensor_and_the_whole_is_a_list() -> None:
    embed = StepSpec("e", "embed.text", inputs={"texts": "x"}, map=MapSpec([1, 2]))
    assert refused(embed, StepSpec("d", "tensor.double", inputs={"x": ref("e.0")}))[0] == "steps.d.inputs.x"
    check(embed, StepSpec("d", "tensor.double", inputs={"x": ref("e")}))
    check(embed, step("m", {"$item": ""}, map=MapSpec(ref("e"))))


def test_a_reference_does_not_go_into_a_tensor() -> None:
    embed = StepSpec("e", "embed.text", inputs={"texts": "x"})
    assert "refer to the whole" in refused(embed, step("b", ref("e.0")))[1]
    image = StepSpec("i", "image.encode", inputs={"image": b"x"})
    assert "refer to the whole" in refused(image, step("b", ref("i.embedding.0")))[1]
    where, message = refused(embed, step("m", map=MapSpec(ref("e"))))
    assert where == "steps.m.map.over" and "a map goes over a list" in message


def test_a_literal_tensor_must_fit_its_port() -> None:
    good = StepSpec("d", "tensor.double", inputs={"x": tensor(np.zeros((2, 5)))})
    check(good)
    for array in (np.zeros((3, 5)), np.zeros(2), np.zeros((2, 5), "float32")):
        bad = StepSpec("d", "tensor.double", inputs={"x": tensor(array)})
        assert refused(bad)[0] == "steps.d.inputs.x"
    where, message = refused(StepSpec("e", "embed.text", inputs={"texts": tensor(np.zeros(3))}))
    assert where == "steps.e.inputs.texts" and "tensor" in message


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["float32", [2], b"1234567"]),
        msgspec.msgpack.encode(["float32", [-1, -2], b"12345678"]),
        msgspec.msgpack.encode(["object", [1], b"12345678"]),
        msgspec.msgpack.encode(["int8", [1] * 100, b"1"]),
        msgspec.msgpack.encode({"a": 1}),
    ],
)
def test_a_damaged_tensor_is_refused(payload: bytes) -> None:
    assert refused(step("a", [msgspec.msgpack.Ext(1, payload)]))[0] == "steps.a.inputs.value[0]"


def test_an_unknown_extension_is_refused() -> None:
    assert "extension" in refused(step("a", [msgspec.msgpack.Ext(7, b"x")]))[1]


# --- devices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["pool", "pool:0", "pool:12"])
def test_a_device_that_runs_the_op_is_kept_to(device: str) -> None:
    assert check(step("a", needs=Needs(device=device))).nodes[0].device == device


@pytest.mark.parametrize(
    "device", ["npu", "cuda:0", "gpu", "pol", "pool:", "pool:x", "pool:-1", "pool:01", "pool:99999", ""]
)
def test_a_device_that_cannot_run_the_op_is_refused(device: str) -> None:
    assert refused(step("a", needs=Needs(device=device)))[0] == "steps.a.needs.device"


def test_one_part_that_can_run_there_is_enough() -> None:
    parts = (Part("read", (DeviceKind.POOL,), "a:b"), Part("run", (DeviceKind.NPU,), "a:b"))
    op = OpSpec("two", "", parts)
    workflow = Workflow((StepSpec("a", "two", needs=Needs(device="npu:0")),))
    assert check_workflow(workflow, {"two": op}, LIMITS, 1.0).nodes[0].device == "npu:0"


def test_an_op_whose_default_is_a_tensor_port_takes_its_default() -> None:
    op = OpSpec("o", "", (Part("run", (DeviceKind.POOL,), "a:b"),), inputs={
        "x": Port(list[int], required=False, default=[1], tensor=TensorMeta("int64", (None,))),
    })  # fmt: skip
    node = check_workflow(Workflow((StepSpec("a", "o"),)), {"o": op}, LIMITS, 1.0).nodes[0]
    assert decode(node.inputs) == {"x": [1]}


PROBE = """
import sys
import msgspec
from hexrt.ops.noop import OP
from hexrt.workflow.check import GraphLimits, check_workflow
from hexrt.workflow.model import Workflow
workflow = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Workflow)
graph = check_workflow(workflow, {"noop": OP}, GraphLimits(), 1.0)
assert not {"numpy", "yaml", "hexrt.workflow.load"} & sys.modules.keys()
sys.stdout.buffer.write(bytes(graph.nodes[0].inputs))
"""


def test_the_daemon_checks_tensors_without_numpy() -> None:
    array = np.arange(4, dtype="int16")
    workflow = encode(Workflow((step("a", {"x": array}),)))
    result = subprocess.run([sys.executable, "-c", PROBE], input=workflow, capture_output=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr.decode()
    assert np.array_equal(decode(result.stdout)["value"]["x"], array)
