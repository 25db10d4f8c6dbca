"""A literal, number or tensor that cannot be right is refused at its place."""

from __future__ import annotations

import datetime
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from hexrt import values
from hexrt.client.calls import Wire, submit
from hexrt.core import Durability
from hexrt.errors import BadRequest
from hexrt.ops.registry import load_ops
from hexrt.values import tensor
from hexrt.workflow.check import GraphLimits, check_in_slices, check_workflow
from hexrt.workflow.load import load_workflow
from hexrt.workflow.model import MapSpec, StepSpec, Workflow
from tests.workflow_ops import LIMITS, OPS, check, ref, refused, step

# --- values ----------------------------------------------------------------------------------------------------------


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


# --- tensors ---------------------------------------------------------------------------------------------------------


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


def test_a_step_of_too_many_values_is_refused_rather_than_walked_for_seconds() -> None:
    assert "values in this" in refused(step("a", [[]] * 300_000))[1]
    check(step("a", list(range(600_000))), step("b", ["x"] * 600_000))


def test_a_step_of_too_many_references_is_refused() -> None:
    assert "at most 10000 references" in refused(step("a"), step("b", [ref("a")] * 10_001))[1]
    assert len(check(step("a"), step("b", [ref("a")] * 10_000)).edges) == 10_000


def test_too_many_outputs_are_refused() -> None:
    assert refused(step("a"), outputs={f"o{i}": ref("a") for i in range(10_001)})[0] == "outputs"


@pytest.mark.parametrize("over", [[1] * 50_000, [None, 1] * 25_000, [[i] for i in range(50_000)]])
def test_a_long_listed_map_is_read_with_pauses_and_as_it_was_written(over: list[Any]) -> None:
    written = Workflow((StepSpec("m", "noop", map=MapSpec(over)),))
    slices = check_in_slices(written, load_ops()[0], GraphLimits(), 600.0)
    pauses = 0
    while True:
        try:
            next(slices)
            pauses += 1
        except StopIteration as done:
            elements = done.value.nodes[0].map.elements
            break
    assert pauses >= 50 and [values.decode(element) for element in elements] == over


def test_a_fault_deep_in_a_listed_map_is_named_by_its_position() -> None:
    over = [{"n": 1}] * 12_345 + [{"n": float("nan")}]
    with pytest.raises(BadRequest) as refused:
        check_workflow(Workflow((StepSpec("m", "noop", map=MapSpec(over)),)), load_ops()[0], GraphLimits(), 600.0)
    assert refused.value.where == "steps.m.map.over[12345].n"


def test_a_map_that_lists_more_than_the_tasks_allowed_is_refused_before_it_is_read() -> None:
    over = [object()] * 101  # reading one would name it instead
    limits = GraphLimits(max_tasks=100)
    with pytest.raises(BadRequest, match=r"101 elements.*limits\.max_tasks"):
        check_workflow(Workflow((StepSpec("m", "noop", map=MapSpec(over)),)), load_ops()[0], limits, 600.0)


BIG = 2**70


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        (StepSpec("a", "noop", {}, {"value": [1, {"x": BIG}]}), "steps.a.inputs.value[1].x"),
        (StepSpec("a", "noop", {"p": -BIG}), "steps.a.params.p"),
        (StepSpec("a", "noop", map=MapSpec([1, BIG])), "steps.a.map.over[1]"),
        (StepSpec("a", "noop", retries=BIG), "steps.a.retries"),
        (StepSpec("a", "noop", {}, {"value": [object()]}), "steps.a.inputs.value[0]"),
        (StepSpec("a", "noop", {}, {"value": ["\ud800"]}), "steps.a.inputs.value[0]"),
    ],
)
def test_the_client_names_the_field_that_no_message_can_carry(bad: StepSpec, where: str) -> None:
    with pytest.raises(BadRequest) as info:
        Wire().request(submit(Workflow((StepSpec("fine", "noop"), bad)), Durability.SYNC))
    assert info.value.where == where
    assert "64 bits" in info.value.message or "[0]" in where


def test_a_value_without_end_is_refused_by_the_client() -> None:
    knot: list[Any] = []
    knot.append(knot)
    with pytest.raises(BadRequest) as info:
        Wire().request(submit(Workflow((StepSpec("a", "noop", {}, {"value": knot}),)), Durability.SYNC))
    assert info.value.where.startswith("steps.a.inputs.value")


@pytest.mark.parametrize("field", ["inputs: {value: [1, NUMBER]}", "params: {x: NUMBER}", "map: {over: [NUMBER]}"])
def test_a_file_with_a_number_beyond_64_bits_is_refused_at_its_field(field: str) -> None:
    text = "steps: [{id: a, op: noop, " + field.replace("NUMBER", "99999999999999999999") + "}]"
    with pytest.raises(BadRequest, match="64 bits") as info:
        load_workflow(text)
    assert info.value.where.startswith(f"steps.a.{field.partition(':')[0]}.")
