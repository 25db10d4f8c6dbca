"""Attention over pages on the device: our Triton kernels, FlashInfer and FlashAttention 3 against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hexrt.kernels.attention import Attend, PassTensors, Reference, work, write_pages
from hexrt.kernels.flash import (
    FLASH_3,
    FLASHINFER,
    TRITON,
    Choice,
    Wanted,
    available,
    build,
    choose,
    planner,
)
from tests.attention_cases import LAYER, PAGE, Case, copy_arena, furthest, make
from tests.device.conftest import Clock

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
MIXED = ((1, 1), (16, 1), (129, 1), (700, 1), (4200, 1), (20, 20), (45, 13), (600, 257))
SHAPES = [
    {"heads": 9, "kv_heads": 3, "dimension": 64}, {"heads": 32, "kv_heads": 8, "dimension": 128},
    {"heads": 8, "kv_heads": 4, "dimension": 256}, {"heads": 14, "kv_heads": 2, "dimension": 64},
    {"heads": 6, "kv_heads": 6, "dimension": 80}, {"heads": 40, "kv_heads": 1, "dimension": 96},
]  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {}, {"window": 1}, {"window": 128}, {"softcap": 3.0}, {"sinks": True},
    {"window": 300, "softcap": 3.0, "sinks": True},
]  # fmt: skip
WITHIN = {FLOAT: 2e-5, HALF: 4e-3, BRAIN: 3e-2}
LIBRARIES = [FLASHINFER, FLASH_3]


def kernel(name: str) -> Attend:
    return build(Choice(name, name), torch.device("cuda"))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize(
    "dtypes", [(FLOAT, FLOAT), (BRAIN, BRAIN), (HALF, HALF), (FLOAT, BRAIN), (BRAIN, FLOAT)], ids=str
)
def test_our_kernels_answer_as_the_reference_does_and_write_the_same_pages(
    dtypes: tuple[torch.dtype, torch.dtype], shape: dict[str, int]
) -> None:
    for seed, kind in enumerate(KINDS):
        case = Case(MIXED, dtype=dtypes[0], page_dtype=dtypes[1], padding=3, seed=seed, **shape, **kind)
        off, same_pages = furthest(kernel(TRITON), case, "cuda")
        assert off <= WITHIN[dtypes[0]], kind
        assert same_pages


def test_numbers_are_rounded_into_pages_as_torch_rounds_them() -> None:
    made = make(Case(MIXED, dtype=FLOAT, page_dtype=BRAIN), "cuda")
    made = replace(made, key=torch.randn_like(made.key), value=torch.randn_like(made.value))
    expected = copy_arena(made.arena)
    write_pages(expected[:, LAYER], made.key, made.value, made.tensors.slots)
    _, arena = made.attend(kernel(TRITON))
    assert torch.equal(arena.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN, HALF], ids=str)
def test_a_row_is_answered_the_same_to_the_last_bit_whatever_stands_beside_it(dtype: torch.dtype) -> None:
    made = make(Case(MIXED, heads=32, kv_heads=8, dimension=128, dtype=dtype, page_dtype=dtype), "cuda")
    together, _ = made.attend(kernel(TRITON))
    starts = made.tensors.starts.tolist()
    for row in range(len(MIXED)):
        own = slice(starts[row], starts[row + 1])
        count = own.stop - own.start
        begins = torch.tensor([0, count], dtype=torch.int32, device="cuda")
        tensors = PassTensors(
            made.tensors.slots[own], made.tensors.tables[row : row + 1], begins, made.tensors.ends[row : row + 1], count
        )
        alone = replace(made, query=made.query[own], key=made.key[own], value=made.value[own], tensors=tensors)
        assert torch.equal(alone.attend(kernel(TRITON))[0], together[own]), MIXED[row]


def test_frames_more_than_four_billion_elements_apart_are_told_apart() -> None:
    apart = 1 << 30
    if torch.cuda.mem_get_info()[0] < 6 * apart * 2:
        pytest.skip("needs 12 GiB of free device memory")
    made = make(Case(((70, 1), (5, 5)), dtype=BRAIN, page_dtype=BRAIN), "cuda")
    inner = made.arena.stride()[1:]
    wide = torch.zeros(6 * apart, dtype=BRAIN, device="cuda").as_strided((6, *made.arena.shape[1:]), (apart, *inner))
    used = sorted({int(f) for f in made.tensors.tables.flatten().tolist() if f >= 0})
    places = {frame: 5 - number for number, frame in enumerate(used)}
    for frame, place in places.items():
        wide[place] = made.arena[frame]
    tables = torch.tensor([[places.get(f, -1) for f in table] for table in made.tensors.tables.tolist()], dtype=torch.int32)  # fmt: skip
    slots = torch.tensor([places[s // PAGE] * PAGE + s % PAGE for s in made.tensors.slots.tolist()])
    tensors = replace(made.tensors, tables=tables.cuda(), slots=slots.cuda())
    expected, _ = made.attend(Reference())
    out = torch.empty_like(made.query)
    kernel(TRITON)(made.query, made.key, made.value, wide, LAYER, tensors, scale=made.case.dimension**-0.5, out=out)
    assert float((out.float() - expected.float()).abs().max()) <= WITHIN[BRAIN]


@pytest.mark.parametrize("rows", [MIXED[:5], MIXED], ids=["decode", "with slices"])
def test_a_captured_pass_answers_as_the_pass_itself_for_whatever_is_in_its_buffers(rows: tuple[Any, ...]) -> None:
    first = make(Case(rows, heads=8, kv_heads=2, dimension=64, dtype=BRAIN, page_dtype=BRAIN, seed=1), "cuda")
    attend, out, arena = kernel(TRITON), torch.empty_like(first.query), copy_arena(first.arena)

    def run() -> None:
        attend(first.query, first.key, first.value, arena, LAYER, first.tensors, scale=0.125, out=out)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    shorter = tuple((max(count, end - 7), count) for end, count in rows)
    second = make(Case(shorter, heads=8, kv_heads=2, dimension=64, dtype=BRAIN, page_dtype=BRAIN, seed=1), "cuda")
    wide = first.tensors.tables.shape[1] - second.tensors.tables.shape[1]
    second = replace(second, tensors=replace(second.tensors, tables=torch.nn.functional.pad(second.tensors.tables, (0, wide))))  # fmt: skip
    arena[: len(second.arena)] = second.arena[: len(arena)]
    for there, here in ((first.query, second.query), (first.key, second.key), (first.value, second.value)):
        there.copy_(here)
    for name in ("slots", "tables", "starts", "ends"):
        getattr(first.tensors, name).copy_(getattr(second.tensors, name))
    graph.replay()
    assert torch.equal(out, second.attend(attend)[0])


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_an_installed_library_answers_as_the_reference_does_over_strided_views(name: str, dtype: torch.dtype) -> None:
    fit_or_skip(name, dtype)
    attend = kernel(name)
    for seed, kind in enumerate(({}, {"window": 128}, {"softcap": 3.0})):
        for shape in SHAPES[:3]:
            case = Case(MIXED, dtype=dtype, page_dtype=dtype, seed=seed, **shape, **kind)
            begin(attend, case)
            off, same_pages = furthest(attend, case, "cuda")
            assert off <= WITHIN[dtype], (kind, shape)
            assert same_pages


def fit_or_skip(name: str, dtype: torch.dtype) -> None:
    missing = available()
    chosen = choose(torch.cuda.get_device_capability(), Wanted(dtype, dtype, 128), missing)
    if missing[name] or (name == FLASH_3 and name not in (chosen.slices, chosen.decodes)):
        pytest.skip(f"{name} does not serve here: {missing[name] or chosen.reasons[0]}")


def begin(attend: Attend, case: Case) -> None:
    planned = planner(attend)
    if planned is not None:
        counts, ends = [count for _, count in case.rows], [end for end, _ in case.rows]
        planned.begin(counts, ends, make(case).tensors.tables.tolist())


@pytest.mark.parametrize("name", [TRITON, *LIBRARIES])
@pytest.mark.parametrize(
    "rows", [((512, 1),), ((512, 1),) * 16, ((512, 1),) * 64, ((8192, 1),), ((512, 512),), ((4096, 512),)], ids=str
)
def test_speed_is_printed(name: str, rows: tuple[tuple[int, int], ...], clock: Clock) -> None:
    fit_or_skip(name, BRAIN)
    case = Case(rows, heads=32, kv_heads=8, dimension=128, dtype=BRAIN, page_dtype=BRAIN)
    made, attend = make(case, "cuda"), kernel(name)
    out = torch.empty_like(made.query)
    begin(attend, case)

    def run() -> None:
        attend(made.query, made.key, made.value, made.arena, LAYER, made.tensors, scale=0.088, out=out)

    moved = work(rows, 32, 8, 128, 2, 2).bytes
    clock(f"{name}, {len(rows)} rows of {rows[0][1]} of {rows[0][0]}", run, moved)
