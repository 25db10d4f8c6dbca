"""Attention over K and V in pages, as a function for transformers' pluggable attention.

One forward pass packs the tokens of many sequences into one row. A `PagedPass` says where each token's K and V go and what it attends to,
and which kernel does it (`hexrt.kernels.attention`); it reaches `paged_attention` as a keyword argument of the model's forward, so nothing
here is global. Owns nothing; what a kernel is given is checked here only as far as a model could get it wrong.

    arena   [frame, layer, K or V, token in page, KV head, head dimension]   one frame is one page of all layers, and what is left
                                                                             up to the next frame's beginning belongs to nobody
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hexrt.errors import Unavailable
from hexrt.kernels.attention import Attend, PassTensors

NAME = "hexrt_paged"


def view_pages(memory: Tensor, dtype: torch.dtype, page_bytes: int, page: Sequence[int]) -> Tensor:
    """[frame, *page] over `memory`, bytes in one row; frame f begins at byte f * page_bytes. No copy, and nothing is touched."""
    size = dtype.itemsize
    strides = [size]
    for length in reversed(page[1:]):
        strides.insert(0, strides[0] * length)
    return memory.view(dtype).as_strided(
        (len(memory) // page_bytes, *page), (page_bytes // size, *(stride // size for stride in strides))
    )


@dataclass(slots=True)
class PagedPass:
    """What the model's attention is called with in a pass: the tensors of `llm.engine_pass`, and the kernel that reads them."""

    arena: Tensor
    tensors: PassTensors
    attend: Attend
    context_tokens: int  # a sliding window of at least this hides nothing
    layers: list[int] = field(default_factory=list)  # as they were called


def paged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    hexrt_pages: PagedPass, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Writes this pass's K and V into the pages and attends. query [1, heads, tokens, d], key and value [1, KV heads, tokens, d].

    Returns [1, tokens, heads, d]. Raises Unavailable, naming it, for a kind of attention that is not done here.
    """
    pages, layer = hexrt_pages, module.layer_idx
    _check(pages.arena, query, key, value, attention_mask)
    queries = query[0].transpose(0, 1)
    result = torch.empty_like(queries, memory_format=torch.contiguous_format)
    pages.attend(
        queries, key[0].transpose(0, 1), value[0].transpose(0, 1), pages.arena, layer, pages.tensors,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=None if sliding_window is None or sliding_window >= pages.context_tokens else sliding_window,
        softcap=softcap, sinks=s_aux, out=result,
    )  # fmt: skip
    pages.layers.append(layer)
    return result[None], None


def _check(arena: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    kv_heads, dimension = arena.shape[4:]
    for name, given in (("keys", key), ("values", value)):
        if (given.shape[1], given.shape[3]) != (kv_heads, dimension):
            raise Unavailable(
                f"its {name} are {given.shape[1]} heads of {given.shape[3]}, its pages {kv_heads} of {dimension}"
            )
    if query.shape[1] % kv_heads:
        raise Unavailable(f"its {query.shape[1]} heads do not share {kv_heads} heads of keys evenly")
    if mask is not None:
        raise Unavailable("it brings an attention mask of its own, which pages do not do")
