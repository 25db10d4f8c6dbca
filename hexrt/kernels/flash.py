"""Attention over our pages by FlashAttention 3 and FlashInfer, where they are installed, and which kernel serves which passes of a model.

Both read the arena through views: frames may lie any distance apart, and a page of 16 tokens is [token, KV head, d] of one layer. K and V are
put there by our own kernel. FlashAttention 3 takes its lengths from tensors, so that its passes can be captured; FlashInfer plans each pass
on the host and serves passes with prompt slices, which are not captured, while Triton serves the decode passes. A window here counts the
positions seen, there those before a query's own. Nothing is imported before it is chosen, and nothing is fetched. Used on the thread that
owns the stream.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hexrt.kernels.attention import Attend, PassTensors, Reference

TRITON, FLASH_3, FLASHINFER, PLAIN = "Triton", "FlashAttention 3", "FlashInfer", "plain torch"
HALVES = (torch.float16, torch.bfloat16)
FLASHINFER_DIMENSIONS = (64, 128, 256)
CUDA_CORE_GROUPS = (1, 2, 3)
"""Query heads a KV head up to which FlashInfer's kernel without tensor cores decodes; it knows few groups beyond, the other knows all."""

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation recommends."""

Write = Callable[[Tensor, Tensor, Tensor, PassTensors, Tensor], None]
"""(key, value, pages, tensors, out): puts K and V where they belong, and zeros in `out` for tokens of no row."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a model asks of its attention."""

    dtype: torch.dtype
    page_dtype: torch.dtype
    dimension: int
    page_tokens: int = 16
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """Kernels by name. `reasons`: why a faster one is not used, for people."""

    slices: str  # for passes with prompt slices
    decodes: str
    reasons: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.slices if self.slices == self.decodes else f"{self.decodes}, prompt slices by {self.slices}"


def available(is_there: Callable[[str], bool] | None = None) -> dict[str, str]:
    """By library why it cannot be used; empty where it can."""
    found = is_there or (lambda name: importlib.util.find_spec(name) is not None)
    missing = {name: f"{name} is not installed" for name in (TRITON, FLASH_3, FLASHINFER)}
    if found("triton"):
        missing[TRITON] = ""
    if found("flash_attn_interface"):
        missing[FLASH_3] = ""
    elif found("flash_attn"):
        missing[FLASH_3] = f"{FLASH_3} is not installed, and FlashAttention 2 takes no pages of fewer than 256 tokens"
    if found("flashinfer"):
        # Its kernels are compiled on first use where they did not come compiled.
        compiled = found("flashinfer_jit_cache") or (shutil.which("nvcc") and shutil.which("ninja"))
        missing[FLASHINFER] = "" if compiled else f"{FLASHINFER} has neither compiled kernels nor nvcc and ninja"
    return missing


def choose(capability: tuple[int, int], wanted: Wanted, missing: dict[str, str]) -> Choice:
    """`capability`: of the device. FlashAttention 3 on the architecture it is written for, else FlashInfer and Triton, else Triton."""
    reasons = []
    if reason := missing[FLASH_3] or _unfit_flash_3(capability, wanted):
        reasons.append(reason)
    else:
        return Choice(FLASH_3, FLASH_3)
    ours = TRITON if not (reason := missing[TRITON] or _unfit_triton(capability)) else PLAIN
    if reason:
        reasons.append(reason)
    if reason := missing[FLASHINFER] or _unfit_flashinfer(capability, wanted):
        return Choice(ours, ours, (*reasons, reason))
    return Choice(FLASHINFER, ours, tuple(reasons))


def _unfit_flash_3(capability: tuple[int, int], wanted: Wanted) -> str:
    if capability[0] != 9:
        return f"{FLASH_3} is for compute capability 9, this device has {capability[0]}.{capability[1]}"
    if reason := _unfit_kind(FLASH_3, wanted):
        return reason
    if wanted.dimension % 8 or wanted.dimension > 256:
        return f"{FLASH_3} has no head dimension of {wanted.dimension}"
    return ""


