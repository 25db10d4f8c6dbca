"""The load probe: whether a model computes over pages, and with the levers that make it fast, what it computes by itself.

Owns nothing. A model is served only if our attention is called once a layer, in order, and the logits are those of eager attention of the
weights as they were loaded. Where they are not with levers, the model is loaded again and served without, which is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hexrt.errors import HexrtError, Unavailable
from hexrt.llm.engine_attention import NAME, view_pages
from hexrt.llm.engine_pass import GREEDY, Row

if TYPE_CHECKING:
    from hexrt.llm.engine_model import PagedModel

T = TypeVar("T")
Levers = Callable[[Any], list[str]]
"""Replaces parts of a model by faster ones that compute the same, and says in a word each what it did."""

PROBE_TOKENS = 40
WINDOW_TOKENS = 320
"""A prompt is longer than the model's sliding window where that takes no more tokens than this."""
EXACT_TOLERANCE = 1e-4
"""Of logits, relative to the largest where that is above 1; in float32."""
TOLERANCES = {"as_dtype": 0.05, "int8": 0.1, "int4": 1.5}
"""Kullback-Leibler divergence of the next-token distribution, by how weights are kept, in dtypes of 16 bits or with packed weights, as a mean
over tokens. It finds a kernel that computes something else, which is off by several, not a packing that is worse than another."""


EXPERTS = 4.0
"""Times the tolerance, and of the median: a rounding may send a token to another expert, and what follows it sees that."""
ATTENTIONS = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class Expected:
    """A prompt, and the model's own logits for every token of it, float32."""

    ids: list[int]
    logits: Tensor


def load_proven(model: PagedModel, load: Callable[[], Any], levers: Levers) -> list[str]:
    """Sets `model.module` to what `load` gives and returns the levers' words. Raises Unavailable naming the model."""
    model.module = load()
    _named(model, lambda: check_kind(model.module))
    expected = _named(model, lambda: by_itself(model))
    words = levers(model.module)
    try:
        _named(model, lambda: probe(model, expected))
    except Unavailable as error:
        if not words:
            raise
        why = error.message
        model.module, model.weights = load(), "as_dtype"
        _named(model, lambda: probe(model, expected))
        return [f"none: with {', '.join(words)}, {why}"]
    return words


def _named(model: PagedModel, work: Callable[[], T]) -> T:
    """Whatever goes wrong in a model's own code says that it cannot be served, and why."""
    try:
        return work()
    except HexrtError as error:
        raise Unavailable(f"the model {model.name!r} cannot be served: {error.message}", "params.model") from None
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError) as error:
        raise Unavailable(
            f"the model {model.name!r} cannot be served: its attention cannot be replaced ({error})", "params.model"
        ) from error


def check_kind(module: Any) -> None:
    """Raises Unavailable for what a short prompt would not show: a state beside the pages, or attention that is neither full nor a window's."""
    if getattr(module, "_is_stateful", False):
        raise Unavailable(f"{type(module).__name__} keeps a state of its own beside K and V, which pages do not hold")
    kinds = set(getattr(module.config.get_text_config(), "layer_types", None) or ())
    if odd := kinds - ATTENTIONS:
        raise Unavailable(f"it has layers of the kind {min(odd)!r}, which pages do not do")


def by_itself(model: PagedModel) -> Expected:
    """Eager attention of the module as it is, over a short prompt."""
    config = model.module.config.get_text_config()
    window = getattr(config, "sliding_window", None) or 0
    tokens = max(PROBE_TOKENS, window + PROBE_TOKENS // 2 if window < WINDOW_TOKENS else 0)
    last = model.shape.vocabulary - 1
    ids = [1 + (7919 * i) % last for i in range(min(tokens, model.shape.context_tokens - 1))]
    model.module.set_attn_implementation("eager")
    with torch.inference_mode():
        out = model.module(input_ids=torch.tensor([ids]), use_cache=False)
    model.module.set_attn_implementation(NAME)
    return Expected(ids, out.logits[0].float())


def probe(model: PagedModel, expected: Expected) -> None:
    """Reads the prompt in two slices and single tokens over scattered frames, and compares. Raises Unavailable."""
    ids = expected.ids
    pages = -(-len(ids) // model.page_tokens)
    memory = torch.zeros(2 * pages * model.page_bytes, dtype=torch.uint8)
    arena = view_pages(memory, model.arena.dtype, model.page_bytes, model.arena.shape[1:])
    frames = np.arange(2 * pages - 1, 0, -2, dtype=np.int32)
    cut = len(ids) * 3 // 5
    ends = [*range(cut, min(cut + 4, len(ids))), len(ids)]
    found = []
    for start, end in zip([0, *ends], ends, strict=False):
        row = Row(ids[start:end], frames, start, GREEDY if start else None)  # the first does not end a prompt
        logits, layers = model.run_over([row], arena)
        found.append(logits)
        if layers != list(range(model.shape.layers)):
            raise Unavailable(f"its {model.shape.layers} layers called the attention {len(layers)} times")
    compare(model, torch.cat(found), expected.logits[[end - 1 for end in ends[1:]]])


def compare(model: PagedModel, paged: Tensor, eager: Tensor) -> None:
    if (model.dtype, model.weights, model.kv_dtype) == ("float32", "as_dtype", "float32"):
        off, most = float((paged - eager).abs().max()) / max(1.0, float(eager.abs().max())), EXACT_TOLERANCE
    else:
        likely = torch.log_softmax(eager, -1)
        each = (likely.exp() * (likely - torch.log_softmax(paged, -1))).sum(-1)
        experts = has_experts(model.module.config)
        off = float(each.median() if experts else each.mean())
        most = TOLERANCES[model.weights] * (EXPERTS if experts else 1)
    if not off <= most or not math.isfinite(off):
        raise Unavailable(f"over pages its logits are off by {off:.2g}, and at most {most:g} may be")


def has_experts(config: Any) -> bool:
    text = config.get_text_config()
    return any(
        (getattr(text, name, None) or 0) > 1 for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )
