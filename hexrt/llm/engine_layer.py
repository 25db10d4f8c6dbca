"""A decoder layer, and a norm, of a loaded transformers model as compiled code (kernels/cpu/layer.c), float32 throughout.

Owns nothing but the record that the C code reads; weights are packed (`kernels.quantised`). The attention itself stays transformers'
pluggable one. A layer takes any caller that the layer it stands for takes, caches too; what it was made of stays inside it, over the
same packed weights, and computes where the processor multiplies bf16 faster.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hexrt.kernels.quantised import BF16_ROWS, Linear, Packed, describe, kernels, multiplies_bf16

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    nn.functional.silu,
    lambda x: nn.functional.gelu(x, approximate="tanh"),
    nn.functional.gelu,
)
"""By their number in layer.c."""


class _Record(ctypes.Structure):
    """hx_layer of kernels/cpu/layer.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "activation")),
        ("eps", ctypes.c_float), ("unused", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("norm", "query_norm", "key_norm", "attended_norm", "mlp_norm", "mlp_out_norm")),
        *((name, Linear) for name in ("qkv", "out", "gate_up", "down")),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """`norms`: float32, by their name in `_Record`, without those the layer has not. `gate_up`: panels of the two in turns."""

    qkv: Packed
    out: Packed
    gate_up: Packed
    down: Packed
    qkv_bias: Tensor | None
    out_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    norms: dict[str, Tensor]
    eps: float
    activation: int


def layer_kernels() -> Any:
    """The compiled library with the calls used here declared, or None."""
    library = kernels()
    if library is not None and library.hx_layer_before.argtypes is None:
        pointer, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        library.hx_norm_run.argtypes = (pointer, pointer, ctypes.c_double, number, number, pointer, threads)
        library.hx_layer_after.argtypes = (pointer, pointer, pointer, number, pointer, pointer, threads)
        library.hx_layer_before.argtypes = (pointer, pointer, number, pointer, pointer, pointer, pointer, threads)
        for name in ("hx_norm_run", "hx_layer_before", "hx_layer_after"):
            getattr(library, name).restype = None
    return library


class Room:
    """Memory that the layers of a model use one after the other; what `take` gives is valid until it is called again."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, numbers: int) -> int:
        if numbers > len(self._memory):
            self._memory = torch.empty(numbers)
        return self._memory.data_ptr()


class RmsNorm(nn.Module):
    """x / root(mean(x^2) + eps) * weight, in float32. Gives `dtype`, or the input's where that is None."""

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> None:
        """`weight`: float32, of a multiple of 16 numbers."""
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.eps, self.dtype = eps, dtype
        self._kernels = layer_kernels()

    def forward(self, x: Tensor) -> Tensor:
        given = x.float().contiguous()
        out = torch.empty_like(given)
        width = len(self.weight)
        self._kernels.hx_norm_run(
            given.data_ptr(), self.weight.data_ptr(), self.eps, given.numel() // width, width, out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out.to(self.dtype or x.dtype)


class FusedLayer(nn.Module):
    """In place of `plain`, a decoder layer whose linear layers have been packed as `weights` says."""

    def __init__(self, plain: Any, weights: LayerWeights, room: Room, kinds: dict[str, Any]) -> None:
        """`kinds`: what its attention passes to the attention function besides the scaling."""
        super().__init__()
        self.plain = plain
        self.attention = plain.self_attn
        self._weights, self._room, self._kinds = weights, room, kinds
        self._kernels = layer_kernels()
        self._heads, self._head_dim = weights.out.columns // self.attention.head_dim, self.attention.head_dim
        self._kv_heads = (weights.qkv.rows // self._head_dim - self._heads) // 2
        self._width, self._inner, self._all = weights.out.rows, weights.down.columns, weights.qkv.rows
        self._eager = sys.modules[type(self.attention).__module__].eager_attention_forward
        for name, tensor in weights.norms.items():
            self.register_buffer(name, tensor, persistent=False)
        for name in ("qkv_bias", "out_bias", "gate_up_bias", "down_bias"):
            self.register_buffer(name, getattr(weights, name), persistent=False)
        self.register_buffer("qkv", weights.qkv.panels, persistent=False)
        self.register_buffer("gate_up", weights.gate_up.panels, persistent=False)
        self._record = self._describe()
        self._at = ctypes.addressof(self._record)
        self._bf16 = multiplies_bf16()

    def _describe(self) -> _Record:
        weights = self._weights
        record = _Record(self._heads, self._kv_heads, self._head_dim, weights.activation, weights.eps)
        for name, tensor in weights.norms.items():
            setattr(record, name, tensor.data_ptr())
        record.qkv = describe(weights.qkv, weights.qkv_bias)
        record.out = describe(weights.out, weights.out_bias)
        record.gate_up = describe(weights.gate_up, weights.gate_up_bias)
        record.down = describe(weights.down, weights.down_bias)
        return record

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor | None = None,
        cache: Any = None, **more: Any,
    ) -> Tensor:  # fmt: skip
        batch, tokens, _ = hidden_states.shape
        rows = batch * tokens
        if self._bf16 and rows >= BF16_ROWS and hidden_states.dtype == torch.bfloat16:
            return self.plain(hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, cache=cache, **more)  # type: ignore[no-any-return]  # fmt: skip
        threads = torch.get_num_threads()
        x = hidden_states.float().contiguous()
        cosine, sine = (self._table(table, batch) for table in position_embeddings)
        qkv = torch.empty((batch, tokens, self._all))
        self._kernels.hx_layer_before(
            self._at, x.data_ptr(), rows, cosine.data_ptr(), sine.data_ptr(), self._room.take(rows * self._width),
            qkv.data_ptr(), threads,
        )  # fmt: skip
        attended = self._attend(qkv, attention_mask, cache, more).float().contiguous()
        out = torch.empty_like(x)
        self._kernels.hx_layer_after(
            self._at, x.data_ptr(), attended.data_ptr(), rows, self._room.take(rows * (self._width + self._inner)),
            out.data_ptr(), threads,
        )  # fmt: skip
        return out

    @staticmethod
    def _table(table: Tensor, batch: int) -> Tensor:
        """cos or sin [batch, tokens, head dimension] as the C code reads it."""
        return (table if len(table) == batch else table.expand(batch, -1, -1)).float().contiguous()

    def _attend(self, qkv: Tensor, mask: Tensor | None, cache: Any, more: dict[str, Any]) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attention, d = self.attention, self._head_dim
        batch, tokens, wide = qkv.shape
        strides = (tokens * wide, d, wide, 1)
        query = qkv.as_strided((batch, self._heads, tokens, d), strides)
        key = qkv.as_strided((batch, self._kv_heads, tokens, d), strides, self._heads * d)
        value = qkv.as_strided((batch, self._kv_heads, tokens, d), strides, (self._heads + self._kv_heads) * d)
        if cache is not None:
            key, value = cache.update(key, value, attention.layer_idx, kwargs=more)
        function: Any = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, self._eager)
        out: Tensor = function(
            attention, query, key, value, mask, dropout=0.0, scaling=attention.scaling, **self._kinds, **more
        )[0]
        return out
