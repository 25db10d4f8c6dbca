"""Compiles the Triton kernels for architectures that need not be here, and says what each takes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from hexrt.kernels import triton_kernels
from hexrt.kernels.triton_attention import (
    Sizes,
    choose_sizes,
    join_constants,
    part_constants,
    slice_constants,
    write_constants,
)

POINTERS = {"slots": "*i64", "tables": "*i32", "starts": "*i32", "ends": "*i32", "part_sums": "*fp32", "part_totals": "*fp32", "sinks": "*fp32"}  # fmt: skip
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
UNALIGNED = ("rows", "window", "parts", "scale", "softcap")


Shape = tuple[str, str, int, int, int]
"""dtype, page dtype, heads, KV heads, head dimension."""


@dataclass(frozen=True)
class Compiled:
    """`stack_bytes`: of local memory a thread, where registers that did not suffice are spilled to."""

    name: str
    shared_bytes: int
    stack_bytes: int
    size_bytes: int


def constants(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """With all that a model may ask for."""
    return {
        "write_kernel": write_constants(sizes),
        "part_kernel": part_constants(sizes, True),
        "join_kernel": join_constants(sizes, True),
        "slice_kernel": slice_constants(sizes, True, True),
    }


def source(kernel: Any, given: dict[str, Any], dtype: str, page_dtype: str) -> ASTSource:
    types = {"pages": f"*{page_dtype}", "scale": "fp32", "softcap": "fp32", **POINTERS}
    types |= dict.fromkeys(("query", "key", "value", "out"), f"*{dtype}")
    signature = {name: "constexpr" if name in given else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, name in enumerate(kernel.arg_names)
        if name not in given and name not in UNALIGNED
    }
    return ASTSource(kernel, signature, given, aligned)


def stack_bytes(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout  # fmt: skip
    found = re.search(r"STACK:(\d+)", usage)
    assert found, usage
    return int(found[1])


def compiled(architecture: int, shape: Shape, only: tuple[str, ...] = ()) -> Iterator[Compiled]:
    """`only`: names of kernels, all where there are none."""
    dtype, page_dtype, heads, kv_heads, dimension = shape
    query = torch.empty((1, heads, dimension), dtype=getattr(torch, dtype))
    arena = torch.empty((1, 1, 2, 16, kv_heads, dimension), dtype=getattr(torch, page_dtype))
    for name, given in constants(choose_sizes(query, arena)).items():
        if only and name not in only:
            continue
        options = {key: value for key, value in given.items() if not key.isupper()}
        given = {key: value for key, value in given.items() if key.isupper()}
        wanted = source(getattr(triton_kernels, name), given, TYPES[dtype], TYPES[page_dtype])
        made = compile(wanted, target=GPUTarget("cuda", architecture, 32), options=options)
        cubin = made.asm["cubin"]
        yield Compiled(f"{name} of {shape} for sm_{architecture}", made.metadata.shared, stack_bytes(cubin), len(cubin))
