"""Device code of attention over our pages, in Triton: four kernels, launched by `triton_attention`, which says what they share.

Strides are in elements. `frame`, `half`, `place` and `head` are those of one layer's pages [frame, K or V, token in page, KV head, d]. A name
in capitals is a constant of the compiled kernel; ..._UP is rounded up to a power of two. Triton reads annotations too, so none but
constants have one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def write_kernel(
    key, value, slots, starts, pages, out, rows, key_token, key_head,
    value_token, value_head, out_token, out_head, frame, half, place, head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, HEADS_UP: tl.constexpr,
    KV_HEADS_UP: tl.constexpr, WIDTH_UP: tl.constexpr,
):  # fmt: skip
    """One program a token; tokens of no row get zeros. `frame`, `half`, `place`, `head`: strides of `pages`, in elements."""
    token = tl.program_id(0).to(tl.int64)
    across = tl.arange(0, WIDTH_UP)[None, :]
    if token >= tl.load(starts + rows):
        asking = tl.arange(0, HEADS_UP)[:, None]
        blank = tl.zeros([HEADS_UP, WIDTH_UP], out.dtype.element_ty)
        there = (asking < HEADS) & (across < WIDTH)
        tl.store(out + token * out_token + asking * out_head + across, blank, mask=there)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    heads = tl.arange(0, KV_HEADS_UP)[:, None]
    there = (heads < KV_HEADS) & (across < WIDTH)
    target = pages + (slot // PAGE) * frame + (slot % PAGE) * place + heads * head + across
    keys = tl.load(key + token * key_token + heads * key_head + across, mask=there)
    tl.store(target, keys.to(pages.dtype.element_ty), mask=there)
    values = tl.load(value + token * value_token + heads * value_head + across, mask=there)
    tl.store(target + half, values.to(pages.dtype.element_ty), mask=there)


@triton.jit
def _look(
    query, pages, table, begin, stop, position, window, scale, softcap,
    best, total, sums, frame, half, place,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, WIDTH_UP: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """The running softmax over keys begin .. begin + KEYS, of those below `stop`. best, total [rows]; sums [rows, WIDTH_UP]; in powers of 2."""
    at = begin + tl.arange(0, KEYS)
    across = tl.arange(0, WIDTH_UP)
    frames = tl.load(table + at // PAGE, mask=at < stop, other=0).to(tl.int64)
    source = pages + (frames * frame + (at % PAGE) * place)[:, None] + across[None, :]
    # Past the end a page may hold anything, and 0 times NaN is NaN.
    there = (at < stop)[:, None] & (across < WIDTH)[None, :]
    keys = tl.load(source, mask=there, other=0.0).to(PRODUCT)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if CAPPED:
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2_E / softcap))))
    seen = (at[None, :] <= position[:, None]) & (at[None, :] > position[:, None] - window) & (at < stop)[None, :]
    scores = tl.where(seen, scores * LOG2_E, float("-inf"))
    most = tl.maximum(best, tl.max(scores, 1))
    # A row that has seen nothing yet: -inf less -inf is NaN.
    base = tl.where(most == float("-inf"), 0.0, most)
    shares = tl.exp2(scores - base[:, None])
    fade = tl.exp2(best - base)
    values = tl.load(source + half, mask=there, other=0.0).to(PRODUCT)
    total = total * fade + tl.sum(shares, 1)
    sums = tl.dot(shares.to(PRODUCT), values, sums * fade[:, None], input_precision="ieee")
    return most, total, sums


@triton.jit
def _part_tokens(end, PART: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr):
    """Keys of a part of a sequence of `end` tokens: as few as PARTS parts allow."""
    return tl.maximum(PART, tl.cdiv(tl.cdiv(end, PARTS), KEYS) * KEYS)


@triton.jit
def part_kernel(
    query, pages, tables, starts, ends, part_sums, part_totals, window,
    scale, softcap, query_token, query_head, frame, half, place, head,
    table_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, GROUP_UP: tl.constexpr,
    WIDTH_UP: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """One program a KV head, row and part. part_sums [row, part, head, d] and part_totals [row, part, head, 2], float32."""
    kv_head, row, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    token = tl.load(starts + row)
    if tl.load(starts + row + 1) - token != 1:
        return
    end = tl.load(ends + row)
    size = _part_tokens(end, PART, PARTS, KEYS)
    stop = tl.minimum((part + 1) * size, end)
    begin = part * size + tl.maximum(end - window - part * size, 0) // KEYS * KEYS
    if begin >= stop:
        return
    member = tl.arange(0, GROUP_UP)
    across = tl.arange(0, WIDTH_UP)
    heads = kv_head * GROUP + member
    there = (member < GROUP)[:, None] & (across < WIDTH)[None, :]
    asked = query + token.to(tl.int64) * query_token + heads[:, None] * query_head + across[None, :]
    queries = tl.load(asked, mask=there, other=0.0).to(PRODUCT)
    position = tl.full([GROUP_UP], 0, tl.int32) + end - 1
    best = tl.full([GROUP_UP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_UP], tl.float32)
    sums = tl.zeros([GROUP_UP, WIDTH_UP], tl.float32)
    for at in range(begin, stop, KEYS):
        best, total, sums = _look(
            queries, pages + kv_head * head, tables + row * table_row, at, stop, position, window, scale, softcap,
            best, total, sums, frame, half, place, WIDTH, PAGE, WIDTH_UP, KEYS, CAPPED, PRODUCT,
        )  # fmt: skip
    cell = (row * tl.num_programs(2) + part) * HEADS + heads
    tl.store(part_sums + cell[:, None] * WIDTH + across[None, :], sums, mask=there)
    tl.store(part_totals + cell * 2, best, mask=member < GROUP)
    tl.store(part_totals + cell * 2 + 1, total, mask=member < GROUP)


@triton.jit
def join_kernel(
    part_sums, part_totals, starts, ends, sinks, out, window, parts,
    out_token, out_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_UP: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr,
    PARTS: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    """One program a head and row: adds up its parts, and the head's sink."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tl.load(starts + row)
    if tl.load(starts + row + 1) - token != 1:
        return
    end = tl.load(ends + row)
    size = _part_tokens(end, PART, PARTS, KEYS)
    part = tl.arange(0, PARTS)
    across = tl.arange(0, WIDTH_UP)
    held = (part * size < end) & ((part + 1) * size > end - window)
    cell = (row * parts + part) * HEADS + head
    most = tl.load(part_totals + cell * 2, mask=held, other=float("-inf"))
    best = tl.max(most, 0)
    if SUNK:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        best = tl.maximum(best, sink)
    best = tl.where(end == 0, 0.0, best)
    weight = tl.exp2(most - best)
    total = tl.sum(tl.load(part_totals + cell * 2 + 1, mask=held, other=0.0) * weight, 0)
    if SUNK:
        total += tl.exp2(sink - best)
    there = held[:, None] & (across < WIDTH)[None, :]
    sums = tl.load(part_sums + cell[:, None] * WIDTH + across[None, :], mask=there, other=0.0)
    answer = tl.sum(sums * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    target = out + token.to(tl.int64) * out_token + head * out_head + across
    tl.store(target, answer.to(out.dtype.element_ty), mask=across < WIDTH)


@triton.jit
def _row_of(starts, rows, block, QUERIES: tl.constexpr):
    """The last row r with starts[r] // QUERIES + r <= block: every row has blocks enough for its tokens, of its own."""
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // QUERIES + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def slice_kernel(
    query, pages, tables, starts, ends, sinks, out, rows, window,
    scale, softcap, query_token, query_head, out_token, out_head, frame, half,
    place, head, table_row,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, WIDTH_UP: tl.constexpr,
    KEYS: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """One program a KV head and block of ROWS // GROUP queries of one row, times the heads of the group."""
    kv_head, block = tl.program_id(0), tl.program_id(1)
    queries: tl.constexpr = ROWS // GROUP
    row = _row_of(starts, rows, block, queries)
    first = tl.load(starts + row)
    count = tl.load(starts + row + 1) - first
    offset = (block - first // queries - row) * queries
    if (count < 2) | (offset >= count):
        return
    end = tl.load(ends + row)
    line = tl.arange(0, ROWS)
    across = tl.arange(0, WIDTH_UP)
    step = offset + line // GROUP
    heads = kv_head * GROUP + line % GROUP
    there = ((line // GROUP < queries) & (step < count))[:, None] & (across < WIDTH)[None, :]
    token = (first + step).to(tl.int64)
    asked = query + (token * query_token + heads * query_head)[:, None] + across[None, :]
    asking = tl.load(asked, mask=there, other=0.0).to(PRODUCT)
    position = end - count + step
    stop = tl.minimum(end, end - count + offset + queries)
    begin = tl.maximum(end - count + offset - window + 1, 0) // KEYS * KEYS
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH_UP], tl.float32)
    for at in range(begin, stop, KEYS):
        best, total, sums = _look(
            asking, pages + kv_head * head, tables + row.to(tl.int64) * table_row, at, stop, position, window, scale,
            softcap, best, total, sums, frame, half, place, WIDTH, PAGE, WIDTH_UP, KEYS, CAPPED, PRODUCT,
        )  # fmt: skip
    if SUNK:
        sink = tl.load(sinks + heads, mask=line // GROUP < queries, other=0.0).to(tl.float32) * LOG2_E
        base = tl.maximum(best, sink)
        fade = tl.exp2(best - base)
        total = total * fade + tl.exp2(sink - base)
        sums = sums * fade[:, None]
    total = tl.where(total == 0, 1.0, total)
    target = out + (token * out_token + heads * out_head)[:, None] + across[None, :]
    tl.store(target, (sums / total[:, None]).to(out.dtype.element_ty), mask=there)
