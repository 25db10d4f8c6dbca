"""Linear layers and embeddings whose weights are packed: int4 or int8 in blocks of 32 along the columns, bf16, or float32.

Owns the packing (kernels/cpu/lanes.h draws it), the modules that compute with it and their estimate. The numbers are those that were
packed; activations stay as they come and sums are float32. A weight that is already what a GGUF's Q4_1 or Q8_0 holds is packed without
loss. Without the compiled kernels the weights are unpacked for each call, which is right and slow.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hexrt.kernels.attention import Work
from hexrt.kernels.native import load

PANEL, BLOCK = 16, 32
"""Rows that lie side by side, and columns that share a scale."""
KINDS = {"int4": 4, "int8": 8, "bfloat16": 16, "float32": 32}
MOST_COLUMNS = 65536
PACK_ROWS = 4096
"""Rows packed at a time, which bounds the memory it takes."""
BF16_ROWS = 64
"""From so many rows on torch's bf16 product of unpacked weights wins, where the processor multiplies bf16."""


class Linear(ctypes.Structure):
    """hx_linear of kernels/cpu/matmul.h."""

    _fields_ = [
        ("kind", ctypes.c_int64), ("n", ctypes.c_int64), ("k", ctypes.c_int64), ("stride", ctypes.c_int64),
        ("packed", ctypes.c_void_p), ("bias", ctypes.c_void_p),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [rows, columns] as panels: uint8 [panels, bytes of a panel], rows past the last being zeros. Panels may be strided."""

    kind: str
    rows: int
    columns: int
    panels: Tensor

    @property
    def bytes(self) -> int:
        return self.panels.numel()

    def estimate(self, tokens: int) -> Work:
        """Of a product with `tokens` rows of float32."""
        moved = self.bytes + 4 * tokens * (self.columns + self.rows)
        return Work(2 * tokens * self.rows * self.columns, moved)

    def part(self, first: int, rows: int) -> Packed:
        """A view of `rows` rows from `first` on, which begins a panel."""
        assert first % PANEL == 0
        return Packed(self.kind, rows, self.columns, self.panels[first // PANEL : -(-(first + rows) // PANEL)])


def can_pack(rows: int, columns: int) -> bool:
    return columns % BLOCK == 0 and 0 < columns <= MOST_COLUMNS and rows > 0


def panel_bytes(kind: str, columns: int) -> int:
    blocks = columns // BLOCK
    if kind == "int4":
        return blocks * (BLOCK * PANEL // 2 + 4 * PANEL)
    if kind == "int8":
        return blocks * BLOCK * PANEL + -(-blocks * 2 * PANEL // 64) * 64
    return columns * PANEL * (2 if kind == "bfloat16" else 4)


def pack(weight: Tensor, kind: str, level: str = "") -> Packed:
    """Rounds `weight` [rows, columns] to `kind` and lays it out. Rows need not be a multiple of anything; columns see `can_pack`."""
    rows, columns = weight.shape
    assert can_pack(rows, columns), f"{rows} x {columns} cannot be packed"
    size, library = panel_bytes(kind, columns), kernels(level)
    panels = torch.empty((-(-rows // PANEL), size), dtype=torch.uint8)
    for first in range(0, rows, PACK_ROWS):
        part = weight[first : first + PACK_ROWS].float().contiguous()
        into = panels[first // PANEL : -(-(first + len(part)) // PANEL)]
        if library is None:
            into[:] = _PACKERS[kind](functional.pad(part, (0, 0, 0, -len(part) % PANEL)))
        else:
            library.hx_pack(
                KINDS[kind], len(part), columns, size, part.data_ptr(), into.data_ptr(), torch.get_num_threads()
            )
    return Packed(kind, rows, columns, panels)


def unpack(packed: Packed) -> Tensor:
    """float32 [rows, columns]: the numbers that the packed form stands for. In plain torch."""
    return _UNPACKERS[packed.kind](packed.panels, packed.columns)[: packed.rows]


# --- the numbers ------------------------------------------------------------------------------------------------------


def round_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q uint8 [n, blocks, 32], scale, minimum [n, blocks] as float16): the block's least and greatest number become 0 and 15.

    A block that is Q4_1 already, as its least and greatest are there, comes out as it was.
    """
    blocks = weight.view(len(weight), -1, BLOCK)
    least, greatest = blocks.amin(-1), blocks.amax(-1)
    scale, minimum = ((greatest - least) / 15).half(), least.half()
    return _whole(blocks - minimum.float()[..., None], scale, 0, 15).to(torch.uint8), scale, minimum


def round_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(q int8 [n, blocks, 32], scale [n, blocks] as float16): the block's greatest magnitude becomes 127."""
    blocks = weight.view(len(weight), -1, BLOCK)
    scale = (blocks.abs().amax(-1) / 127).half()
    return _whole(blocks, scale, -127, 127).to(torch.int8), scale


def _whole(blocks: Tensor, scale: Tensor, least: int, greatest: int) -> Tensor:
    divisor = scale.float()[..., None]
    return (blocks / divisor.where(divisor > 0, divisor.new_ones(()))).round_().clamp_(least, greatest)


# --- the layout -------------------------------------------------------------------------------------------------------


def _pack_int4(weight: Tensor) -> Tensor:
    q, scale, minimum = round_int4(weight)
    panels, blocks = len(weight) // PANEL, q.shape[1]
    halves = q.view(panels, PANEL, blocks, 4, 2, 4).permute(4, 0, 2, 3, 1, 5)  # [half, panel, block, line, row, byte]
    words = (halves[0] | halves[1] << 4).reshape(panels, blocks, -1)
    with_each = torch.stack([scale, minimum]).view(2, panels, PANEL, blocks).permute(1, 3, 0, 2)
    return torch.cat([words, _bytes(with_each).view(panels, blocks, -1)], -1).view(panels, -1)


def _unpack_int4(panels: Tensor, columns: int) -> Tensor:
    parts = panels.reshape(len(panels), columns // BLOCK, -1)
    words = parts[..., :256].reshape(len(panels), columns // BLOCK, 4, PANEL, 4)
    q = torch.stack([words & 15, words >> 4]).permute(1, 4, 2, 3, 0, 5).reshape(len(panels) * PANEL, -1, BLOCK)
    numbers = parts[..., 256:].contiguous().view(torch.float16).view(len(panels), -1, 2, PANEL).permute(2, 0, 3, 1)
    scale, minimum = numbers.reshape(2, len(q), -1, 1).float()
    out: Tensor = q * scale + minimum
    return out.view(len(q), columns)


def _pack_int8(weight: Tensor) -> Tensor:
    q, scale = round_int8(weight)
    panels, blocks = len(weight) // PANEL, q.shape[1]
    words = _bytes(q.view(panels, PANEL, blocks * 8, 4).permute(0, 2, 1, 3)).view(panels, -1)
    scales = _bytes(scale.view(panels, PANEL, blocks).permute(0, 2, 1)).view(panels, -1)
    return torch.cat([words, functional.pad(scales, (0, -scales.shape[1] % 64))], -1)


def _unpack_int8(panels: Tensor, columns: int) -> Tensor:
    words = panels[:, : columns * PANEL].contiguous().view(torch.int8)
    q = words.view(len(panels), -1, PANEL, 4).transpose(1, 2).reshape(len(panels) * PANEL, -1, BLOCK)
    scales = panels[:, columns * PANEL :][:, : columns // BLOCK * 2 * PANEL].contiguous().view(torch.float16)
    return (q * scales.view(len(panels), -1, PANEL).transpose(1, 2).reshape(len(q), -1, 1).float()).view(
        len(q), columns
    )


def _pack_bf16(weight: Tensor) -> Tensor:
    pairs = weight.bfloat16().view(len(weight) // PANEL, PANEL, -1, 2).transpose(1, 2)
    return _bytes(pairs).view(len(weight) // PANEL, -1)


def _unpack_bf16(panels: Tensor, columns: int) -> Tensor:
    pairs = panels.contiguous().view(torch.bfloat16).view(len(panels), -1, PANEL, 2).transpose(1, 2)
    return pairs.reshape(len(panels) * PANEL, columns).float()


def _pack_fp32(weight: Tensor) -> Tensor:
    return _bytes(weight.view(len(weight) // PANEL, PANEL, -1).transpose(1, 2)).view(len(weight) // PANEL, -1)


def _unpack_fp32(panels: Tensor, columns: int) -> Tensor:
    return panels.contiguous().view(torch.float32).view(len(panels), -1, PANEL).transpose(1, 2).reshape(-1, columns)


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


_PACKERS = {"int4": _pack_int4, "int8": _pack_int8, "bfloat16": _pack_bf16, "float32": _pack_fp32}
_UNPACKERS = {"int4": _unpack_int4, "int8": _unpack_int8, "bfloat16": _unpack_bf16, "float32": _unpack_fp32}


# --- computing --------------------------------------------------------------------------------------------------------


@cache
def kernels(level: str = "") -> Any:
    """The compiled library with its calls declared, or None; `level` names one of its levels of instructions."""
    library = load(level).library
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.hx_linear_run.argtypes = (pointer, pointer, number, pointer, pointer, ctypes.c_int)
    library.hx_unpack_rows.argtypes = (pointer, pointer, number, pointer)
    library.hx_unpack_bf16.argtypes = (pointer, pointer, ctypes.c_int)
    library.hx_pack.argtypes = (number, number, number, number, pointer, pointer, ctypes.c_int)
    for name in ("hx_pack", "hx_linear_run", "hx_unpack_rows", "hx_unpack_bf16"):
        getattr(library, name).restype = None
    return library


@cache
def multiplies_bf16() -> bool:
    """Whether this processor has instructions for it."""
    return bool(torch.cpu._is_amx_tile_supported()) or bool(torch.cpu._is_avx512_bf16_supported())


def describe(packed: Packed, bias: Tensor | None) -> Linear:
    """What the kernels are told of a weight; valid while `packed` and `bias` live."""
    panels = packed.panels
    assert panels.device.type == "cpu" and panels.stride(1) == 1 and panels.data_ptr() % 64 == 0
    return Linear(
        KINDS[packed.kind], packed.rows, packed.columns, panels.stride(0), panels.data_ptr(),
        bias.data_ptr() if bias is not None else None,
    )  # fmt: skip


class QuantisedLinear(nn.Module):
    """In place of nn.Linear, on the CPU. Output in the input's dtype."""

    bias: Tensor | None

    def __init__(self, packed: Packed, bias: Tensor | None = None, level: str = "") -> None:
        super().__init__()
        self.in_features, self.out_features = packed.columns, packed.rows
        self.packed = packed
        self.register_buffer("panels", packed.panels, persistent=False)
        self.register_buffer("bias", bias.detach().float().contiguous() if bias is not None else None, persistent=False)
        self._linear = describe(packed, self.bias)
        self._at = ctypes.addressof(self._linear)
        self._kernels = kernels(level)

    def forward(self, x: Tensor) -> Tensor:
        if self._kernels is None:
            return functional.linear(x.float(), unpack(self.packed), self.bias).to(x.dtype)
        tokens = x.numel() // self.in_features
        if tokens >= BF16_ROWS and x.dtype == torch.bfloat16 and multiplies_bf16():
            return self.through_bf16(x)
        given = x.float().contiguous()
        out = torch.empty((*x.shape[:-1], self.out_features))
        if not tokens:  # the head, in a pass that draws nothing
            return out.to(x.dtype)
        self._kernels.hx_linear_run(self._at, given.data_ptr(), tokens, None, out.data_ptr(), torch.get_num_threads())
        return out.to(x.dtype)

    def through_bf16(self, x: Tensor) -> Tensor:
        """By torch's product of bf16."""
        weight = torch.empty((self.out_features, self.in_features), dtype=torch.bfloat16)
        self._kernels.hx_unpack_bf16(self._at, weight.data_ptr(), torch.get_num_threads())
        return functional.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.packed.kind}"


class QuantisedEmbedding(nn.Module):
    """In place of nn.Embedding, on the CPU: rows are unpacked as they are looked up. Gives `dtype`, times `scale`."""

    scale: Tensor | None

    def __init__(self, packed: Packed, dtype: torch.dtype, scale: Tensor | None = None, level: str = "") -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = packed.rows, packed.columns
        self.packed, self.dtype = packed, dtype
        self.register_buffer("panels", packed.panels, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self._linear = describe(packed, None)
        self._at = ctypes.addressof(self._linear)
        self._kernels = kernels(level)

    def forward(self, ids: Tensor) -> Tensor:
        """`ids` int64, each of the vocabulary."""
        if self._kernels is None:
            flat = ids.reshape(-1)
            panels = Packed(self.packed.kind, len(flat) * PANEL, self.embedding_dim, self.packed.panels[flat // PANEL])
            rows = unpack(panels).view(len(flat), PANEL, -1)
            out = rows[torch.arange(len(flat)), flat % PANEL].view(*ids.shape, -1)
        else:
            given = ids.contiguous()
            out = torch.empty((*ids.shape, self.embedding_dim))
            self._kernels.hx_unpack_rows(self._at, given.data_ptr(), ids.numel(), out.data_ptr())
        out = out.to(self.dtype)
        return out if self.scale is None else out * self.scale.to(out.dtype)


def memory_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, what several share counted once."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
