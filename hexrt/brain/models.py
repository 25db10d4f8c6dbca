"""The models that LLM steps may name, and whether what a step asks of one could ever be held. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hexrt.errors import BadRequest, HexrtError
from hexrt.llm.steps import resolve_model
from hexrt.memory.keeper import Keeper
from hexrt.workflow.graph import Node

PAGE_TOKENS = 16


class LoadedModel(msgspec.Struct, frozen=True):
    """What a host says of a model that it has loaded."""

    page_bytes: int
    context_tokens: int
    weight_bytes: int = 0
    digest: str = ""  # of config and weights, as far as sizes and times of files tell: of what its prefix keys are made
    facts: dict[str, Any] = {}  # for people: architecture, parameters, attention, levers


class ModelSource(msgspec.Struct, frozen=True):
    """`page_bytes` and the others are 0 where the model's config cannot be read: its host will say why. `endpoint`: it is no host's at all."""

    path: str
    dtype: str
    page_bytes: int = 0
    context_tokens: int = 0
    weights: str = "as_dtype"
    kv_dtype: str = ""
    weight_bytes: int = 0  # about what it takes in memory
    endpoint: str = ""
    concurrency: int = 0  # of an endpoint
    why: str = ""  # its config cannot be read

    @property
    def is_exact(self) -> bool:
        """Whether it can keep exact numerics."""
        return not self.endpoint and (self.dtype, self.weights, self.kv_dtype or self.dtype) == (
            "float32",
            "as_dtype",
            "float32",
        )


def check_fits(node: Node, models: Mapping[str, ModelSource], keeper: Keeper, devices: Iterable[str]) -> None:
    """Raises BadRequest, naming the step, where its answer could never lie in the memory of any of these devices."""
    params: Any = node.params
    try:
        source = models[resolve_model(params.model, models)]
    except HexrtError:
        return  # said by the step's first part
    if not source.page_bytes:
        return
    limit = min(getattr(params, "max_tokens", 0), source.context_tokens - 1)
    pages = -(-(1 + limit) // PAGE_TOKENS)
    most = max((keeper.pool.capacity(keeper.page_class(d, source.page_bytes)) for d in devices), default=pages)
    if not most:
        raise BadRequest(
            f"a page of {params.model!r} has {source.page_bytes >> 10} KiB, more than any device's memory for pages: raise "
            "cpu.arena_mib (where that is 0, memory.host_mib), unless its config.json is wrong",
            f"steps.{node.id}.params.model",
        )
    if pages > most:
        raise BadRequest(
            f"{limit} tokens need {pages} pages of {source.page_bytes >> 10} KiB, and no device can have more than {most}: "
            "lower it, or raise cpu.arena_mib (where that is 0, memory.host_mib)",
            f"steps.{node.id}.params.max_tokens",
        )
