"""One model in memory: loading, its view of the arena that its pages lie in, the load probe, and one packed forward pass.

Owns the weights; the arena is the host's, other models lie in it too, and which frames are whose the daemon decides. The arithmetic is transformers'; K and V go to pages through `engine_attention`. A model is accepted only
if the probe finds that our attention is called once a layer and that the logits are those of eager attention. Used on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hexrt.errors import OutOfMemory
from hexrt.kernels.native_attention import choose
from hexrt.llm.engine_attention import PagedPass, view_pages
from hexrt.llm.engine_draws import Sampler
from hexrt.llm.engine_levers import apply
from hexrt.llm.engine_load import end_tokens, load_weights, read_shape
from hexrt.llm.engine_pass import Pass, PassBuffers, Row
from hexrt.llm.engine_probe import load_proven
from hexrt.llm.engine_sampling import Drawn

FRAME_STEP = 4096
"""Frames begin at multiples of it: disks and page tables want that."""


class PagedModel:
    """A causal language model whose K and V live in frames of `arena`, one every `page_bytes`."""

    def __init__(
        self, name: str, folder: Path, dtype: str, memory: memoryview, page_tokens: int, weights: str = "as_dtype",
        kv_dtype: str = "", threads: int = 0,
    ) -> None:  # fmt: skip
        """`memory`: all of the arena, writable; none of it is touched here. Raises Unavailable or OutOfMemory, naming the model, where it cannot be served."""
        self.name = name
        self.dtype, self.weights, self.kv_dtype, self.threads = dtype, weights, kv_dtype or dtype, threads
        self.page_tokens = page_tokens
        self.shape = read_shape(name, folder)
        self.page_bytes = -(-self.shape.page_bytes(self.kv_dtype, page_tokens) // FRAME_STEP) * FRAME_STEP
        self.frames = len(memory) // self.page_bytes
        if self.frames < 1:
            raise OutOfMemory(f"the arena's {len(memory)} bytes hold no page of {name!r}, which has {self.page_bytes}")
        self.module: Any = None
        page = (self.shape.layers, 2, page_tokens, self.shape.kv_heads, self.shape.head_dim)
        whole = torch.frombuffer(memory, dtype=torch.uint8, count=self.frames * self.page_bytes)
        self.arena = view_pages(whole, getattr(torch, self.kv_dtype), self.page_bytes, page)
        self.attend, self.attend_why = choose(getattr(torch, dtype), self.arena.dtype, self.shape.head_dim)
        self.draw = Sampler(self.arena.device)
        self.levers = load_proven(
            self, partial(self._load, folder), lambda module: apply(module, weights, dtype, threads)
        )
        self.eos = end_tokens(self.module)

    def _load(self, folder: Path) -> Any:
        module = load_weights(self.name, folder, self.dtype)
        # Not before: the weights have shown that the config does not speak of a vocabulary of billions.
        self.buffers = PassBuffers(self.arena.device, self.shape.vocabulary, self.page_tokens)
        return module

    @torch.inference_mode()
    def step(self, inputs: Pass) -> Drawn:
        """One pass and its draws: a function of the buffers alone, with nothing read by the host, so that a decode pass can be captured."""
        return self.draw(self.logits(inputs, self.arena)[0], inputs.draws)

    def logits(self, inputs: Pass, arena: Tensor) -> tuple[Tensor, list[int]]:
        """Logits, float32 [draws, vocabulary], and the layers as they called the attention."""
        pages = PagedPass(arena, inputs.tensors, self.attend, self.shape.context_tokens)
        out = self.module(
            input_ids=inputs.ids,
            position_ids=inputs.positions,
            use_cache=False,
            logits_to_keep=inputs.keep,
            hexrt_pages=pages,
        )
        return out.logits[0].float(), pages.layers

    @torch.inference_mode()
    def run_over(self, rows: Sequence[Row], arena: Tensor) -> tuple[Tensor, list[int]]:
        """The logits of a pass over pages of another arena, for the load probe."""
        return self.logits(self.buffers.fill(rows), arena)
