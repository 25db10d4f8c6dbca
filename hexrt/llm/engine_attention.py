"""Attention over K and V in pages, as a function for transformers' pluggable attention.

One forward pass packs the tokens of many sequences into one row: first the sequences that decode, one token each, then prompt slices. A
`PassPlan` says where each token's K and V go and what it attends to; it reaches `paged_attention` as a keyword argument of the model's
forward, so nothing here is global. Decoding sequences of like length are gathered into one padded batch: on the CPU that costs a copy of
their K and V and wins over one call a sequence by 1.4 to 3 times (fp32, 2 threads, 16 sequences of 128 to 512).

    arena   [frame, layer, K or V, token in page, KV head, head dimension]   one frame is one page of all layers, and what is left
                                                                             up to the next frame's beginning belongs to nobody
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hexrt.errors import Unavailable
from hexrt.kernels.attention import Attend, PassTensors

NAME = "hexrt_paged"
GROUP_PAGES = 2048
"""Most pages gathered at a time, which bounds the scratch memory."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence in a pass: `count` tokens from `start` on; `frames` is its page table."""

    frames: Sequence[int]
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


def view_pages(memory: Tensor, dtype: torch.dtype, page_bytes: int, page: Sequence[int]) -> Tensor:
    """[frame, *page] over `memory`, bytes in one row; frame f begins at byte f * page_bytes. No copy, and nothing is touched."""
    size = dtype.itemsize
    strides = [size]
    for length in reversed(page[1:]):
        strides.insert(0, strides[0] * length)
    return memory.view(dtype).as_strided(
        (len(memory) // page_bytes, *page), (page_bytes // size, *(stride // size for stride in strides))
    )


class Scratch:
    """Room for gathered K and V, kept between passes; what `take` gives is valid until it is called again."""

    def __init__(self, arena: Tensor) -> None:
        self._page = arena.shape[3:]
        self._empty = arena.new_empty((0, *self._page))
        self._keys, self._values = self._empty, self._empty

    def take(self, pages: int) -> tuple[Tensor, Tensor]:
        if pages > len(self._keys):
            self._keys = self._empty.new_empty((pages, *self._page))
            self._values = torch.empty_like(self._keys)
        return self._keys[:pages], self._values[:pages]


@dataclass(frozen=True, slots=True)
class _Decoding:
    """Rows first .. last of the pass, one token each; their tables side by side, padded to `width` pages."""

    first: int
    last: int
    width: int
    frames: Tensor  # [rows * width]
    mask: Tensor  # [rows, 1, 1, width * page tokens]: 0, and -inf past a sequence's end


@dataclass(frozen=True, slots=True)
class _Slice:
    """Tokens first .. last of the pass, of one sequence that has `end` tokens with them; without `frames` it starts there."""

    first: int
    last: int
    end: int
    frames: Tensor | None
    mask: Tensor | None  # [tokens, end]


@dataclass(slots=True)
class PassPlan:
    arena: Tensor
    scratch: Scratch
    frame_of: Tensor  # [tokens]
    offset_of: Tensor
    decoding: list[_Decoding]
    slices: list[_Slice]
    context_tokens: int  # a sliding window of at least this hides nothing
    layers: list[int] = field(default_factory=list)  # as they were called


@dataclass(slots=True)
class PagedPass:
    """What the model's attention is called with in a pass: the tensors of `llm.engine_pass`, and the kernel that reads them."""

    arena: Tensor
    tensors: PassTensors
    attend: Attend
    context_tokens: int  # a sliding window of at least this hides nothing
    layers: list[int] = field(default_factory=list)  # as they were called


def plan_pass(arena: Tensor, scratch: Scratch, rows: Sequence[Row], context_tokens: int) -> PassPlan:
    """The plan of a pass whose `rows` are ordered: those of one token by length first, then the others.

    Rows of one token are treated as decoding, which is right for a slice of one token too.
    """
    page = arena.shape[3]
    frame_of = [row.frames[position // page] for row in rows for position in range(row.start, row.end)]
    offset_of = [position % page for row in rows for position in range(row.start, row.end)]
    singles = sum(row.count == 1 for row in rows)
    decoding, at = [], 0
    while at < singles:
        end = _group_end(rows, at, singles, page)
        decoding.append(_decoding(arena, rows[at:end], at, page))
        at = end
    slices = []
    for row in rows[singles:]:
        slices.append(_slice(arena, row, at, page))
        at += row.count
    return PassPlan(arena, scratch, torch.tensor(frame_of), torch.tensor(offset_of), decoding, slices, context_tokens)


def _group_end(rows: Sequence[Row], at: int, singles: int, page: int) -> int:
    """How far rows of like length go: the longest has at most half as many pages again as the shortest, and two."""
    most = -(-rows[at].end // page) * 3 // 2 + 2
    end = at + 1
    while end < singles and (pages := -(-rows[end].end // page)) <= most and pages * (end + 1 - at) <= GROUP_PAGES:
        end += 1
    return end


def _decoding(arena: Tensor, rows: Sequence[Row], first: int, page: int) -> _Decoding:
    width = max(-(-row.end // page) for row in rows)
    frames = [frame for row in rows for frame in _padded(row, width, page)]
    ends = torch.tensor([row.end for row in rows])
    beyond = torch.arange(width * page)[None, :] >= ends[:, None]
    mask = torch.zeros(beyond.shape, dtype=arena.dtype).masked_fill_(beyond, -torch.inf)
    return _Decoding(first, first + len(rows), width, torch.tensor(frames), mask[:, None, None, :])


def _padded(row: Row, width: int, page: int) -> list[int]:
    used = list(row.frames[: -(-row.end // page)])
    return used + [used[-1]] * (width - len(used))


def _slice(arena: Tensor, row: Row, first: int, page: int) -> _Slice:
    last = first + row.count
    if row.start == 0:
        return _Slice(first, last, row.end, None, None)
    later = torch.arange(row.end)[None, :] > torch.arange(row.start, row.end)[:, None]
    mask = torch.zeros(later.shape, dtype=arena.dtype).masked_fill_(later, -torch.inf)
    return _Slice(first, last, row.end, torch.tensor(row.frames[: -(-row.end // page)]), mask)


def paged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    hexrt_pages: PassPlan | PagedPass, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Writes this pass's K and V into the pages and attends. query [1, heads, tokens, d], key and value [1, KV heads, tokens, d].

    Returns [1, tokens, heads, d]. Raises Unavailable, naming it, for a kind of attention that is not done here.
    """
    plan, layer = hexrt_pages, module.layer_idx
    if isinstance(plan, PagedPass):
        _check_pages(plan.arena, query, key, value, attention_mask)
        queries = query[0].transpose(0, 1)
        result = torch.empty_like(queries, memory_format=torch.contiguous_format)
        plan.attend(
            queries, key[0].transpose(0, 1), value[0].transpose(0, 1), plan.arena, layer, plan.tensors,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=None if sliding_window is None or sliding_window >= plan.context_tokens else sliding_window,
            softcap=softcap, sinks=s_aux, out=result,
        )  # fmt: skip
        plan.layers.append(layer)
        return result[None], None
    _check_kind(plan, key, value, attention_mask, sliding_window, softcap, s_aux)
    pages = plan.arena[:, layer]
    pages[:, 0].index_put_((plan.frame_of, plan.offset_of), key[0].transpose(0, 1))
    pages[:, 1].index_put_((plan.frame_of, plan.offset_of), value[0].transpose(0, 1))
    heads, tokens, dimension = query.shape[1:]
    kv_heads = key.shape[1]
    grouped = query[0].view(kv_heads, heads // kv_heads, tokens, dimension)  # [KV heads, group, tokens, d]
    out = query.new_empty((tokens, kv_heads, heads // kv_heads, dimension))
    for part in plan.decoding:
        out[part.first : part.last] = _decode(plan, pages, part, grouped, scaling)
    for piece in plan.slices:
        out[piece.first : piece.last] = _prefill(plan, pages, piece, grouped, key[0], value[0], scaling)
    plan.layers.append(layer)
    return out.view(1, tokens, heads, dimension), None


def _gather(plan: PassPlan, pages: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = plan.scratch.take(len(frames))
    torch.index_select(pages[:, 0], 0, frames, out=keys)
    torch.index_select(pages[:, 1], 0, frames, out=values)
    return keys, values


def _decode(plan: PassPlan, pages: Tensor, part: _Decoding, grouped: Tensor, scaling: float | None) -> Tensor:
    """[rows, KV heads, group, d]. The query heads that share a KV head stand as so many queries of it, so K is read once."""
    rows = part.last - part.first
    keys, values = (kept.view(rows, -1, *kept.shape[2:]).transpose(1, 2) for kept in _gather(plan, pages, part.frames))
    queries = grouped[:, :, part.first : part.last].permute(2, 0, 1, 3)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=part.mask, scale=scaling)


def _prefill(
    plan: PassPlan, pages: Tensor, piece: _Slice, grouped: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """[tokens, KV heads, group, d]. The heads of a group stand as a batch over one K and V, which are not copied for it."""
    queries = grouped[:, :, piece.first : piece.last].transpose(0, 1)
    if piece.frames is None:
        keys, values = key[:, piece.first : piece.last], value[:, piece.first : piece.last]
    else:
        keys, values = (kept.flatten(0, 1)[: piece.end].transpose(0, 1) for kept in _gather(plan, pages, piece.frames))
    batch = (len(queries), -1, -1, -1)
    out = scaled_dot_product_attention(
        queries, keys.expand(batch), values.expand(batch), attn_mask=piece.mask, is_causal=piece.mask is None,
        scale=scaling,
    )  # fmt: skip
    return out.permute(2, 1, 0, 3)


def _check_pages(arena: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
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


def _check_kind(
    plan: PassPlan, key: Tensor, value: Tensor, mask: Tensor | None, window: int | None, softcap: float | None,
    sinks: Tensor | None,
) -> None:  # fmt: skip
    page = plan.arena.shape[4:]
    for name, given in (("keys", key), ("values", value)):
        if (given.shape[1], given.shape[3]) != tuple(page):
            raise Unavailable(
                f"its {name} are {given.shape[1]} heads of {given.shape[3]}, its pages {page[0]} of {page[1]}"
            )
    if window is not None and window < plan.context_tokens:
        raise Unavailable(f"it attends to a sliding window of {window} tokens, which pages do not do")
    if softcap is not None:
        raise Unavailable("it caps its attention scores, which pages do not do")
    if sinks is not None:
        raise Unavailable("it has attention sinks, which pages do not do")
    if mask is not None:
        raise Unavailable("it brings an attention mask of its own, which pages do not do")
