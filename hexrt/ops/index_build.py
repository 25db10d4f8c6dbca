"""`index.build`, `index.add` and `index.drop`: named vector indexes that stay on disk until they are dropped.

An index belongs to the uid that built it; names of different users do not meet.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from hexrt.core import DeviceKind
from hexrt.ops.spec import OpSpec, Part, Port, StepContext

IndexName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)")]


class BuildParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: IndexName
    kind: Literal["hnsw", "flat"] = "hnsw"  # flat: exact, time grows with the number of vectors
    metric: Literal["cosine", "l2", "ip"] = "cosine"
    m: Annotated[int, msgspec.Meta(ge=2, le=256)] = 32  # hnsw: links of a vector
    ef_construction: Annotated[int, msgspec.Meta(ge=8, le=2048)] = 80  # hnsw: candidates looked at while building


class NameParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: IndexName


def build(context: StepContext, params: BuildParams, inputs: dict[str, Any]) -> dict[str, Any]:
    from hexrt.ops._index import Layout, build_index

    layout = Layout(params.kind, params.metric, params.m, params.ef_construction)
    return build_index(context, params.name, layout, inputs["vectors"], inputs.get("documents"))


def add(context: StepContext, params: NameParams, inputs: dict[str, Any]) -> dict[str, Any]:
    from hexrt.ops._index import add_to_index

    return add_to_index(context, params.name, inputs["vectors"], inputs.get("documents"))


def drop(context: StepContext, params: NameParams, inputs: dict[str, Any]) -> dict[str, Any]:
    from hexrt.ops._index import drop_index

    return {"index": params.name, "dropped": drop_index(context, params.name)}


VECTORS = Port(Any, doc="a tensor [n, d] (or a list of n lists of d numbers)")
DOCUMENTS = Port(list[Any] | None, required=False, doc="n values of any kind, which a search returns with its hits")
RESULT = "{index, count, dimension, metric, kind, generation}"

OPS = (
    OpSpec(
        name="index.build",
        doc=f"Builds a vector index, in place of the one of that name if there is one. Returns {RESULT}.",
        parts=(Part("run", (DeviceKind.POOL,), "hexrt.ops.index_build:build"),),
        params=BuildParams,
        inputs={"vectors": VECTORS, "documents": DOCUMENTS},
    ),
    OpSpec(
        name="index.add",
        doc=f"Adds vectors to an index. What the same step of the same run has added already is not added again. Returns {RESULT} and first.",
        parts=(Part("run", (DeviceKind.POOL,), "hexrt.ops.index_build:add"),),
        params=NameParams,
        inputs={"vectors": VECTORS, "documents": DOCUMENTS},
    ),
    OpSpec(
        name="index.drop",
        doc="Deletes an index. Returns {index, dropped}: dropped is false where there was none.",
        parts=(Part("run", (DeviceKind.POOL,), "hexrt.ops.index_build:drop"),),
        params=NameParams,
    ),
)
