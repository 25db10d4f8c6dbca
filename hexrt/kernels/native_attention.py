"""The compiled attention over pages (cpu/attention*.c), as an `Attend`, and the choice of a kernel on the CPU.

Owns the record that the C code reads and its scratch memory, so one object serves one thread. The record is filled in once a pass; a
layer changes little of it. Nothing is read from a tensor here: the C code reads rows, tables and slots itself, and checks them first.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from hexrt.errors import InvariantViolation, Unavailable
from hexrt.kernels.attention import Attend, PassTensors, Reference
from hexrt.kernels.native import Native, load

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOST_DIMENSION = 256
FAULTS = (
    "",
    "rows do not follow each other",
    "a row is longer than its table",
    "a frame is not there",
    "a slot is not there",
    "scratch",
)


class Call(ctypes.Structure):
    """`hx_attention` of cpu/attention.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "pages", "slots", "tables", "starts", "ends", "sinks", "scratch")),
        *((name, ctypes.c_int64) for name in (
            "scratch_bytes", "frame_bytes", "query_token", "query_head", "key_token", "key_head", "value_token",
            "value_head", "out_token", "out_head", "tokens", "rows", "width", "heads", "kv_heads", "dimension",
            "page_tokens", "frames", "window", "threads",
        )),
        ("type", ctypes.c_int32), ("page_type", ctypes.c_int32), ("scale", ctypes.c_float), ("softcap", ctypes.c_float),
    ]  # fmt: skip


class NativeAttention:
    """Raises Unavailable where the compiled kernels are not to be had."""

    def __init__(self, native: Native | None = None) -> None:
        native = native or load()
        if native.library is None:
            raise Unavailable(native.why)
        self.name = f"compiled, {native.level}" + ("" if native.threads else ", one thread")
        self._threads = native.threads
        self._library = native.library
        self._run, self._needs = native.library.hx_attention_run, native.library.hx_attention_scratch
        self._run.argtypes, self._run.restype = (ctypes.c_void_p,), ctypes.c_int
        self._needs.argtypes, self._needs.restype = (ctypes.c_void_p,), ctypes.c_int64
        native.library.hx_attention_bytes.restype = ctypes.c_int64
        if native.library.hx_attention_bytes() != ctypes.sizeof(Call):
            raise Unavailable("the compiled kernels are of another version: run `make setup`")
        self._call = Call()
        self._address = ctypes.addressof(self._call)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._seen: tuple[
            Any, ...
        ] = ()  # what the record was filled in for; kept, so that no other object can take their place

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, arena: Tensor, layer: int, tensors: PassTensors, *,
        scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, out: Tensor,
    ) -> None:  # fmt: skip
        call, seen = self._call, self._seen
        strides = (query.stride(), key.stride(), value.stride(), out.stride())
        if not (
            seen
            and seen[0] is tensors
            and seen[1] is arena
            and seen[2] == strides
            and seen[3] == torch.get_num_threads()
        ):
            self._fill(query, key, value, arena, tensors, out)
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        call.query, call.key, call.value, call.out = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        call.pages = self._pages + layer * self._layer_bytes
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.scale, call.softcap, call.window = scale, softcap or 0.0, window or 0
        if fault := self._run(self._address):
            raise InvariantViolation(f"attention over pages: {FAULTS[fault]}")

    def _fill(
        self, query: Tensor, key: Tensor, value: Tensor, arena: Tensor, tensors: PassTensors, out: Tensor
    ) -> None:
        _check(query, key, value, arena, tensors, out)
        call, size, threads = self._call, query.itemsize, torch.get_num_threads()
        call.slots, call.tables = tensors.slots.data_ptr(), tensors.tables.data_ptr()
        call.starts, call.ends = tensors.starts.data_ptr(), tensors.ends.data_ptr()
        call.frame_bytes = arena.stride(0) * arena.itemsize
        call.query_token, call.query_head = query.stride(0) * size, query.stride(1) * size
        call.key_token, call.key_head = key.stride(0) * size, key.stride(1) * size
        call.value_token, call.value_head = value.stride(0) * size, value.stride(1) * size
        call.out_token, call.out_head = out.stride(0) * size, out.stride(1) * size
        call.tokens, call.rows, call.width = len(query), tensors.rows, tensors.tables.shape[1]
        call.heads, call.kv_heads, call.dimension = query.shape[1], key.shape[1], query.shape[2]
        call.page_tokens, call.frames = arena.shape[3], arena.shape[0]
        call.threads = threads if self._threads else 1
        call.type, call.page_type = DTYPES[query.dtype], DTYPES[arena.dtype]
        need = self._needs(self._address)
        if need > len(self._scratch):
            self._scratch = torch.empty(need, dtype=torch.uint8)
        call.scratch, call.scratch_bytes = self._scratch.data_ptr(), len(self._scratch)
        self._pages, self._layer_bytes = arena.data_ptr(), arena.stride(1) * arena.itemsize
        self._seen = (tensors, arena, (query.stride(), key.stride(), value.stride(), out.stride()), threads)


def _check(query: Tensor, key: Tensor, value: Tensor, arena: Tensor, tensors: PassTensors, out: Tensor) -> None:
    """What the C code takes for granted. Raises InvariantViolation."""
    heads, dimension = query.shape[1:]
    page = tuple(arena.shape[4:])
    fits = (
        key.shape == value.shape == (len(query), *page) and out.shape == query.shape and page[1] == dimension
        and heads % page[0] == 0 and dimension <= MOST_DIMENSION
        and query.dtype == key.dtype == value.dtype == out.dtype and {query.dtype, arena.dtype} <= DTYPES.keys()
        and all(t.stride(2) == 1 for t in (query, key, value, out)) and arena[0, 0].is_contiguous()
        and (tensors.slots.dtype, len(tensors.slots)) == (torch.int64, len(query))
        and all(t.dtype == torch.int32 for t in (tensors.tables, tensors.starts, tensors.ends))
        and len(tensors.starts) == tensors.rows + 1 and len(tensors.tables) == tensors.rows
        and all(t.is_contiguous() for t in (tensors.slots, tensors.tables, tensors.starts, tensors.ends))
    )  # fmt: skip
    if not fits:
        raise InvariantViolation("attention over pages: shapes, dtypes or strides do not fit each other")


def choose(dtype: torch.dtype, page_dtype: torch.dtype, dimension: int) -> tuple[Attend, str]:
    """The best kernel on the CPU for such a model, and why none better is there; empty where it is the best."""
    try:
        if dimension > MOST_DIMENSION:
            raise Unavailable(f"heads of {dimension} are longer than {MOST_DIMENSION}")
        if not {dtype, page_dtype} <= DTYPES.keys():
            raise Unavailable(f"numbers are {dtype} in {page_dtype} pages")
        return NativeAttention(), ""
    except Unavailable as error:
        return Reference(), error.message
