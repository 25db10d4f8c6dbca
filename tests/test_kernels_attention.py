"""Attention over pages: the compiled kernel against the reference, at every level that this processor runs, and what it promises."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hexrt.devices.places import anonymous  # noqa: E402
from hexrt.errors import InvariantViolation, Unavailable  # noqa: E402
from hexrt.kernels.attention import PassTensors, Reference, work  # noqa: E402
from hexrt.kernels.build import levels  # noqa: E402
from hexrt.kernels.native import load  # noqa: E402
from hexrt.kernels.native_attention import NativeAttention, choose  # noqa: E402
from tests.seeds import seeds  # noqa: E402

PAGE = 16
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 3e-6, BF16: 2e-2, F16: 3e-3}
LEVELS = [level.name for level in levels() if load(level.name).library is not None]

pytestmark = pytest.mark.skipif(not LEVELS, reason=f"no compiled kernels: {load().why}")


@dataclass(frozen=True)
class Shape:
    heads: int = 9
    kv_heads: int = 3
    dimension: int = 64
    dtype: Any = F32
    page_dtype: Any = F32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    layers: int = 2
    page: int = PAGE


@dataclass
class Case:
    """A pass over `rows` of (tokens of the sequence with this pass's, tokens of the pass), its pages filled with what came before."""

    shape: Shape
    query: Any
    key: Any
    value: Any
    arena: Any
    tensors: PassTensors
    sinks: Any

    def run(self, attend: Any) -> Any:
        out = torch.full_like(self.query, torch.nan)
        attend(
            self.query, self.key, self.value, self.arena, 1, self.tensors, scale=self.shape.dimension**-0.5,
            window=self.shape.window, softcap=self.shape.softcap, sinks=self.sinks, out=out,
        )  # fmt: skip
        return out


def make(shape: Shape, rows: Sequence[tuple[int, int]], seed: int = 0, spare: int = 3) -> Case:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(count for _, count in rows)
    pages = [-(-end // shape.page) for end, _ in rows]
    frames = random.Random(seed).sample(range(sum(pages) + spare), sum(pages))
    width = max(pages)
    tables = torch.full((len(rows), width), -1, dtype=torch.int32)
    slots: list[int] = []
    taken = iter(frames)
    for row, (end, count) in enumerate(rows):
        table = list(itertools.islice(taken, pages[row]))
        tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        slots += [table[p // shape.page] * shape.page + p % shape.page for p in range(end - count, end)]

    def normal(*sizes: int) -> Any:
        return torch.randn(sizes, generator=generator)

    starts = torch.tensor([0, *itertools.accumulate(count for _, count in rows)], dtype=torch.int32)
    page = (shape.layers, 2, shape.page, shape.kv_heads, shape.dimension)
    return Case(
        shape,
        normal(shape.heads, tokens, shape.dimension).transpose(0, 1).to(shape.dtype) * 2,  # strided as models give it
        normal(tokens, shape.kv_heads, shape.dimension).to(shape.dtype),
        normal(tokens, shape.kv_heads, shape.dimension).to(shape.dtype),
        normal(sum(pages) + spare, *page).to(shape.page_dtype),
        PassTensors(
            torch.tensor(slots), tables, starts, torch.tensor([end for end, _ in rows], dtype=torch.int32),
            max(count for _, count in rows),
        ),
        normal(shape.heads) if shape.sinks else None,
    )  # fmt: skip


def check(shape: Shape, rows: Sequence[tuple[int, int]], level: str, seed: int = 0) -> None:
    case = make(shape, rows, seed)
    other = replace(case, arena=case.arena.clone())
    expected = other.run(Reference())
    found = case.run(NativeAttention(load(level)))
    assert torch.equal(case.arena, other.arena), "pages"
    off = (found.float() - expected.float()).abs().max() / max(1.0, float(expected.float().abs().max()))
    assert off <= TOLERANCE[shape.dtype], f"off by {off:.2g}"


DECODE = [(1, 1), (15, 1), (16, 1), (17, 1), (255, 1), (256, 1), (257, 1), (700, 1)]
MIXED = [(5, 1), (300, 1), (2, 2), (40, 24), (64, 64), (129, 65), (333, 200)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("page_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_every_pair_of_dtypes_gives_what_the_reference_gives(dtype: Any, page_dtype: Any, level: str) -> None:
    for rows in (DECODE, MIXED):
        check(Shape(dtype=dtype, page_dtype=page_dtype), rows, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dimension", [8, 16, 24, 64, 72, 80, 128, 200, 256])
def test_every_head_dimension_gives_what_the_reference_gives(dimension: int, level: str) -> None:
    for page_dtype in (F32, BF16):
        for rows in (DECODE, MIXED):
            check(Shape(4, 2, dimension, page_dtype=page_dtype), rows, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (8, 8), (8, 4), (12, 3), (10, 2), (6, 1), (7, 1), (16, 2), (71, 1)]
)
def test_any_number_of_query_heads_share_a_kv_head(heads: int, kv_heads: int, level: str) -> None:
    for rows in (DECODE, MIXED):
        check(Shape(heads, kv_heads, 32), rows, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("window", [None, 1, 15, 64, 100, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0, 50.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_caps_and_sinks_are_those_of_the_reference(window: int | None, softcap: float | None, sinks: bool, level: str) -> None:  # fmt: skip
    for rows in (DECODE, MIXED):
        check(Shape(4, 2, 40, window=window, softcap=softcap, sinks=sinks), rows, level)


@pytest.mark.parametrize("seed", seeds(20, 400))
def test_passes_drawn_at_random_give_what_the_reference_gives(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads = draw.choice([1, 2, 3, 5])
    shape = Shape(
        kv_heads * draw.choice([1, 2, 3, 4, 5, 8]), kv_heads, 8 * draw.randint(1, 32), draw.choice([F32, BF16, F16]),
        draw.choice([F32, BF16, F16]), draw.choice([None, draw.randint(1, 500)]), draw.choice([None, 30.0]),
        draw.random() < 0.3, page=draw.choice([1, 5, 16, 16, 16, 32, 256]),
    )  # fmt: skip
    rows = [(draw.randint(1, 900), 1) for _ in range(draw.randint(0, 64))]
    for _ in range(draw.randint(0 if rows else 1, 3)):
        end = draw.randint(1, 600)
        rows.append((end, draw.randint(1, end)))
    check(shape, rows, draw.choice(LEVELS), seed)