def _unfit_flashinfer(capability: tuple[int, int], wanted: Wanted) -> str:
    if capability < (8, 0):
        return f"{FLASHINFER} needs compute capability 8.0, this device has {capability[0]}.{capability[1]}"
    if reason := _unfit_kind(FLASHINFER, wanted):
        return reason
    return "" if wanted.dimension in FLASHINFER_DIMENSIONS else f"{FLASHINFER} has no head dimension of {wanted.dimension}"  # fmt: skip


def _unfit_triton(capability: tuple[int, int]) -> str:
    return "" if capability >= (8, 0) else f"our Triton kernels need compute capability 8.0, this device has {capability[0]}.{capability[1]}"  # fmt: skip


def _unfit_kind(name: str, wanted: Wanted) -> str:
    if wanted.dtype not in HALVES:
        return f"{name} does not compute in {str(wanted.dtype).removeprefix('torch.')}"
    if wanted.page_dtype != wanted.dtype:
        return (
            f"{name} takes no pages of {str(wanted.page_dtype).removeprefix('torch.')} beside queries of another dtype"
        )
    return f"{name} has no attention sinks in the interface used" if wanted.sinks else ""


def build(choice: Choice, device: torch.device) -> Attend:
    """The kernel that is chosen; imports what it needs."""
    made = {name: _build(name, device) for name in {choice.slices, choice.decodes}}
    return made[choice.slices] if choice.slices == choice.decodes else ByPass(made[choice.slices], made[choice.decodes])


def planner(attend: Attend) -> FlashInfer | None:
    """The part of `attend` that is to be told of each pass with slices, by `begin`."""
    slices = attend.slices if isinstance(attend, ByPass) else attend
    return slices if isinstance(slices, FlashInfer) else None


def _build(name: str, device: torch.device) -> Attend:
    if name == PLAIN:
        return Reference()
    if name == TRITON:
        from hexrt.kernels.triton_attention import TritonAttention

        return TritonAttention()
    if name == FLASH_3:
        return FlashAttention3(importlib.import_module("flash_attn_interface").flash_attn_with_kvcache, triton_write)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return FlashInfer(importlib.import_module("flashinfer"), workspace, triton_write)


def triton_write(key: Tensor, value: Tensor, pages: Tensor, tensors: PassTensors, out: Tensor) -> None:
    from hexrt.kernels.triton_attention import choose_sizes, launch_write

    launch_write(choose_sizes(out, pages[:, None]), key, value, pages, tensors, out)


@dataclass(frozen=True, slots=True)
class ByPass:
    """One kernel for passes with prompt slices, another for the others."""

    slices: Attend
    decodes: Attend

    @property
    def name(self) -> str:
        return f"{self.decodes.name}, prompt slices by {self.slices.name}"

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, arena: Tensor, layer: int, tensors: PassTensors, *,
        scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, out: Tensor,
    ) -> None:  # fmt: skip
        chosen = self.slices if tensors.longest > 1 else self.decodes
        chosen(
            query, key, value, arena, layer, tensors, scale=scale, window=window, softcap=softcap, sinks=sinks, out=out
        )


@dataclass(frozen=True, slots=True)
class FlashAttention3:
    """`attend`: its flash_attn_with_kvcache, for passes of every kind in one call."""

    attend: Callable[..., Tensor]
    write: Write

    @property
    def name(self) -> str:
        return FLASH_3

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, arena: Tensor, layer: int, tensors: PassTensors, *,
        scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, out: Tensor,
    ) -> None:  # fmt: skip
        assert sinks is None, "not chosen for a model with sinks"
        pages = arena[:, layer]
        self.write(key, value, pages, tensors, out)
        answer = self.attend(
            query, pages[:, 0], pages[:, 1], cache_seqlens=tensors.ends, page_table=tensors.tables,
            cu_seqlens_q=tensors.starts, max_seqlen_q=tensors.longest, softmax_scale=scale, causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0), softcap=softcap or 0.0,
        )  # fmt: skip
        # It leaves alone what is past the last row.
        held = torch.arange(len(out), device=out.device) < tensors.starts[-1:]
        torch.where(held[:, None, None], answer, answer.new_zeros(()), out=out)


@dataclass(slots=True)
class _Planned:
    decode: Any
    slices: Any
    fresh: bool = False  # planned for the pass that runs


