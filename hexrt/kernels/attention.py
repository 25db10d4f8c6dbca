"""Attention over pages: what every kernel of it is given and must do, the reference in plain torch, and the work of a pass.

A pass packs the tokens of many sequences, without padding: first those of one token each, then slices. A kernel writes the pass's K and V
into the pages (in the arena's dtype) and attends to what is in the pages, so that a result does not depend on how a prompt was cut.

    arena    [frame, layer, K or V, token in page, KV head, head dimension], strided over frames; offsets pass 2^32
    tokens   | row 0 | row 1 | ... row r: starts[r] .. starts[r + 1] ... |      row r's last token stands at position ends[r] - 1
    tables   [row, page of the sequence] -> frame

Query i of row r stands at position ends[r] - count + i and sees the positions up to its own, the last `window` of them where that is set.
A score is q.k * scale, capped to softcap * tanh(score / softcap) where that is set; a head's sink is one more logit in the softmax's sum,
with no value. What is computed of one row depends on no other row, not even in its last bit (a slice may differ from single tokens, in
float32 rounding); K or V that are not finite spoil their own row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PassTensors:
    """Where the tokens of a pass belong. The tensors may be longer-lived buffers that are refilled in place between passes.

    A row of no tokens, or whose end is 0, does nothing; a token whose slot is negative is not written. Tokens of no row get zeros.
    """

    slots: Tensor  # int64 [tokens]: frame * page tokens + token in page, where each token's K and V go
    tables: Tensor  # int32 [rows, width]: frames; only those below a row's end are read
    starts: Tensor  # int32 [rows + 1]: each row's first token in the pass
    ends: Tensor  # int32 [rows]: tokens of the sequence, with this pass's
    longest: int = 1  # no row has more tokens; 1 in a decode pass, of which a graph may be captured

    @property
    def rows(self) -> int:
        return len(self.ends)


class Attend(Protocol):
    """A kernel. `name` is for people."""

    @property
    def name(self) -> str: ...

    def __call__(
        self,
        query: Tensor,  # [tokens, heads, d], strided as it comes; d is contiguous
        key: Tensor,  # [tokens, KV heads, d]
        value: Tensor,
        arena: Tensor,
        layer: int,
        tensors: PassTensors,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [heads]
        out: Tensor,  # [tokens, heads, d], written
    ) -> None: ...


class Reference:
    """Plain torch, one row after the other, scores and sums in float32: the oracle of tests, and what runs where nothing else does."""

    name = "plain torch"

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, arena: Tensor, layer: int, tensors: PassTensors, *,
        scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, out: Tensor,
    ) -> None:  # fmt: skip
        pages = arena[:, layer]
        write_pages(pages, key, value, tensors.slots)
        starts, ends = tensors.starts.tolist(), tensors.ends.tolist()
        out.zero_()
        page = arena.shape[3]
        for row, end in enumerate(ends):
            first, last = starts[row], starts[row + 1]
            if first == last or not end:
                continue
            frames = tensors.tables[row, : -(-end // page)].long()
            keys, values = (pages[frames, kind].flatten(0, 1)[:end].float() for kind in (0, 1))
            hidden = _hidden(end, last - first, window, query.device)
            out[first:last] = _attend(query[first:last].float(), keys, values, hidden, scale, softcap, sinks)


def write_pages(pages: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """`pages`: one layer's, [frame, K or V, token in page, KV head, d]."""
    kept = (slots >= 0).nonzero().flatten()
    frame, token = slots[kept] // pages.shape[2], slots[kept] % pages.shape[2]
    pages[:, 0].index_put_((frame, token), key[kept].to(pages.dtype))
    pages[:, 1].index_put_((frame, token), value[kept].to(pages.dtype))


def _hidden(end: int, count: int, window: int | None, device: torch.device) -> Tensor:
    """[count, end]: whether a query does not see a key."""
    at = torch.arange(end - count, end, device=device)[:, None]
    keys = torch.arange(end, device=device)[None, :]
    return (keys > at) if window is None else (keys > at) | (keys <= at - window)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:  # fmt: skip
    """[count, heads, d] of one row, in float32."""
    count, heads, dimension = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(count, kv_heads, heads // kv_heads, dimension)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        logits = sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, count, 1)
        scores = torch.cat((scores, logits), -1)
    weights = torch.softmax(scores, -1)[..., : len(keys)]
    return torch.einsum("hgqk,khd->qhgd", weights, values).reshape(count, heads, dimension)


@dataclass(frozen=True, slots=True)
class Work:
    """What a piece of work takes: operations (a multiply and an add are two), and bytes that must at least be moved."""

    flops: int
    bytes: int


def work(
    rows: Sequence[tuple[int, int]], heads: int, kv_heads: int, dimension: int, page_itemsize: int, itemsize: int, window: int | None = None
) -> Work:  # fmt: skip
    """Of one layer of one pass. `rows`: (tokens of the sequence with this pass's, tokens of this pass) of each. K and V are read once a row and KV head."""
    limit = math.inf if window is None else window
    pairs = sum(min(position + 1, limit) for end, count in rows for position in range(end - count, end))
    read = sum(min(end, limit + count - 1) for end, count in rows)
    tokens = sum(count for _, count in rows)
    moved = (read + tokens) * 2 * kv_heads * dimension * page_itemsize
    return Work(int(4 * pairs * heads * dimension), int(moved + 2 * tokens * (heads + kv_heads) * dimension * itemsize))
