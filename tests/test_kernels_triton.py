"""The Triton kernels, in Triton's interpreter against the reference, and compiled for three architectures. What a GPU alone can show is in tests/device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hexrt.kernels.triton_attention import SHARED_BYTES
from tests.triton_compiled import Shape, compiled

MIXED = "((1, 1), (16, 1), (70, 1), (20, 20), (45, 13))"
"""Rows of one token, within a page and at its end and over several; a prompt's first slice and a later one."""

ROOT = Path(__file__).resolve().parent.parent
EXACT = 5e-6
MOST_STACK_BYTES = 64
CASES = {
    "every kind of row": (f"Case({MIXED}, padding=1)", EXACT),
    "a sliding window": ("Case(((70, 1), (45, 13)), window=7, seed=1)", EXACT),
    "a window, capped scores and sinks": (f"Case({MIXED}, window=18, softcap=2.0, sinks=True, seed=2)", EXACT),
    "rows of one token only, in a padded bucket": (
        "Case(((5, 1), (150, 1)), heads=6, padding=2, sinks=True, seed=3)",
        EXACT,
    ),
    "a head dimension and a group that are no powers of two": (
        "Case(((33, 1), (20, 4)), heads=9, kv_heads=3, dimension=80, seed=4)",
        EXACT,
    ),
    "pages of bfloat16 under float32": ("Case(((33, 1), (20, 4)), page_dtype=torch.bfloat16, seed=5)", EXACT),
    "everything in bfloat16": (
        "Case(((40, 1), (9, 9)), dtype=torch.bfloat16, page_dtype=torch.bfloat16, seed=6)",
        0.02,
    ),
}
LONG = [
    f"Case((({tokens}, 1), ({tokens + 3}, 1), (30, 30), ({tokens + 40}, 37)), {shape}, {kind}, seed={seed})"
    for seed, (tokens, shape, kind) in enumerate(
        (tokens, shape, kind)
        for tokens in (127, 128, 129, 700)
        for shape in ("heads=4, kv_heads=4, dimension=64", "heads=14, kv_heads=2, dimension=128", "heads=20, kv_heads=1, dimension=256")
        for kind in ("window=None", "window=128", "window=1", "softcap=30.0, sinks=True")
    )
]  # fmt: skip


def interpret(lines: list[str], timeout: int = 100) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_interpreted"],
        input="".join(f"{line}\n" for line in lines), cwd=ROOT, capture_output=True, text=True, timeout=timeout,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    lines = [f"'compare', {case}" for case, _ in CASES.values()] + [
        "'alone', Case(((16, 1), (70, 1), (20, 20)), window=30, sinks=True)"
    ]
    return dict(zip([*CASES, "alone"], interpret(lines), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_answer_as_the_reference_does_and_write_the_same_pages(
    name: str, interpreted: dict[str, Any]
) -> None:
    furthest, same_pages = interpreted[name]
    assert furthest <= CASES[name][1]
    assert same_pages


def test_a_row_is_answered_the_same_to_the_last_bit_whatever_stands_beside_it(interpreted: dict[str, Any]) -> None:
    assert interpreted["alone"] is True


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_the_kernels_answer_as_the_reference_does_over_a_grid_of_shapes() -> None:
    answers = interpret([f"'compare', {case}" for case in LONG], timeout=1800)
    wrong = {case: answer for case, answer in zip(LONG, answers, strict=True) if answer[0] > 2e-5 or not answer[1]}
    assert not wrong


def check_compiled(architecture: int, shape: Shape, *only: str) -> None:
    for made in compiled(architecture, shape, only):
        assert made.size_bytes > 1000, made
        assert made.shared_bytes <= SHARED_BYTES, made
        assert made.stack_bytes <= MOST_STACK_BYTES, made


SHAPES: dict[str, Shape] = {
    "Llama 8B": ("bfloat16", "bfloat16", 32, 8, 128),
    "SmolLM2 135M": ("bfloat16", "bfloat16", 9, 3, 64),
    "SmolLM2 135M, exact": ("float32", "float32", 9, 3, 64),
    "Gemma 2 2B": ("float16", "float16", 8, 4, 256),
    "Gemma 2 2B, exact": ("float32", "float32", 8, 4, 256),
    "Qwen 2.5 0.5B, float32 over bfloat16 pages": ("float32", "bfloat16", 14, 2, 64),
    "a head dimension of 80": ("bfloat16", "bfloat16", 32, 32, 80),
    "float32 of 128": ("float32", "float32", 32, 8, 128),
    "float32 of 128 over float16 pages": ("float32", "float16", 32, 8, 128),
    "float32 of 256 over bfloat16 pages": ("float32", "bfloat16", 8, 4, 256),
    "float32, a group of 40 heads, over bfloat16 pages": ("float32", "bfloat16", 40, 1, 96),
    "bfloat16 of 64 over float32 pages": ("bfloat16", "float32", 9, 3, 64),
    "bfloat16 of 128 over float32 pages": ("bfloat16", "float32", 14, 2, 128),
    "float16 of 256 over float32 pages": ("float16", "float32", 8, 4, 256),
    "a group of 20 heads": ("bfloat16", "bfloat16", 20, 1, 256),
}


@pytest.fixture
def new_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compiled before is taken."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("new_cache")
def test_the_kernels_compile_without_spilling_registers() -> None:
    """Each kernel once, some for each architecture: the rest is the campaign's."""
    check_compiled(90, SHAPES["Llama 8B"], "write_kernel", "join_kernel", "slice_kernel")
    check_compiled(80, SHAPES["Qwen 2.5 0.5B, float32 over bfloat16 pages"], "slice_kernel")
    check_compiled(100, SHAPES["Llama 8B"], "part_kernel")


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("new_cache")
@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_compile_for_every_shape_without_spilling_registers(architecture: int, name: str) -> None:
    check_compiled(architecture, SHAPES[name])
