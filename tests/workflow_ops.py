"""A table of ops for tests of workflows: the forms of hexrt's ops without their bodies, and small helpers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
import pytest

from hexrt.core import DeviceKind, TensorMeta
from hexrt.errors import BadRequest
from hexrt.ops.noop import OP as NOOP
from hexrt.ops.spec import NoParams, OpSpec, Part, Port
from hexrt.workflow.check import GraphLimits, check_workflow
from hexrt.workflow.graph import TaskGraph
from hexrt.workflow.model import StepSpec, Workflow

VECTORS = TensorMeta("float32", (None, 384))


class Generate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 128
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()


class Build(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    kind: Literal["flat", "hnsw"] = "flat"


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    index: str
    k: Annotated[int, msgspec.Meta(ge=1)] = 5


class Template(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    template: str


class Code(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cpu_s: float = 1.0
    memory_mib: int = 256


class Http(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    method: Literal["GET", "POST"] = "GET"
    body_bytes: int = 1 << 20


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: str


class Document(msgspec.Struct):
    id: str
    text: str
    tags: list[str] = []


def check_http(params: Http) -> None:
    if not params.url.startswith(("http://", "https://")):
        raise BadRequest("write a URL that begins with http:// or https://", "url")


def _op(name: str, kinds: Iterable[str], params: type[msgspec.Struct] = NoParams, **more: Any) -> OpSpec:
    return OpSpec(
        name, f"{name} of the tests.", (Part("run", tuple(map(DeviceKind, kinds)), "none:none"),), params, **more
    )


ALL = (
    NOOP,
    _op("embed.text", ("npu", "pool"), inputs={"texts": Port(list[str] | str)}, output=VECTORS),
    _op("index.build", ("pool",), Build, inputs={"documents": Port(list[Document])}),
    _op("search.vector", ("pool",), Search, inputs={"vectors": Port(tensor=VECTORS)}),
    _op("text.template", ("pool",), Template, inputs={"values": Port(dict[str, str])}),
    _op(
        "image.encode", ("npu", "pool"), inputs={"image": Port(bytes), "size": Port(int, required=False, default=224)},
        outputs={"embedding": TensorMeta("float32", (1280,))},
    ),
    _op("code.python", ("pool",), Code, inputs={"code": Port(str)}, idempotent=False),
    _op("tool.http", ("io",), Http, check=check_http, idempotent=lambda params: params.method == "GET"),
    _op("map.python", ("pool",), Function, inputs={"values": Port(list[Any])}),
    _op("tensor.double", ("cpu",), inputs={"x": Port(tensor=TensorMeta("float64", (2, None)))}),
    OpSpec(
        "llm.generate", "Writes text.",
        (Part("prefill", (DeviceKind.CPU,), None), Part("decode", (DeviceKind.CPU,), None)), Generate,
        inputs={"prompt": Port(str | list[str])},
    ),
)  # fmt: skip

OPS = {op.name: op for op in ALL}
LIMITS = GraphLimits()


def check(*steps: StepSpec, limits: GraphLimits = LIMITS, **fields: Any) -> TaskGraph:
    """The graph of `steps`, through the wire's encoding, as the daemon gets it."""
    raw = msgspec.msgpack.encode(Workflow(steps=steps, **fields))
    return check_workflow(msgspec.msgpack.decode(raw, type=Workflow), OPS, limits, 600.0)


def graph(text: str, limits: GraphLimits = LIMITS) -> TaskGraph:
    """`graph("a -> b, c -> b, d")`: no-op steps in the order in which they are first named; an arrow is an `after`."""
    after: dict[str, list[str]] = {}
    for clause in text.split(","):
        names = [name.strip() for name in clause.split("->")]
        for name in names:
            after.setdefault(name, [])
        for before, name in pairwise(names):
            after[name].append(before)
    return check(*(StepSpec(id=name, op="noop", after=tuple(before)) for name, before in after.items()), limits=limits)


def step(id: str, value: Any = None, op: str = "noop", **fields: Any) -> StepSpec:
    """A step of op noop whose input `value` is given, or none where it is None."""
    return StepSpec(id=id, op=op, inputs={} if value is None else {"value": value}, **fields)


def refused(*steps: StepSpec, limits: GraphLimits = LIMITS, **fields: Any) -> tuple[str, str]:
    """(where, message) of the refusal."""
    with pytest.raises(BadRequest) as info:
        check(*steps, limits=limits, **fields)
    assert info.value.message
    return info.value.where, info.value.message


def ref(path: Any) -> dict[str, Any]:
    return {"$ref": path}
