"""Seeded passes over pages to compare kernels on: rows of any lengths, pages scattered over an arena, rest of it not a number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hexrt.kernels.attention import Attend, PassTensors, Reference

PAGE = 16
LAYERS, LAYER = 2, 1
GAP = 64
"""Elements between two frames that belong to nobody."""


@dataclass(frozen=True)
class Case:
    """`rows`: (tokens of the sequence with this pass's, tokens of this pass), single tokens first. `padding`: rows, and tokens, of nothing."""

    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    dimension: int = 32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    page_dtype: torch.dtype = torch.float32
    padding: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Pass:
    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    arena: Tensor
    tensors: PassTensors
    sinks: Tensor | None

    def attend(self, kernel: Attend) -> tuple[Tensor, Tensor]:
        """What it answers, and the arena after it: a copy of this one."""
        arena, case = copy_arena(self.arena), self.case
        out = torch.full_like(self.query, torch.nan)
        kernel(
            self.query, self.key, self.value, arena, LAYER, self.tensors, scale=case.dimension**-0.5,
            window=case.window, softcap=case.softcap, sinks=self.sinks, out=out,
        )  # fmt: skip
        return out, arena


def copy_arena(arena: Tensor) -> Tensor:
    whole = arena.as_strided((arena.shape[0] * arena.stride(0),), (1,))
    return whole.clone().as_strided(arena.shape, arena.stride())


def make(case: Case, device: str = "cpu") -> Pass:
    """What is drawn of a row depends on the seed and the row's place alone."""
    draw = torch.Generator().manual_seed(case.seed)
    pages = [-(-end // PAGE) for end, _ in case.rows]
    frames = torch.randperm(sum(pages) + 3, generator=draw).tolist()
    shape = (len(frames), LAYERS, 2, PAGE, case.kv_heads, case.dimension)
    frame = LAYERS * 2 * PAGE * case.kv_heads * case.dimension + GAP
    inner = torch.empty(shape[1:]).stride()
    arena = torch.full((len(frames) * frame,), torch.nan).to(case.page_dtype).as_strided(shape, (frame, *inner))
    tables = torch.full((len(case.rows) + case.padding, max(pages)), -1, dtype=torch.int32)
    slots: list[int] = []
    parts = []
    for row, (end, count) in enumerate(case.rows):
        table = [frames.pop() for _ in range(pages[row])]
        tables[row, : len(table)] = torch.tensor(table)
        own = torch.Generator().manual_seed(case.seed * 1000 + row)
        parts.append(_drawn(case, count, own))
        past = torch.randn((2, end, case.kv_heads, case.dimension), generator=own).to(case.page_dtype)
        for position in range(end - count):
            arena[table[position // PAGE], LAYER, :, position % PAGE] = past[:, position]
        slots += [table[p // PAGE] * PAGE + p % PAGE for p in range(end - count, end)]
    parts += [_drawn(case, 1, draw) for _ in range(case.padding)]
    query, key, value = (torch.cat([part[kind] for part in parts]) for kind in range(3))
    sinks = torch.randn(case.heads, generator=torch.Generator().manual_seed(case.seed)) if case.sinks else None
    # Keys come transposed out of a model's rotary embedding: heads first.
    key = key.transpose(0, 1).contiguous().transpose(0, 1)
    tensors = _tensors(case, slots, tables, device)
    on = [None if tensor is None else tensor.to(device) for tensor in (query, key, value, sinks)]
    assert on[0] is not None and on[1] is not None and on[2] is not None
    return Pass(case, on[0], on[1], on[2], _to(arena, device), tensors, on[3])


def _drawn(case: Case, count: int, draw: torch.Generator) -> list[Tensor]:
    """Query, key, value of `count` tokens. Keys and values are of the pages' dtype: how they are rounded is not compared."""
    query = torch.randn((count, case.heads, case.dimension), generator=draw)
    kept = torch.randn((2, count, case.kv_heads, case.dimension), generator=draw).to(case.page_dtype)
    return [query.to(case.dtype), kept[0].to(case.dtype), kept[1].to(case.dtype)]


def _to(arena: Tensor, device: str) -> Tensor:
    whole = arena.as_strided((arena.shape[0] * arena.stride(0),), (1,))
    return whole.to(device).as_strided(arena.shape, arena.stride())


def _tensors(case: Case, slots: list[int], tables: Tensor, device: str) -> PassTensors:
    ends = [end for end, _ in case.rows] + [0] * case.padding
    counts = torch.tensor([0, *(count for _, count in case.rows), *([0] * case.padding)])
    return PassTensors(
        torch.tensor(slots + [-1] * case.padding, device=device),
        tables.to(device),
        counts.cumsum(0).to(device, torch.int32),
        torch.tensor(ends, dtype=torch.int32, device=device),
        max(count for _, count in case.rows),
    )


def furthest(kernel: Attend, case: Case, device: str = "cpu") -> tuple[float, bool]:
    """How far `kernel` is from the reference at most, computed in float32 of the same numbers; and whether it wrote the same pages."""
    made = make(case, device)
    out, arena = made.attend(kernel)
    expected, pages = made.attend(Reference())
    same = torch.equal(arena.view(_bits(arena)), pages.view(_bits(pages)))
    return float((out.float() - expected.float()).abs().nan_to_num(torch.inf).max()), same


def _bits(tensor: Tensor) -> torch.dtype:
    return torch.int32 if tensor.element_size() == 4 else torch.int16
