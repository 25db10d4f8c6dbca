"""The load probe: whether a model computes over pages what it computes by itself.

Owns nothing. A model is served only if our attention is called once a layer, in order, and the logits are those of eager attention.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hexrt.errors import HexrtError, Unavailable
from hexrt.llm.engine_attention import NAME, Row, view_pages

if TYPE_CHECKING:
    from hexrt.llm.engine_model import PagedModel

PROBE_TOKENS = 40
PROBE_SLICE = 24
EXACT_TOLERANCE = 1e-3
"""Of logits, relative to the largest where that is above 1; in float32."""
FAST_TOLERANCE = 0.05
"""Kullback-Leibler divergence of the next-token distribution, in dtypes of 16 bits."""


def probe(model: PagedModel, exact: bool) -> None:
    """Reads a short prompt in two slices and single tokens over scattered frames, and compares with eager attention."""
    from hexrt.llm.engine_model import Work

    last = model.shape.vocabulary - 1
    ids = [1 + (7919 * i) % last for i in range(PROBE_TOKENS)]
    pages = -(-PROBE_TOKENS // model.page_tokens)
    memory = torch.zeros(2 * pages * model.page_bytes, dtype=torch.uint8)
    arena = view_pages(memory, model.arena.dtype, model.page_bytes, model.arena.shape[1:])
    frames = range(2 * pages - 1, 0, -2)
    try:
        spans = [(0, PROBE_SLICE), *((i, i + 1) for i in range(PROBE_SLICE, PROBE_SLICE + 4)), (PROBE_SLICE + 4, PROBE_TOKENS)]  # fmt: skip
        found = []
        for start, end in spans:
            logits, layers = model.run_over([Work(ids[start:end], Row(frames, start, end - start), True)], arena)
            found.append(logits)
            if layers != list(range(model.shape.layers)):
                raise Unavailable(f"its {model.shape.layers} layers called the attention {len(layers)} times")
        model.module.set_attn_implementation("eager")
        with torch.inference_mode():
            eager = model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        model.module.set_attn_implementation(NAME)
    except HexrtError as error:
        raise Unavailable(f"the model {model.name!r} cannot be served: {error.message}", "params.model") from None
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError) as error:
        raise Unavailable(
            f"the model {model.name!r} cannot be served: its attention cannot be replaced ({error})", "params.model"
        ) from error
    compare(model.name, torch.cat(found), eager[[end - 1 for _, end in spans]], exact)


def compare(name: str, paged: Tensor, eager: Tensor, exact: bool) -> None:
    if exact:
        off = float((paged - eager).abs().max()) / max(1.0, float(eager.abs().max()))
    else:
        expected = torch.log_softmax(eager, -1)
        off = float((expected.exp() * (expected - torch.log_softmax(paged, -1))).sum(-1).max())
    if not off <= (EXACT_TOLERANCE if exact else FAST_TOLERANCE) or not math.isfinite(off):
        raise Unavailable(
            f"the model {name!r} cannot be served: over pages its logits are off by {off:.2g}", "params.model"
        )
