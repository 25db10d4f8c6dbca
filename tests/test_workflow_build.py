"""The Python builder: what it writes is what a file would hold, and what it cannot write it refuses at the step."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from hexrt.errors import BadRequest
from hexrt.protocol.messages import FromClient, Submit
from hexrt.values import decode
from hexrt.workflow.build import ITEM, WorkflowBuilder
from hexrt.workflow.check import check_workflow
from hexrt.workflow.model import MapSpec, Needs, StepSpec, Workflow
from tests.workflow_ops import LIMITS, OPS


def test_a_workflow_reads_as_it_was_meant() -> None:
    w = WorkflowBuilder("rag", priority=3, deadline_s=60)
    corpus = w.step("index.build", id="corpus", params={"name": "c"}, inputs={"documents": [{"id": "1", "text": "t"}]})
    question = w.step("embed.text", id="q", inputs={"texts": ["what?"]})
    hits = w.step("search.vector", params={"index": "c"}, inputs={"vectors": question}, after=corpus, device="pool")
    answers = w.step(
        "llm.generate", id="answers", params={"model": "m"}, map_over=hits["documents"][0], max_in_flight=2,
        inputs={"prompt": ["Read: ", ITEM["text"]]}, priority=9, deadline_s=5, timeout_s=2.5, retries=1, idempotent=True,
        memory_bytes=10, after=["q", hits["x"]],
    )  # fmt: skip
    w.output("texts", answers)
    w.output("first", hits["documents"][0][-1]["text"])
    assert w.build() == Workflow(
        name="rag", priority=3, deadline_s=60.0,
        steps=(
            StepSpec("corpus", "index.build", {"name": "c"}, {"documents": [{"id": "1", "text": "t"}]}),
            StepSpec("q", "embed.text", {}, {"texts": ["what?"]}),
            StepSpec("search_vector_1", "search.vector", {"index": "c"}, {"vectors": {"$ref": "q"}}, ("corpus",),
                     needs=Needs("pool")),
            StepSpec("answers", "llm.generate", {"model": "m"}, {"prompt": ["Read: ", {"$item": "text"}]},
                     ("q", "search_vector_1"), MapSpec({"$ref": "search_vector_1.documents.0"}, 2), Needs(None, 10),
                     9, 5.0, 2.5, 1, True),
        ),
        outputs={"texts": {"$ref": "answers"}, "first": {"$ref": "search_vector_1.documents.0.-1.text"}},
    )  # fmt: skip
    graph = check_workflow(w.build(), OPS, LIMITS, 1.0)
    assert [name for name, _, _ in graph.outputs] == ["texts", "first"]


def test_steps_without_an_id_are_called_after_their_op_and_never_clash() -> None:
    w = WorkflowBuilder()
    w.step("noop", id="noop_2")
    ids = [w.step(op).step for op in ("noop", "noop", "embed.text", "3d", "/")]
    assert ids == ["noop_1", "noop_3", "embed_text_1", "_3d_1", "__1"]
    assert len({step.id for step in w.build().steps}) == 6


@pytest.mark.parametrize("key", ["a.b", "0", "-1", "", "x y", "$ref", "\u00e9", 0, -3, 10**8])
def test_any_key_survives_in_a_reference(key: str | int) -> None:
    w = WorkflowBuilder()
    a = w.step("noop", id="a")
    w.step("noop", id="b", inputs={"value": a["k"][key]})
    w.step("noop", id="c", inputs={"value": ITEM[key]}, map_over=[1])
    graph = check_workflow(w.build(), OPS, LIMITS, 1.0)
    assert graph.nodes[1].refs[0].path == ("k", key)
    assert graph.nodes[2].refs[0].path == (key,)


def test_arrays_pass_the_socket_and_the_daemon_unopened() -> None:
    arrays = [
        np.ones((2, 3), "float32"),
        np.arange(3),
        np.array([True]),
        np.zeros((0, 4)),
        np.arange(6).reshape(2, 3).T,
    ]
    w = WorkflowBuilder()
    w.step("noop", id="a", inputs={"value": {"arrays": arrays, "number": np.float32(0.5), "double": np.float64(2)}})
    w.step("noop", id="m", inputs={"value": ITEM}, map_over=np.eye(2))
    raw = msgspec.msgpack.encode(Submit(1, w.build()))
    arrived = msgspec.msgpack.decode(raw, type=FromClient)
    assert isinstance(arrived, Submit)
    graph = check_workflow(arrived.workflow, OPS, LIMITS, 1.0)
    value = decode(graph.nodes[0].inputs)["value"]
    assert (value["number"], value["double"]) == (0.5, 2.0)
    for sent, found in zip(arrays, value["arrays"], strict=True):
        assert found.dtype == sent.dtype and np.array_equal(found, sent)
    over = graph.nodes[1].map
    assert over is not None and over.elements is not None
    assert [decode(e).tolist() for e in over.elements] == [[1.0, 0.0], [0.0, 1.0]]


def test_literals_are_copied_when_the_step_is_added() -> None:
    texts = ["a"]
    w = WorkflowBuilder()
    w.step("embed.text", id="e", inputs={"texts": texts})
    texts.append("b")
    assert w.build().steps[0].inputs == {"texts": ["a"]}


class Colour(enum.StrEnum):
    RED = "red"


def test_plain_relatives_of_plain_values_become_plain() -> None:
    w = WorkflowBuilder()
    w.step("noop", inputs={"value": [(1, 2), bytearray(b"x"), memoryview(b"y"), Colour.RED, None]})
    assert w.build().steps[0].inputs == {"value": [[1, 2], b"x", b"y", "red", None]}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"inputs": {"value": [object()]}}, "steps.s.inputs.value[0]"),
        ({"inputs": {"value": {1: 2}}}, "steps.s.inputs.value"),
        ({"inputs": {"value": np.array([object()])}}, "steps.s.inputs.value"),
        ({"inputs": {"value": {1, 2}}}, "steps.s.inputs.value"),
        ({"inputs": [1]}, "steps.s.inputs"),
        ({"inputs": ITEM}, "steps.s.inputs"),
        ({"params": {"x": lambda: 0}}, "steps.s.params.x"),
        ({"map_over": "abc"}, "steps.s.map.over"),
        ({"map_over": {"a": 1}}, "steps.s.map.over"),
        ({"max_in_flight": 2}, "steps.s.map.max_in_flight"),
        ({"map_over": [1], "max_in_flight": 0}, "steps.s.map.max_in_flight"),
        ({"retries": -1}, "steps.s.retries"),
        ({"retries": 10**30}, "steps.s.retries"),
        ({"timeout_s": 0}, "steps.s.timeout_s"),
        ({"timeout_s": "1"}, "steps.s.timeout_s"),
        ({"priority": 1000}, "steps.s.priority"),
        ({"memory_bytes": -1}, "steps.s.needs.memory_bytes"),
        ({"after": [1]}, "steps.s.after[0]"),
        ({"id": "a.b"}, "steps.a.b.id"),
        ({"id": "a\n"}, "steps.a\\n.id"),
    ],
)
def test_what_no_workflow_can_hold_is_refused_when_the_step_is_added(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(BadRequest) as info:
        WorkflowBuilder().step("noop", **{"id": "s", **fields})
    assert info.value.where == where
    assert info.value.message


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(BadRequest, match="nested deeper"):
        WorkflowBuilder().step("noop", inputs={"value": loop})


def test_steps_of_another_workflow_are_refused() -> None:
    other = WorkflowBuilder().step("noop", id="x")
    w = WorkflowBuilder()
    for fields in ({"inputs": {"value": other["k"]}}, {"after": other}, {"map_over": other}):
        with pytest.raises(BadRequest, match="another workflow"):
            w.step("noop", **fields)
    with pytest.raises(BadRequest, match="another workflow"):
        w.output("o", other)


def test_an_id_or_an_output_is_given_once() -> None:
    w = WorkflowBuilder()
    a = w.step("noop", id="a")
    w.output("o", a)
    with pytest.raises(BadRequest, match="already"):
        w.step("noop", id="a")
    with pytest.raises(BadRequest, match="already"):
        w.output("o", a)
    for wrong in (ITEM, "a"):
        with pytest.raises(BadRequest, match="reference"):
            w.output("p", wrong)  # type: ignore[arg-type]


def test_a_builder_without_steps_builds_nothing() -> None:
    with pytest.raises(BadRequest, match="at least one step"):
        WorkflowBuilder().build()


@pytest.mark.parametrize("fields", [{"name": "x" * 201}, {"priority": 101}, {"deadline_s": -1.0}])
def test_fields_of_the_run_are_checked_by_build(fields: dict[str, Any]) -> None:
    w = WorkflowBuilder(**fields)
    w.step("noop")
    with pytest.raises(BadRequest) as info:
        w.build()
    assert info.value.where == next(iter(fields))


def test_a_deadline_that_is_no_number_is_refused_by_the_check() -> None:
    w = WorkflowBuilder()
    w.step("noop", id="s", inputs={"value": math.nan})
    with pytest.raises(BadRequest) as info:
        check_workflow(w.build(), OPS, LIMITS, 1.0)
    assert info.value.where == "steps.s.inputs.value"


def test_a_reference_is_not_a_value() -> None:
    a = WorkflowBuilder().step("noop", id="a")
    uses: list[Callable[[], Any]] = [lambda: list(a), lambda: f"{a}", lambda: bool(a), lambda: [*a]]
    for use in uses:
        with pytest.raises(TypeError):
            use()
    assert repr(a["k"][0]) == "<reference a.k[0]>"
    with pytest.raises(BadRequest, match="indexed by"):
        a[1.5]  # type: ignore[index]
