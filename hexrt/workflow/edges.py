"""The data edges of a graph: what is known of the tensor on each, and whether both ends agree. Pure."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

from hexrt.core import TensorMeta
from hexrt.errors import BadRequest
from hexrt.workflow.fields import place
from hexrt.workflow.graph import ITEM, Edge, Node
from hexrt.workflow.order import SLICE
from hexrt.workflow.references import Path


def connect(nodes: Sequence[Node], consumers: Iterable[int]) -> Generator[None, None, tuple[Edge, ...]]:
    """All data edges to `consumers`, yielding every few hundred. An edge to what a map goes over has an empty `to`. Raises BadRequest where the ends differ."""
    edges: list[Edge] = []
    pause_at = SLICE
    for i in consumers:
        node = nodes[i]
        over = node.map
        if over is not None and over.elements is None:
            edges.append(_connect(nodes[over.step], over.path, node, ()))
        for ref in node.refs:
            if ref.step != ITEM:
                edges.append(_connect(nodes[ref.step], ref.path, node, ref.to))
        if len(edges) >= pause_at:
            pause_at = len(edges) + SLICE
            yield
    return tuple(edges)


def _connect(producer: Node, path: Path, consumer: Node, to: Path) -> Edge:
    wanted = consumer.op.inputs[str(to[0])].tensor if len(to) == 1 else None
    try:
        tensor = produced(producer, path)
        if tensor is not None and wanted is not None and not tensor.matches(wanted):
            raise BadRequest(f"step {producer.id!r} gives a tensor {tensor}, and this input takes {wanted}")
        if tensor is not None and not to:
            raise BadRequest(f"a map goes over a list, and step {producer.id!r} gives a tensor {tensor} here")
    except BadRequest as error:
        at = place("inputs", to) if to else "map.over"
        raise BadRequest(error.message, f"steps.{consumer.id}.{at}") from None
    return Edge(producer.index, consumer.index, to, path, tensor or wanted)


def produced(node: Node, path: Path) -> TensorMeta | None:
    """What is known of the tensor at `path` in the output of `node`. Raises BadRequest where nothing can be there."""
    if node.map is not None:
        if not path:
            return None
        position, path = path[0], path[1:]
        if not isinstance(position, int):
            raise BadRequest(
                f"step {node.id!r} is a map, so its output is a list: put a position before {position!r}, as in "
                f"`{node.id}.0.{position}`"
            )
        count = None if node.map.elements is None else len(node.map.elements)
        if count is not None and not -count <= position < count:
            raise BadRequest(
                f"the output of map step {node.id!r} has {count} elements, so there is no position {position}"
            )
    op = node.op
    if not path:
        return op.output
    known = op.output if op.output is not None else op.outputs.get(path[0]) if isinstance(path[0], str) else None
    if known is not None and (len(path) > 1 or op.output is not None):
        raise BadRequest(
            f"step {node.id!r} gives a tensor {known}, and a reference cannot go into one: refer to the whole"
        )
    return known
