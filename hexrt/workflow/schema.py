"""The JSON Schema (2020-12) of a workflow file, for editors and for `hexrt schema`.

Made from the very records that decode a workflow and from what each op declares. Says less than `check`: whether references lead
somewhere, and how steps hang together, is beyond a schema. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hexrt.ops.spec import OpSpec, Port
from hexrt.workflow.model import FILE, ITEM, REF, Workflow

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_PATH = {"type": "array", "items": {"type": ["string", "integer"]}, "maxItems": 64}


def workflow_schema(ops: Mapping[str, OpSpec]) -> dict[str, Any]:
    """The schema of a file whose steps use `ops`: params and inputs of each op are spelled out."""
    (_,), defs = msgspec.json.schema_components((Workflow,), ref_template="#/$defs/{name}")
    defs.update(_notation())
    root = defs.pop("Workflow")
    root["properties"]["$schema"] = {"type": "string", "description": "for editors; not read"}
    root["properties"]["steps"]["minItems"] = 1
    root["properties"]["outputs"]["additionalProperties"] = {"$ref": "#/$defs/step_reference"}
    defs["MapSpec"]["properties"]["over"] = {"anyOf": [{"type": "array"}, {"$ref": "#/$defs/step_reference"}]}
    step = defs["StepSpec"]
    step["properties"]["op"] = {"enum": sorted(ops)}
    step["allOf"] = [_of_op(ops[name], defs) for name in sorted(ops)]
    schema = {"$schema": DIALECT, "title": "hexrt workflow", **root, "$defs": dict(sorted(defs.items()))}
    plain: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode(schema)
    )  # defaults such as tuples become what JSON has
    return plain


def _notation() -> dict[str, Any]:
    def only(key: str, value: dict[str, Any], doc: str) -> dict[str, Any]:
        return {
            "type": "object", "properties": {key: value}, "required": [key], "additionalProperties": False,
            "description": doc,
        }  # fmt: skip

    path = {"anyOf": [{"type": "string", "pattern": "^[A-Za-z_]"}, {**_PATH, "minItems": 1}]}
    item = {"anyOf": [{"type": "string"}, _PATH]}
    return {
        "step_reference": only(REF, path, "the output of a step, or a part of it: `hits.documents.0.text`"),
        "reference": {
            "anyOf": [
                {"$ref": "#/$defs/step_reference"},
                only(ITEM, item, "the element that this task of a `map` step was given, or a part of it"),
                only(FILE, {"type": "string", "minLength": 1}, "the bytes of a file beside this one"),
            ]
        },
    }


def _of_op(op: OpSpec, defs: dict[str, Any]) -> dict[str, Any]:
    (params,), found = msgspec.json.schema_components((op.params,), ref_template=f"#/$defs/{op.name}:{{name}}")
    defs.update({f"{op.name}:{name}": schema for name, schema in found.items()})
    required = [name for name, port in op.inputs.items() if port.required]
    inputs: dict[str, Any] = {
        "type": "object",
        "properties": {name: _of_port(f"{op.name}:{name}", port, defs) for name, port in op.inputs.items()},
        "additionalProperties": False,
    }
    then: dict[str, Any] = {"description": op.doc, "properties": {"params": params, "inputs": inputs}}
    if required:
        inputs["required"] = required
    must = ["inputs"] if required else []
    if any(f.required for f in msgspec.structs.fields(op.params)):
        must.append("params")
    if must:
        then["required"] = must
    return {"if": {"properties": {"op": {"const": op.name}}, "required": ["op"]}, "then": then}


def _of_port(name: str, port: Port, defs: dict[str, Any]) -> dict[str, Any]:
    described = {"description": port.doc} if port.doc else {}
    try:
        (schema,), found = msgspec.json.schema_components((port.type,), ref_template=f"#/$defs/{name}:{{name}}")
    except TypeError:  # a type of its own making: only the host can tell what fits
        return described
    defs.update({f"{name}:{key}": _open(part) for key, part in found.items()})
    return {**_open(schema), **described}


def _open(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` with a reference allowed in place of it and of every part of it."""
    if not schema or schema.keys() <= {"description", "title", "default"} or "$ref" in schema:
        return schema  # anything goes, or the definition that it points to is open itself
    opened = dict(schema)
    for key in ("items", "additionalProperties"):
        if isinstance(opened.get(key), dict):
            opened[key] = _open(opened[key])
    for key in ("prefixItems", "anyOf"):
        if key in opened:
            opened[key] = [_open(part) for part in opened[key]]
    if "properties" in opened:
        opened["properties"] = {name: _open(part) for name, part in opened["properties"].items()}
    return {"anyOf": [{"$ref": "#/$defs/reference"}, opened]}
