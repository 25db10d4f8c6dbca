"""The JSON Schema of the file format says yes to what loads and checks, and no to what does not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hexrt.core import DeviceKind
from hexrt.ops.spec import OpSpec, Part, Port
from hexrt.workflow.schema import workflow_schema
from hexrt.workflow.syntax import parse
from tests.workflow_ops import OPS

EXAMPLES = Path(__file__).parent / "data" / "workflows"
FILES = sorted(path for path in EXAMPLES.iterdir() if path.suffix in {".yaml", ".json"})
SCHEMA = workflow_schema(OPS)
GENERATE: dict[str, Any] = {"id": "g", "op": "llm.generate", "params": {"model": "m"}, "inputs": {"prompt": "p"}}
NOOP: dict[str, Any] = {"id": "n", "op": "noop"}


def is_valid(data: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(data))


def test_it_is_a_schema_and_survives_json() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_each_of_its_references_leads_somewhere() -> None:
    def targets(part: Any) -> list[str]:
        if isinstance(part, list):
            return [t for p in part for t in targets(p)]
        if not isinstance(part, dict):
            return []
        own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
        return own + [t for p in part.values() for t in targets(p)]

    found = targets(SCHEMA)
    assert found
    assert {t.removeprefix("#/$defs/") for t in found} <= SCHEMA["$defs"].keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_examples_are_valid(path: Path) -> None:
    data = parse(path.read_text(), "json" if path.suffix == ".json" else "yaml")
    errors = [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(data)]
    assert errors == []


@pytest.mark.parametrize(
    "step",
    [
        NOOP,
        GENERATE,
        {**GENERATE, "inputs": {"prompt": {"$ref": "a.b"}}},
        {**GENERATE, "inputs": {"prompt": ["x", {"$ref": ["a", 0, "b.c"]}]}},
        {**GENERATE, "map": {"over": {"$ref": "a"}}, "inputs": {"prompt": {"$item": ""}}},
        {**NOOP, "inputs": {"value": {"any": [{"$ref": "#/$defs/x"}]}}, "needs": {"device": "npu"}, "retries": 3},
        {"id": "i", "op": "image.encode", "inputs": {"image": {"$file": "x.png"}, "size": {"$ref": "a"}}},
        {"id": "b", "op": "index.build", "params": {"name": "n"}, "inputs": {"documents": {"$ref": "a"}}},
        {"id": "b", "op": "index.build", "params": {"name": "n"},
         "inputs": {"documents": [{"$ref": "a"}, {"id": {"$ref": "a"}, "text": "t", "tags": [{"$ref": "a"}]}]}},
    ],
)  # fmt: skip
def test_right_steps_are_valid(step: dict[str, Any]) -> None:
    assert is_valid({"steps": [step]})


@pytest.mark.parametrize(
    "step",
    [
        {**NOOP, "op": "nop"},
        {**NOOP, "id": "a.b"},
        {**NOOP, "colour": "red"},
        {**NOOP, "params": {"x": 1}},
        {**NOOP, "inputs": {"other": 1}},
        {**NOOP, "retries": -1},
        {**NOOP, "timeout_s": 0},
        {**NOOP, "needs": {"gpu": 1}},
        {**NOOP, "map": {"over": "abc"}},
        {**NOOP, "map": {"over": {"$item": ""}}},
        {**NOOP, "map": {}},
        {"id": "n"},
        {"op": "noop"},
        {**GENERATE, "params": {}},
        {k: v for k, v in GENERATE.items() if k != "params"},
        {k: v for k, v in GENERATE.items() if k != "inputs"},
        {**GENERATE, "inputs": {}},
        {**GENERATE, "inputs": {"prompt": 3}},
        {**GENERATE, "inputs": {"prompt": ["x", 3]}},
        {**GENERATE, "inputs": {"prompt": {"$ref": "a", "more": 1}}},
        {**GENERATE, "inputs": {"prompt": {"$ref": ""}}},
        {**GENERATE, "inputs": {"prompt": {"$rfe": "a"}}},
        {**GENERATE, "params": {"model": {"$ref": "a"}}},
        {**GENERATE, "params": {"model": "m", "max_tokens": 0}},
        {**GENERATE, "params": {"model": "m", "max_token": 5}},
        {"id": "b", "op": "index.build", "params": {"name": "n", "kind": "tree"}, "inputs": {"documents": []}},
        {"id": "b", "op": "index.build", "params": {"name": "n"}, "inputs": {"documents": [{"id": "1"}]}},
    ],
)
def test_wrong_steps_are_not_valid(step: dict[str, Any]) -> None:
    assert not is_valid({"steps": [step]})


@pytest.mark.parametrize(
    "change",
    [{"steps": []}, {"steps": "x"}, {"stepz": []}, {"outputs": {"x": "n.text"}}, {"outputs": {"x": {"$item": ""}}},
     {"priority": 101}, {"deadline_s": -1}, {"name": 3}],
)  # fmt: skip
def test_wrong_workflows_are_not_valid(change: dict[str, Any]) -> None:
    good: dict[str, Any] = {"steps": [NOOP], "outputs": {"x": {"$ref": "n"}}}
    assert is_valid(good)
    assert not is_valid({**copy.deepcopy(good), **change})


class Odd:
    """A type that no schema can say."""


def test_a_port_of_a_type_without_a_schema_takes_anything() -> None:
    op = OpSpec("odd", "", (Part("run", (DeviceKind.POOL,), "a:b"),), inputs={"x": Port(Odd, doc="odd")})
    schema = workflow_schema({"odd": op})
    jsonschema.validate({"steps": [{"id": "a", "op": "odd", "inputs": {"x": 3}}]}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"steps": [{"id": "a", "op": "odd"}]}, schema)
