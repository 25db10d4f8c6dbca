"""Attention over pages: the compiled kernel against the reference, at every level that this processor runs, and what it promises."""

from __future__ import annotations

import ctypes
import itertools
import random
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hexrt.devices.places import anonymous  # noqa: E402
from hexrt.errors import InvariantViolation  # noqa: E402
from hexrt.kernels.attention import PassTensors, Reference, work  # noqa: E402
from hexrt.kernels.build import COMMON, SOURCES, find_compiler, levels  # noqa: E402
from hexrt.kernels.native import Native, load  # noqa: E402
from hexrt.kernels.native_attention import NativeAttention, choose  # noqa: E402
from tests.seeds import seeds  # noqa: E402

PAGE = 16
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 3e-6, BF16: 2e-2, F16: 3e-3}
LEVELS = [level.name for level in levels() if load(level.name).library is not None]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What is computed does not depend on it, and tests share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def check(shape: Shape, rows: Sequence[tuple[int, int]], level: str | Native, seed: int = 0) -> None:
    case = make(shape, rows, seed)
    other = replace(case, arena=case.arena.clone())
    expected = other.run(Reference())
    found = case.run(NativeAttention(load(level) if isinstance(level, str) else level))
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
@pytest.mark.parametrize("dimension", [8, 24, 64, 80, 128, 200, 256])
def test_every_head_dimension_gives_what_the_reference_gives(dimension: int, level: str) -> None:
    for page_dtype in (F32, BF16):
        for rows in (DECODE, MIXED):
            check(Shape(4, 2, dimension, page_dtype=page_dtype), rows, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 8), (8, 4), (12, 3), (10, 2), (7, 1), (71, 1)])
