"""Attention over our pages on a CUDA device, in Triton: what its kernels are compiled for, and their launches.

There are four (`triton_kernels`): one puts the K and V of a pass where `slots` says; one attends for rows of one token, over a part of their
keys each, and one adds those parts up; one attends for prompt slices. Grids follow from the sizes of the buffers and never from what is in them, so a pass
can be captured as a CUDA graph: rows without a token and tokens with a slot below 0 do nothing. Sums run in an order that a sequence's
length alone decides, so what a row gets is the same, bit for bit, whatever stands beside it in a pass.

    arena   [frame, layer, K or V, token in page, KV head, d], strided over frames, offsets of 64 bits
    part    (row, KV head, some keys): the query heads of a group share what is read; at most MOST_PARTS a row, of at least PART_TOKENS keys

Sources: the split over keys and its sum are Flash-Decoding's (Dao, Haziza, Massa, Sizov, 2023); the running softmax is from Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from hexrt.kernels.attention import PassTensors
from hexrt.kernels.triton_kernels import join_kernel, part_kernel, slice_kernel, write_kernel

PART_TOKENS = 128
MOST_PARTS = 32
NO_WINDOW = 1 << 30
SHARED_BYTES = 96 << 10
"""What a block may have of a multiprocessor's shared memory on every architecture from sm_80 on (sm_86, sm_89 and sm_120 have 99 KiB)."""

COMMON = {"enable_fp_fusion": True}
PRODUCTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the kernels are compiled for; a function of the model's shape and dtypes alone."""

    heads: int
    kv_heads: int
    dimension: int
    page_tokens: int
    product: torch.dtype  # what tl.dot multiplies in; sums are float32
    keys: int  # looked at in one step
    queries: int  # rows of a slice's tile: queries times heads of a group
    warps: int
    stages: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def group_rows(self) -> int:
        """Rows of a one-token tile; a product of matrices has at least 16."""
        return max(16, _power_of_two(self.group))

    @property
    def dimension_up(self) -> int:
        return max(16, _power_of_two(self.dimension))

    @property
    def block_queries(self) -> int:
        return self.queries // self.group


