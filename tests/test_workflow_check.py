"""What comes out of the check is what the user meant."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np

from hexrt.values import decode, encode
from hexrt.workflow.check import check_in_slices, check_workflow
from hexrt.workflow.graph import ITEM, TaskGraph
from hexrt.workflow.model import MapSpec, Needs, StepSpec, Workflow
from tests.workflow_ops import LIMITS, OPS, check, graph, ref, step


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
