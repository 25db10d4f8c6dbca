"""`search.vector`: the nearest vectors of an index that `index.build` made."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from hexrt.core import DeviceKind, TensorMeta
from hexrt.errors import BadRequest
from hexrt.ops.spec import OpSpec, Part, Port, StepContext


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    index: Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$(?!\n)")] = (
        ""  # "": the input `index`
    )
    k: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 5
    ef: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 64  # hnsw: candidates looked at; more finds more, later


def run(context: StepContext, params: Params, inputs: dict[str, Any]) -> dict[str, Any]:
    from hexrt.ops._index import search_index

    given = inputs.get("index")
    name = given.get("index") if isinstance(given, dict) else given
    if (name is None) == (not params.index):
        raise BadRequest("give the index either as params.index or as inputs.index", f"{context.step}.inputs.index")
    return search_index(context, params.index or name, inputs["vectors"], params.k, params.ef)


OP = OpSpec(
    name="search.vector",
    doc="The k nearest vectors of each query, nearest first: {ids, scores, documents, metric}. A score is a cosine or inner"
    " product (more is nearer), with metric l2 a squared distance (less is nearer).",
    parts=(Part("run", (DeviceKind.POOL,), "hexrt.ops.search_vector:run"),),
    params=Params,
    inputs={
        "vectors": Port(Any, doc="a tensor [q, d], or [d] for one query"),
        "index": Port(dict[str, Any] | str | None, required=False, doc="what index.build returned, or an index's name"),
    },
    outputs={"ids": TensorMeta("int64", (None, None)), "scores": TensorMeta("float32", (None, None))},
    work=lambda params, input_bytes: input_bytes + 64 * params.k,
)