def choose_sizes(query: Tensor, arena: Tensor, product: torch.dtype | None = None) -> Sizes:
    """`query` [tokens, heads, d]. The tiles of K and V, as often as they are in flight, stay within SHARED_BYTES.

    float32 has no tensor cores: small tiles over many threads, or its products do not fit in registers. Pages narrower than it are
    widened on their way from a tile in flight to registers, which takes a whole tile of them for each thread: so none is kept in flight.
    Pages wider than `product` take their own registers before they are narrowed, and so are read fewer at a time.
    """
    heads, dimension = query.shape[1:]
    page_tokens, kv_heads = arena.shape[3:5]
    product = product or query.dtype
    padded, group = max(16, _power_of_two(dimension)), max(16, _power_of_two(heads // kv_heads))
    page_size = arena.element_size()
    if product == torch.float32:
        same = page_size == product.itemsize
        keys = 32 if padded <= 128 and (same or group <= 32) else 16
        queries = max(group, 32)
        warps, stages = 4 if padded <= 64 and same else 8, 2 if same else 1
    else:
        keys, queries = 32 if page_size > product.itemsize else 64, max(group, 128 if padded <= 64 else 64)
        warps, stages = 4 if padded <= 128 else 8, 3
    size = max(product.itemsize, page_size)
    while padded * size * (queries + 2 * keys * stages) > SHARED_BYTES and stages > 1:
        stages -= 1
    return Sizes(heads, kv_heads, dimension, page_tokens, product, keys, queries, warps, stages)


def _power_of_two(number: int) -> int:
    """The least that is no less."""
    return 1 << (number - 1).bit_length()


# --- launches -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """An Attend for CUDA tensors. Its scratch comes from torch's allocator, and so from a graph's pool while one is captured.

    `product`: what products of matrices are computed in, the query's dtype unless given.
    """

    product: torch.dtype | None = None

    @property
    def name(self) -> str:
        return "Triton"

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, arena: Tensor, layer: int, tensors: PassTensors, *,
        scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, out: Tensor,
    ) -> None:  # fmt: skip
        sizes = choose_sizes(query, arena, self.product)
        pages = arena[:, layer]
        window = NO_WINDOW if window is None else window
        launch_write(sizes, key, value, pages, tensors, out)
        launch_singles(sizes, query, pages, tensors, scale, window, softcap, sinks, out)
        if tensors.longest > 1:
            launch_slices(sizes, query, pages, tensors, scale, window, softcap, sinks, out)


def launch_write(sizes: Sizes, key: Tensor, value: Tensor, pages: Tensor, tensors: PassTensors, out: Tensor) -> None:
    write_kernel[(len(key),)](
        key, value, tensors.slots, tensors.starts, pages, out, tensors.rows, *key.stride()[:2], *value.stride()[:2],
        *out.stride()[:2], *pages.stride()[:4], **write_constants(sizes),
    )  # fmt: skip


def launch_singles(
    sizes: Sizes, query: Tensor, pages: Tensor, tensors: PassTensors, scale: float, window: int, softcap: float | None,
    sinks: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    rows, width = tensors.tables.shape
    parts = min(MOST_PARTS, -(-width * sizes.page_tokens // PART_TOKENS))
    sums = torch.empty((rows, parts, sizes.heads, sizes.dimension), dtype=torch.float32, device=query.device)
    totals = torch.empty((rows, parts, sizes.heads, 2), dtype=torch.float32, device=query.device)
    part_kernel[(sizes.kv_heads, rows, parts)](
        query, pages, tensors.tables, tensors.starts, tensors.ends, sums, totals, window, scale, softcap or 1.0,
        *query.stride()[:2], *pages.stride()[:4], tensors.tables.stride(0), **part_constants(sizes, softcap is not None),
    )  # fmt: skip
    join_kernel[(sizes.heads, rows)](
        sums, totals, tensors.starts, tensors.ends, sinks, out, window, parts, *out.stride()[:2],
        **join_constants(sizes, sinks is not None),
    )  # fmt: skip


def launch_slices(
    sizes: Sizes, query: Tensor, pages: Tensor, tensors: PassTensors, scale: float, window: int, softcap: float | None,
    sinks: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    rows = tensors.rows
    slice_kernel[(sizes.kv_heads, len(query) // sizes.block_queries + rows)](
        query, pages, tensors.tables, tensors.starts, tensors.ends, sinks, out, rows, window, scale, softcap or 1.0,
        *query.stride()[:2], *out.stride()[:2], *pages.stride()[:4], tensors.tables.stride(0),
        **slice_constants(sizes, softcap is not None, sinks is not None),
    )  # fmt: skip


def write_constants(sizes: Sizes) -> dict[str, Any]:
    return {
        "HEADS": sizes.heads, "KV_HEADS": sizes.kv_heads, "WIDTH": sizes.dimension, "PAGE": sizes.page_tokens,
        "HEADS_UP": _power_of_two(sizes.heads), "KV_HEADS_UP": _power_of_two(sizes.kv_heads),
        "WIDTH_UP": sizes.dimension_up, "num_warps": 4, **COMMON,
    }  # fmt: skip


def part_constants(sizes: Sizes, capped: bool) -> dict[str, Any]:
    return {
        "HEADS": sizes.heads, "GROUP": sizes.group, "WIDTH": sizes.dimension, "PAGE": sizes.page_tokens,
        "GROUP_UP": sizes.group_rows, "WIDTH_UP": sizes.dimension_up, "KEYS": sizes.keys, "PART": PART_TOKENS,
        "PARTS": MOST_PARTS, "CAPPED": capped, "PRODUCT": PRODUCTS[sizes.product], "num_warps": sizes.warps,
        "num_stages": sizes.stages, **COMMON,
    }  # fmt: skip


def join_constants(sizes: Sizes, sunk: bool) -> dict[str, Any]:
    return {
        "HEADS": sizes.heads, "WIDTH": sizes.dimension, "WIDTH_UP": sizes.dimension_up, "KEYS": sizes.keys,
        "PART": PART_TOKENS, "PARTS": MOST_PARTS, "SUNK": sunk, "num_warps": 4, **COMMON,
    }  # fmt: skip


def slice_constants(sizes: Sizes, capped: bool, sunk: bool) -> dict[str, Any]:
    return {
        "GROUP": sizes.group, "WIDTH": sizes.dimension, "PAGE": sizes.page_tokens, "ROWS": sizes.queries,
        "WIDTH_UP": sizes.dimension_up, "KEYS": sizes.keys, "CAPPED": capped, "SUNK": sunk,
        "PRODUCT": PRODUCTS[sizes.product], "num_warps": sizes.warps, "num_stages": sizes.stages, **COMMON,
    }  # fmt: skip
