"""One model in memory: loading, its view of the arena that its pages lie in, the load probe, and one packed forward pass.

Owns the weights; the arena is the host's, other models lie in it too, and which frames are whose the daemon decides. The arithmetic is transformers'; K and V go to pages through `engine_attention`. A model is accepted only
if the probe finds that our attention is called once a layer and that the logits are those of eager attention. Used on one thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hexrt.errors import HexrtError, OutOfMemory, Unavailable
from hexrt.llm.engine_attention import NAME, Row, Scratch, paged_attention, plan_pass, view_pages
from hexrt.llm.steps import ModelShape, model_shape

FRAME_STEP = 4096
"""Frames begin at multiples of it: disks and page tables want that."""
PROBE_TOKENS = 40
PROBE_SLICE = 24
EXACT_TOLERANCE = 1e-3
"""Of logits, relative to the largest where that is above 1; in float32."""
FAST_TOLERANCE = 0.05
"""Kullback-Leibler divergence of the next-token distribution, in dtypes of 16 bits."""


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
        self._model = load_weights(name, folder, dtype)
        self.eos = end_tokens(self._model)
        page = (self.shape.layers, 2, page_tokens, self.shape.kv_heads, self.shape.head_dim)
        whole = torch.frombuffer(memory, dtype=torch.uint8, count=self.frames * self.page_bytes)
        self.arena = view_pages(whole, getattr(torch, dtype), self.page_bytes, page)
        self._scratch = Scratch(self.arena)
        self._probe(dtype == "float32")

    def forward(self, work: Sequence[Work]) -> Tensor:
        """Logits, float32 [rows that draw, vocabulary]. `work` is ordered: single tokens by length first, then slices."""
        return self._forward(work, self.arena)[0]

    @torch.inference_mode()
    def _forward(self, work: Sequence[Work], arena: Tensor) -> tuple[Tensor, list[int]]:
        ids = [token for item in work for token in item.ids]
        positions = [position for item in work for position in range(item.row.start, item.row.end)]
        keep, end = [], 0
        for item in work:
            end += item.row.count
            if item.draws:
                keep.append(end - 1)
        plan = plan_pass(arena, self._scratch, [item.row for item in work], self.shape.context_tokens)
        out = self._model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            logits_to_keep=torch.tensor(keep, dtype=torch.long),
            hexrt_pages=plan,
        )
        return out.logits[0].float(), plan.layers

    def _probe(self, exact: bool) -> None:
        """Reads a short prompt in two slices and single tokens over scattered frames, and compares with eager attention."""
        last = self.shape.vocabulary - 1
        ids = [1 + (7919 * i) % last for i in range(PROBE_TOKENS)]
        pages = -(-PROBE_TOKENS // self.page_tokens)
        memory = torch.zeros(2 * pages * self.page_bytes, dtype=torch.uint8)
        arena = view_pages(memory, self.arena.dtype, self.page_bytes, self.arena.shape[1:])
        frames = range(2 * pages - 1, 0, -2)
        try:
            spans = [(0, PROBE_SLICE), *((i, i + 1) for i in range(PROBE_SLICE, PROBE_SLICE + 4)), (PROBE_SLICE + 4, PROBE_TOKENS)]  # fmt: skip
            found = []
            for start, end in spans:
                logits, layers = self._forward([Work(ids[start:end], Row(frames, start, end - start), True)], arena)
                found.append(logits)
                if layers != list(range(self.shape.layers)):
                    raise Unavailable(f"its {self.shape.layers} layers called the attention {len(layers)} times")
            self._model.set_attn_implementation("eager")
            with torch.inference_mode():
                eager = self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
            self._model.set_attn_implementation(NAME)
        except HexrtError as error:
            raise Unavailable(f"the model {self.name!r} cannot be served: {error.message}", "params.model") from None
        except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError) as error:
            raise Unavailable(
                f"the model {self.name!r} cannot be served: its attention cannot be replaced ({error})", "params.model"
            ) from error
        self._compare(torch.cat(found), eager[[end - 1 for _, end in spans]], exact)

    def _compare(self, paged: Tensor, eager: Tensor, exact: bool) -> None:
        if exact:
            off = float((paged - eager).abs().max()) / max(1.0, float(eager.abs().max()))
        else:
            expected = torch.log_softmax(eager, -1)
            off = float((expected.exp() * (expected - torch.log_softmax(paged, -1))).sum(-1).max())
        if not off <= (EXACT_TOLERANCE if exact else FAST_TOLERANCE) or not math.isfinite(off):
            raise Unavailable(
                f"the model {self.name!r} cannot be served: over pages its logits are off by {off:.2g}", "params.model"
            )


def read_shape(name: str, folder: Path) -> ModelShape:
    try:
        return model_shape(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise Unavailable(
            f"the folder of the model {name!r} is missing or has no config.json", "params.model"
        ) from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"the config.json of the model {name!r} cannot be read", "params.model") from error


def load_weights(name: str, folder: Path, dtype: str) -> Any:
    """The model, with our attention. Raises Unavailable where weights are missing or do not fit; nothing is fetched and no code is run."""
    from safetensors import SafetensorError
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging  # untyped
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    AttentionInterface.register(NAME, paged_attention)
    auto: Any = AutoModelForCausalLM  # its return type knows nothing of `output_loading_info`
    try:
        model, report = auto.from_pretrained(
            str(folder), dtype=getattr(torch, dtype), attn_implementation=NAME, local_files_only=True,
            trust_remote_code=False, use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, ImportError) as error:
        text = str(error).replace(str(folder), "its folder").splitlines()[0] if str(error) else type(error).__name__
        raise Unavailable(f"the model {name!r} cannot be loaded: {text}", "params.model") from error
    if lacking := sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}):
        raise Unavailable(
            f"the model {name!r} cannot be loaded: {len(lacking)} weights are missing or of another shape, "
            f"among them {lacking[0]!r}",
            "params.model",
        )
    return model.eval().requires_grad_(False)


def end_tokens(model: Any) -> frozenset[int]:
    """The ids that end an answer, as the model's generation config says, else its config."""
    found = getattr(model.generation_config, "eos_token_id", None)
    found = model.config.eos_token_id if found is None else found
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])
