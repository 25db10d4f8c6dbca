"""One model in memory: loading, its view of the arena that its pages lie in, the load probe, and one packed forward pass.

Owns the weights; the arena is the host's, other models lie in it too, and which frames are whose the daemon decides. The arithmetic is transformers'; K and V go to pages through `engine_attention`. A model is accepted only
if the probe finds that our attention is called once a layer and that the logits are those of eager attention. Used on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hexrt.errors import OutOfMemory
from hexrt.llm.engine_attention import Row, Scratch, plan_pass, view_pages
from hexrt.llm.engine_load import end_tokens, load_weights, read_shape
from hexrt.llm.engine_probe import probe

FRAME_STEP = 4096
"""Frames begin at multiples of it: disks and page tables want that."""


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's tokens in a pass. `draws`: the logits after its last token are wanted."""

    ids: Sequence[int]
    row: Row
    draws: bool


class PagedModel:
    """A causal language model whose K and V live in frames of `arena`, one every `page_bytes`."""

    def __init__(self, name: str, folder: Path, dtype: str, memory: memoryview, page_tokens: int) -> None:
        """`memory`: all of the arena, writable; none of it is touched here. Raises Unavailable or OutOfMemory, naming the model, where it cannot be served."""
        self.name = name
        self.page_tokens = page_tokens
        self.shape = read_shape(name, folder)
        self.page_bytes = -(-self.shape.page_bytes(dtype, page_tokens) // FRAME_STEP) * FRAME_STEP
        self.frames = len(memory) // self.page_bytes
        if self.frames < 1:
            raise OutOfMemory(f"the arena's {len(memory)} bytes hold no page of {name!r}, which has {self.page_bytes}")
        self.module = load_weights(name, folder, dtype)
        self.eos = end_tokens(self.module)
        page = (self.shape.layers, 2, page_tokens, self.shape.kv_heads, self.shape.head_dim)
        whole = torch.frombuffer(memory, dtype=torch.uint8, count=self.frames * self.page_bytes)
        self.arena = view_pages(whole, getattr(torch, dtype), self.page_bytes, page)
        self._scratch = Scratch(self.arena)
        probe(self, dtype == "float32")

    def forward(self, work: Sequence[Work]) -> Tensor:
        """Logits, float32 [rows that draw, vocabulary]. `work` is ordered: single tokens by length first, then slices."""
        return self.run_over(work, self.arena)[0]

    @torch.inference_mode()
    def run_over(self, work: Sequence[Work], arena: Tensor) -> tuple[Tensor, list[int]]:
        ids = [token for item in work for token in item.ids]
        positions = [position for item in work for position in range(item.row.start, item.row.end)]
        keep, end = [], 0
        for item in work:
            end += item.row.count
            if item.draws:
                keep.append(end - 1)
        plan = plan_pass(arena, self._scratch, [item.row for item in work], self.shape.context_tokens)
        out = self.module(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            logits_to_keep=torch.tensor(keep, dtype=torch.long),
            hexrt_pages=plan,
        )
        return out.logits[0].float(), plan.layers