def test_any_number_of_query_heads_share_a_kv_head(heads: int, kv_heads: int, level: str) -> None:
    for rows in (DECODE, MIXED):
        check(Shape(heads, kv_heads, 32), rows, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_caps_and_sinks_are_those_of_the_reference(window: int | None, softcap: float | None, sinks: bool, level: str) -> None:  # fmt: skip
    for rows in (DECODE, MIXED):
        check(Shape(4, 2, 40, window=window, softcap=softcap, sinks=sinks), rows, level)


@pytest.mark.parametrize("seed", seeds(8, 400))
def test_passes_drawn_at_random_give_what_the_reference_gives(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads = draw.choice([1, 2, 3, 5])
    shape = Shape(
        kv_heads * draw.choice([1, 2, 3, 4, 5, 8]), kv_heads, 8 * draw.randint(1, 32), draw.choice([F32, BF16, F16]),
        draw.choice([F32, BF16, F16]), draw.choice([None, draw.randint(1, 500)]), draw.choice([None, 30.0]),
        draw.random() < 0.3, page=draw.choice([1, 5, 16, 16, 16, 32, 256]),
    )  # fmt: skip
    rows = [(draw.randint(1, 900), 1) for _ in range(draw.choice([0, 1, 3, 8, 20, 64]))]
    for _ in range(draw.randint(0 if rows else 1, 3)):
        end = draw.randint(1, 600)
        rows.append((end, draw.randint(1, end)))
    check(shape, rows, draw.choice(LEVELS), seed)


@pytest.mark.campaign
@pytest.mark.parametrize("flags", [("-DHX_WIDTH=16",), ("-DHX_WIDTH=8",)])
def test_vectors_of_a_width_that_this_processor_may_not_have_give_what_the_reference_gives(flags: Sequence[str], tmp_path: Path) -> None:  # fmt: skip
    sources = map(str, [*SOURCES.glob("attention*.c"), SOURCES / "team.c"])
    target = tmp_path / "wide.so"
    subprocess.run([*find_compiler(), *COMMON, *flags, "-o", str(target), *sources, "-lm"], check=True, timeout=100)
    native = Native("wide", ctypes.CDLL(str(target)))
    for dimension, page_dtype, heads in itertools.product([8, 24, 64, 72, 80], [F32, BF16, F16], [2, 8, 10, 18]):
        for rows in (DECODE, MIXED):
            check(
                Shape(heads, 2, dimension, BF16 if heads == 8 else F32, page_dtype, 90 if heads == 10 else None),
                rows,
                native,
            )


# --- what a kernel promises beside the numbers --------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_with_any_number_of_threads(level: str) -> None:
    rows = [*DECODE, (520, 1), *MIXED]
    case = make(Shape(), rows)
    kernel = NativeAttention(load(level))
    together = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        together.append(case.run(kernel))
    torch.set_num_threads(1)
    assert all(torch.equal(together[0], other) for other in together)
    for row, (end, _) in enumerate(rows):
        first, last = case.tensors.starts[row : row + 2].tolist()
        alone = replace(
            case, query=case.query[first:last], key=case.key[first:last], value=case.value[first:last],
            tensors=PassTensors(
                case.tensors.slots[first:last], case.tensors.tables[row : row + 1],
                torch.tensor([0, last - first], dtype=torch.int32), torch.tensor([end], dtype=torch.int32),
            ),
        )  # fmt: skip
        assert torch.equal(alone.run(kernel), together[0][first:last]), (row, end)


@pytest.mark.parametrize("level", LEVELS)
def test_a_prompt_has_the_same_bits_however_it_is_cut_into_slices(level: str) -> None:
    case = make(Shape(page_dtype=BF16, window=120), [(333, 333)])
    kernel = NativeAttention(load(level))
    whole = case.run(kernel)
    for cuts in ([0, 200, 333], [0, 7, 71, 135, 333], [0, 2, 331, 333]):
        fresh = replace(case, arena=torch.zeros_like(case.arena))
        found = []
        for first, last in itertools.pairwise(cuts):
            part = replace(
                fresh, query=case.query[first:last], key=case.key[first:last], value=case.value[first:last],
                tensors=PassTensors(
                    case.tensors.slots[first:last], case.tensors.tables,
                    torch.tensor([0, last - first], dtype=torch.int32), torch.tensor([last], dtype=torch.int32),
                ),
            )  # fmt: skip
            found.append(part.run(kernel))
        assert torch.equal(torch.cat(found), whole), cuts


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_spoils_its_own_row_alone_and_what_lies_behind_a_row_spoils_nothing(level: str, bad: float) -> None:  # fmt: skip
    rows = [(300, 1), (301, 1), (17, 1), (90, 40), (91, 40)]
    case = make(Shape(), rows)
    clean = case.run(NativeAttention(load(level)))
    used = torch.zeros(case.arena.shape[0], PAGE, dtype=torch.bool)
    for row, (end, _) in enumerate(rows):
        for position in range(end):
            used[case.tensors.tables[row, position // PAGE], position % PAGE] = True
    frame, token = (~used).nonzero(as_tuple=True)
    case.arena[frame, :, :, token] = bad
    assert torch.equal(case.run(NativeAttention(load(level))), clean), "past the ends, and in frames of others"
    for row in (1, 3):
        case.arena[case.tensors.tables[row, 1], 1, :, 3, 2, 5] = bad  # KV head 2: query heads 6 .. 8
    spoiled = ~case.run(NativeAttention(load(level))).isfinite().all(-1)
    expected = torch.zeros_like(spoiled)
    expected[1, 6:] = expected[3:43, 6:] = True
    assert torch.equal(spoiled, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_frames_beyond_four_gibibytes_are_reached(level: str) -> None:
    shape = Shape(4, 2, 64, page_dtype=BF16)
    frame_bytes = shape.layers * 2 * PAGE * shape.kv_heads * shape.dimension * 2
    frames = (9 << 30) // frame_bytes
    memory = torch.frombuffer(memoryview(anonymous(9 << 30)), dtype=torch.uint8)  # taken as it is touched
    case = make(shape, [(40, 1), (35, 20)])
    far = replace(case, arena=memory.view(BF16).view(frames, *case.arena.shape[1:]), tensors=PassTensors(
        case.tensors.slots + (frames - 16) * PAGE,
        torch.where(case.tensors.tables < 0, -1, case.tensors.tables + frames - 16),
        case.tensors.starts, case.tensors.ends, case.tensors.longest,
    ))  # fmt: skip
    assert len(case.arena) <= 16
    far.arena[frames - 16 : frames - 16 + len(case.arena)] = case.arena
    kernel = NativeAttention(load(level))
    assert torch.equal(far.run(kernel), case.run(kernel))
    assert torch.equal(far.arena[frames - 16 : frames - 16 + len(case.arena)], case.arena)


@pytest.mark.parametrize(
    "kernel", [Reference(), *(NativeAttention(load(level)) for level in LEVELS)], ids=lambda k: k.name
)
def test_rows_that_fill_up_a_pass_write_nothing_and_give_zeros(kernel: Any) -> None:
    case = make(Shape(), [(20, 1), (33, 1), (16, 1)])
    case.tensors.ends[1] = 0
    case.tensors.slots[1] = -1
    case.tensors.tables[1] = -7
    before = case.arena.clone()
    out = case.run(kernel)
    assert not out[1].any() and out[0].any() and out[2].any()
    changed = (case.arena != before).flatten(4).any(-1)[:, 1, 0].nonzero().tolist()
    assert sorted(f * PAGE + t for f, t in changed) == sorted(case.tensors.slots[[0, 2]].tolist())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("field", "index", "value", "words"),
    [
        ("starts", 2, 9, "rows do not follow"),
        ("starts", 1, -1, "rows do not follow"),
        ("ends", 0, 50, "longer than its table"),
        ("ends", 1, 1, "longer than its table"),
        ("tables", (0, 1), 99, "a frame is not there"),
        ("tables", (0, 0), -1, "a frame is not there"),
        ("slots", 0, 1 << 40, "a slot is not there"),
    ],
)
def test_a_pass_that_points_outside_its_memory_is_refused_with_nothing_touched(field: str, index: Any, value: int, words: str, level: str) -> None:  # fmt: skip
    case = make(Shape(), [(20, 1), (33, 5)])
    getattr(case.tensors, field)[index] = value
    before = case.arena.clone()
    with pytest.raises(InvariantViolation, match=words):
        case.run(NativeAttention(load(level)))
    assert torch.equal(case.arena, before)


def test_tensors_that_do_not_fit_each_other_are_refused() -> None:
    case = make(Shape(), [(20, 1), (33, 5)])
    wrong = [
        replace(case, key=case.key[:, :2]), replace(case, query=case.query.double()), replace(case, value=case.value[1:]),
        replace(case, query=case.query.transpose(1, 2).contiguous().transpose(1, 2)),
        replace(case, tensors=replace(case.tensors, slots=case.tensors.slots.int())),
        replace(case, tensors=replace(case.tensors, ends=case.tensors.ends[:1])),
    ]  # fmt: skip
    for other in wrong:
        with pytest.raises(InvariantViolation, match="do not fit"):
            other.run(NativeAttention())


def test_the_choice_of_a_kernel_says_why_it_is_not_the_best() -> None:
    kernel, why = choose(F32, BF16, 64)
    assert (kernel.name, why) == (f"compiled, {LEVELS[0]}", "")
    kernel, why = choose(F32, F32, 512)
    assert (kernel.name, why) == ("plain torch", "heads of 512 are longer than 256")
    kernel, why = choose(torch.float64, F32, 64)
    assert (kernel.name, why) == ("plain torch", "numbers are torch.float64 in torch.float32 pages")


def test_the_work_of_a_pass_counts_what_rows_see_and_moves() -> None:
    decode = work([(512, 1)], 9, 3, 64, 4, 4)
    assert decode.flops == 4 * 512 * 9 * 64
    assert decode.bytes == 513 * 2 * 3 * 64 * 4 + 2 * 12 * 64 * 4
    assert work([(4, 4)], 1, 1, 8, 2, 4).flops == 4 * (1 + 2 + 3 + 4) * 8
    assert work([(512, 1)], 9, 3, 64, 4, 4, window=100).flops == 4 * 100 * 9 * 64