@dataclass(slots=True)
class FlashInfer:
    """Passes whose lengths the host knows: `begin` says them, and the first layer of each kind plans.

    Rows of one token go through its decode kernel, slices through its prefill kernel. A kind is a window, a cap and a scale, which are part
    of a plan. All kinds share `workspace`: they run one after the other.
    """

    library: Any
    workspace: Tensor
    write: Write
    _kinds: dict[tuple[float, int | None, float | None], _Planned] = field(default_factory=dict)
    _counts: Sequence[int] = ()
    _ends: Sequence[int] = ()
    _frames: Sequence[Sequence[int]] = ()

    @property
    def name(self) -> str:
        return FLASHINFER

    def begin(self, counts: Sequence[int], ends: Sequence[int], frames: Sequence[Sequence[int]]) -> None:
        """Of each row of the next pass: its tokens in it, those of the sequence with it, and its page table. Rows of one token come first.

        The last pass that was begun must have been computed: a plan is copied from memory that the next one is written to.
        """
        self._counts, self._ends, self._frames = counts, ends, frames
        for planned in self._kinds.values():
            planned.fresh = False

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, arena: Tensor, layer: int, tensors: PassTensors, *,
        scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, out: Tensor,
    ) -> None:  # fmt: skip
        assert sinks is None, "not chosen for a model with sinks"
        assert len(self._ends) == tensors.rows, "a pass was not begun"
        pages = arena[:, layer]
        self.write(key, value, pages, tensors, out)
        kind = (scale, window, softcap)
        planned = self._kinds.get(kind) or self._wrap(kind, query.shape[1] // key.shape[1])
        singles = sum(count == 1 for count in self._counts)
        tokens = sum(self._counts)
        if not planned.fresh:
            self._plan(planned, kind, singles, query, pages)
        cache = (pages[:, 0], pages[:, 1])
        if singles:
            planned.decode.run(query[:singles], cache, out=out[:singles])
        if tokens > singles:
            planned.slices.run(query[singles:tokens], cache, out=out[singles:tokens])

    def _wrap(self, kind: tuple[float, int | None, float | None], group: int) -> _Planned:
        """Its own backend: the others fetch kernels, or know fewer kinds."""
        library, workspace = self.library, self.workspace
        tensor_cores = group not in CUDA_CORE_GROUPS
        decode = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=tensor_cores, backend="fa2"
        )
        planned = _Planned(
            decode, library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        )  # fmt: skip
        self._kinds[kind] = planned
        return planned

    def _plan(
        self, planned: _Planned, kind: tuple[float, int | None, float | None], singles: int, query: Tensor, pages: Tensor
    ) -> None:  # fmt: skip
        scale, window, softcap = kind
        _, _, page_tokens, kv_heads, dimension = pages.shape
        shape = (query.shape[1], kv_heads, dimension, page_tokens)
        same: dict[str, Any] = {
            "window_left": -1 if window is None else window - 1, "logits_soft_cap": softcap or 0.0, "sm_scale": scale,
            "q_data_type": query.dtype, "kv_data_type": pages.dtype,
        }  # fmt: skip
        if singles:
            planned.decode.plan(*self._places(0, singles, page_tokens), *shape, **same)
        if singles < len(self._counts):
            asked = torch.tensor([0, *self._counts[singles:]]).cumsum(0).to(torch.int32)
            places = self._places(singles, len(self._counts), page_tokens)
            planned.slices.plan(asked, *places, *shape, causal=True, **same)
        planned.fresh = True

    def _places(self, first: int, last: int, page_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """On the host, int32: where each row's pages begin in the list of pages, that list, and the tokens of each row's last page."""
        used = [-(-end // page_tokens) for end in self._ends[first:last]]
        frames = [frame for table, count in zip(self._frames[first:last], used, strict=True) for frame in table[:count]]
        lasts = [end - (count - 1) * page_tokens for end, count in zip(self._ends[first:last], used, strict=True)]
        begins = torch.tensor([0, *used]).cumsum(0).to(torch.int32)
        return begins, torch.tensor(frames, dtype=torch.int32), torch.tensor(lasts, dtype=torch.int32)
