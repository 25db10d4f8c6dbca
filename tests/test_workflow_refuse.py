"""A wrong workflow is refused with the place of the fault and what to do: the graph, names, references and devices."""

from __future__ import annotations

from typing import Any

import pytest

from hexrt.core import DeviceKind, TensorMeta
from hexrt.errors import BadRequest
from hexrt.ops.spec import OpSpec, Part, Port
from hexrt.values import decode
from hexrt.workflow.check import GraphLimits, check_workflow
from hexrt.workflow.model import MapSpec, Needs, StepSpec, Workflow
from tests.workflow_ops import LIMITS, check, graph, ref, refused, step

# --- the graph as a whole --------------------------------------------------------------------------------------------


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
        (GraphLimits(max_tasks=2), "steps.c"),
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
    assert refused(generate, limits=limits)[0] == "steps.g.map.over"


# --- names -----------------------------------------------------------------------------------------------------------


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


# --- references ------------------------------------------------------------------------------------------------------


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


# --- devices ---------------------------------------------------------------------------------------------------------


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
