"""Which attention serves which passes and why, and what FlashInfer and FlashAttention 3 are called with.

Neither runs without a GPU. Stand-ins with the libraries' own signatures compute what their documentation says from what they are given, and
are held to the reference; the libraries themselves are tried in tests/device where they are installed.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hexrt.kernels.attention import PassTensors, Reference, write_pages
from hexrt.kernels.flash import (
    FLASH_3,
    FLASHINFER,
    PLAIN,
    TRITON,
    ByPass,
    Choice,
    FlashAttention3,
    FlashInfer,
    Wanted,
    available,
    choose,
    planner,
)
from tests.attention_cases import LAYER, PAGE, Case, copy_arena, make

ALL = dict.fromkeys((TRITON, FLASH_3, FLASHINFER), "")
WANTED = Wanted(torch.bfloat16, torch.bfloat16, 128)
HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)


def test_flash_attention_3_serves_everything_on_the_architecture_it_is_written_for() -> None:
    assert choose(HOPPER, WANTED, ALL) == Choice(FLASH_3, FLASH_3)


def test_elsewhere_flashinfer_serves_prompt_slices_and_our_kernel_the_passes_that_are_captured() -> None:
    for capability in (AMPERE, BLACKWELL):
        chosen = choose(capability, WANTED, ALL)
        assert (chosen.slices, chosen.decodes) == (FLASHINFER, TRITON)
        assert "compute capability 9" in chosen.reasons[0]
    assert chosen.name == "Triton, prompt slices by FlashInfer"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32, "page_dtype": torch.float32}, "does not compute in float32"),
        ({"page_dtype": torch.float16}, "no pages of float16"),
        ({"sinks": True}, "no attention sinks"),
        ({"dimension": 260}, "no head dimension of 260"),
    ],
)
def test_what_the_libraries_do_not_do_our_kernel_does_and_says_why(change: dict[str, Any], reason: str) -> None:
    chosen = choose(HOPPER, replace(WANTED, **change), ALL)
    assert (chosen.slices, chosen.decodes) == (TRITON, TRITON)
    assert [reason in one for one in chosen.reasons] == [True, True]


def test_what_is_not_installed_is_not_chosen_and_named() -> None:
    nothing = available(lambda name: False)
    chosen = choose(HOPPER, WANTED, nothing)
    assert (chosen.slices, chosen.decodes) == (PLAIN, PLAIN)
    assert chosen.reasons == tuple(f"{name} is not installed" for name in (FLASH_3, TRITON, FLASHINFER))
    assert choose((7, 5), WANTED, ALL).decodes == PLAIN
    assert "no pages of fewer than 256 tokens" in available(lambda name: name == "flash_attn")[FLASH_3]
    here = available(lambda name: name in ("triton", "flash_attn_interface", "flashinfer", "flashinfer_jit_cache"))
    assert here == ALL


# --- what they are called with ------------------------------------------------------------------------------------


def write(key: Tensor, value: Tensor, pages: Tensor, tensors: PassTensors, out: Tensor) -> None:
    write_pages(pages, key, value, tensors.slots)
    out[int(tensors.starts[-1]) :] = 0.0


def reference(
    query: Tensor, keys: Tensor, values: Tensor, counts: list[int], ends: list[int], tables: list[list[int]],
    scale: float, window_left: int, softcap: float,
) -> Tensor:  # fmt: skip
    """Of views of one layer's K and V, by the reference, with `window_left` as the libraries count it."""
    arena = torch.stack((keys, values), 1)[:, None]
    width = max(len(table) for table in tables)
    tensors = PassTensors(
        torch.full((len(query),), -1), torch.tensor([table + [0] * (width - len(table)) for table in tables]),
        torch.tensor([0, *counts]).cumsum(0), torch.tensor(ends), max(counts),
    )  # fmt: skip
    out, nothing = torch.empty_like(query), query.new_empty((len(query), *keys.shape[2:]))
    Reference()(
        query, nothing, nothing, arena, 0, tensors, scale=scale, window=window_left + 1 if window_left >= 0 else None,
        softcap=softcap or None, out=out,
    )  # fmt: skip
    return out


class Planned:
    """What the two wrappers have in common: pages in one list, and where each row's begin."""

    def _keep(
        self, counts: list[int], indptr: Tensor, indices: Tensor, last_page_len: Tensor, window_left: int,
        logits_soft_cap: float, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert {t.dtype for t in (indptr, indices, last_page_len)} == {torch.int32}
        assert len(indptr) == len(last_page_len) + 1 and int(indptr[-1]) == len(indices)
        assert bool(((last_page_len >= 1) & (last_page_len <= PAGE)).all())
        begins = indptr.tolist()
        tables = [indices[a:b].tolist() for a, b in itertools.pairwise(begins)]
        ends = [(len(t) - 1) * PAGE + n for t, n in zip(tables, last_page_len.tolist(), strict=True)]
        self._plan = counts, ends, tables, sm_scale, window_left, logits_soft_cap
        self._dtypes = q_data_type, kv_data_type

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *args: Any, out: Tensor | None = None) -> Tensor:
        keys, values = paged_kv_cache
        assert (q.dtype, keys.dtype) == self._dtypes and out is not None
        assert keys.stride() == values.stride() and keys.stride(-1) == 1
        return out.copy_(reference(q, keys, values, *self._plan))


class Library:
    """FlashInfer as its 0.7 documents it."""

    def __init__(self) -> None:
        self.plans: list[str] = []
        library = self

        class BatchDecodeWithPagedKVCacheWrapper(Planned):
            def __init__(
                self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
                use_tensor_cores: bool = False, backend: str = "auto",
            ) -> None:  # fmt: skip
                assert (kv_layout, backend, use_tensor_cores) == ("NHD", "fa2", False)

            def plan(
                self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
                head_dim: int, page_size: int, *, window_left: int = -1, logits_soft_cap: float | None = None,
                q_data_type: Any = "float16", kv_data_type: Any = None, sm_scale: float | None = None,
            ) -> None:  # fmt: skip
                assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (4, 2, 64, PAGE)
                assert logits_soft_cap is not None and sm_scale is not None
                counts = [1] * len(last_page_len)
                self._keep(counts, indptr, indices, last_page_len, window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type)  # fmt: skip
                library.plans.append("decode")

        class BatchPrefillWithPagedKVCacheWrapper(Planned):
            def __init__(
                self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
                backend: str = "auto",
            ) -> None:  # fmt: skip
                assert (kv_layout, backend) == ("NHD", "fa2")

            def plan(
                self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor,
                paged_kv_last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
                head_dim_vo: int | None = None, custom_mask: Tensor | None = None,
                packed_custom_mask: Tensor | None = None, causal: bool = False, pos_encoding_mode: str = "NONE",
                use_fp16_qk_reduction: bool = False, sm_scale: float | None = None, window_left: int = -1,
                logits_soft_cap: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
                q_data_type: Any = "float16", kv_data_type: Any = None,
            ) -> None:  # fmt: skip
                assert causal and qo_indptr.dtype == torch.int32
                assert (num_qo_heads, num_kv_heads, head_dim_qk, page_size) == (4, 2, 64, PAGE)
                assert logits_soft_cap is not None and sm_scale is not None
                counts = qo_indptr.diff().tolist()
                self._keep(counts, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type)  # fmt: skip
                library.plans.append("prefill")

        self.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
        self.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any = None, v: Any = None, qv: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
    page_table: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None, max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, **_: Any,
) -> Tensor:  # fmt: skip
    """FlashAttention 3's, which leaves what is past the last row as its memory was."""
    assert {t.dtype for t in (cache_seqlens, page_table, cu_seqlens_q)} == {torch.int32}
    assert causal and softmax_scale and k_cache.stride(-1) == 1
    counts = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q is not None and max_seqlen_q >= max(counts)
    assert window_size == (-1, -1) or window_size[1] == 0
    answer = torch.full_like(q, torch.nan)
    held = int(cu_seqlens_q[-1])
    answer[:held] = reference(q[:held], k_cache, v_cache, counts, cache_seqlens.tolist(), page_table.tolist(), softmax_scale, window_size[0], softcap)  # fmt: skip
    return answer


KINDS = [{}, {"window": 18}, {"softcap": 2.0}]
ROWS = ((1, 1), (32, 1), (70, 1), (20, 20), (45, 13))


def case_of(rows: tuple[tuple[int, int], ...] = ROWS, **more: Any) -> Case:
    return Case(rows, dimension=64, dtype=torch.bfloat16, page_dtype=torch.bfloat16, **more)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_flash_attention_3_is_given_a_pass_as_it_documents_it(kind: dict[str, Any]) -> None:
    made = make(case_of(padding=2, **kind))
    out, arena = made.attend(FlashAttention3(flash_attn_with_kvcache, write))
    expected, pages = made.attend(Reference())
    assert torch.equal(out, expected)
    assert torch.equal(arena.view(torch.int16), pages.view(torch.int16))


@pytest.mark.parametrize("rows", [ROWS, ROWS[:3], ROWS[3:]], ids=["mixed", "one token each", "slices"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_flashinfer_is_planned_for_and_given_a_pass_as_it_documents_it(
    kind: dict[str, Any], rows: tuple[tuple[int, int], ...]
) -> None:
    made = make(case_of(rows, **kind))
    kernel = FlashInfer(Library(), torch.empty(0), write)
    kernel.begin([count for _, count in rows], [end for end, _ in rows], made.tensors.tables.tolist())
    out, arena = made.attend(kernel)
    expected, pages = made.attend(Reference())
    assert torch.equal(out, expected)
    assert torch.equal(arena.view(torch.int16), pages.view(torch.int16))


def test_flashinfer_plans_once_a_pass_and_kind_and_not_for_a_pass_that_was_not_begun() -> None:
    made, library = make(case_of()), Library()
    kernel = FlashInfer(library, torch.empty(0), write)
    arena, out = copy_arena(made.arena), torch.empty_like(made.query)

    def layers() -> None:
        for window in (18, None, 18, None):
            kernel(made.query, made.key, made.value, arena, LAYER, made.tensors, scale=0.125, window=window, out=out)

    with pytest.raises(AssertionError, match="not begun"):
        layers()
    for number in (1, 2):
        kernel.begin([count for _, count in ROWS], [end for end, _ in ROWS], made.tensors.tables.tolist())
        layers()
        assert library.plans == ["decode", "prefill"] * 2 * number


def test_passes_with_slices_and_those_without_go_to_their_kernels() -> None:
    flashinfer = FlashInfer(Library(), torch.empty(0), write)
    kernel = ByPass(flashinfer, Reference())
    assert planner(kernel) is flashinfer and planner(Reference()) is None
    singles = make(case_of(ROWS[:3]))
    assert torch.equal(singles.attend(kernel)[0], singles.attend(Reference())[0])
    with pytest.raises(AssertionError, match="not begun"):
        make(case_of()).attend(kernel)
