"""The weights of a GGUF file as a state dict of the transformers model: unpacked, renamed, and laid out as transformers has them.

Names come from the gguf package's own table. What llama.cpp's converter changes is undone: Llama's Q and K rows, which it keeps in
interleaved pairs, and Gemma's norms, which it keeps with one added. A tensor that the model has no place for is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hexrt.errors import Unavailable
from hexrt.llm.gguf_header import Header, TensorPlace

PLUS_ONE = ("gemma2", "gemma3")
"""Architectures whose norms are kept as weight + 1."""


def state_dict(path: Path, header: Header, config: Mapping[str, Any], names: Iterable[str], dtype: str) -> dict[str, Tensor]:  # fmt: skip
    """`names`: the model's weights. Each tensor of the file under one of them, in `dtype`. Raises Unavailable."""
    import numpy as np

    places = tensor_names(header.meta["general.architecture"], config["num_hidden_layers"], names)
    data = np.memmap(path, mode="r", dtype=np.uint8)
    return {
        name: _converted(values, name, header.meta["general.architecture"], config).to(getattr(torch, dtype))
        for name, values in _unpacked(data, header.tensors, places)
    }


def weight_names(config: Mapping[str, Any]) -> dict[str, torch.Size]:
    """The weights that the transformers model of `config` has, with their shapes. A tied head is none of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known: Any = AutoConfig
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(known.for_model(**config))
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config["tie_word_embeddings"] else set()
    return {name: values.shape for name, values in model.state_dict().items() if name not in tied}


def tensor_names(architecture: str, layers: int, names: Iterable[str]) -> dict[str, str]:
    """The model's name of each tensor that a file may hold."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[architecture], layers)
    found: dict[str, str] = {}
    for name in names:
        given = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if given is None or given in found:
            raise Unavailable(f"the weight {name!r} has no place of its own in a GGUF file", "source")
        found[given] = name
    return found


def _unpacked(data: Any, tensors: Collection[TensorPlace], places: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    for place in tensors:
        if place.name not in places:
            raise Unavailable(f"the tensor {place.name!r} is not one of this model", place.name)
        kind = GGMLQuantizationType(place.kind)
        raw = data[place.offset : place.offset + place.bytes].reshape(*place.shape[:-1], -1)
        try:
            values = dequantize(raw, kind)
        except NotImplementedError:
            raise Unavailable(f"cannot unpack {kind.name} values of the tensor {place.name!r}", place.name) from None
        yield places[place.name], torch.from_numpy(np.array(values, dtype=np.float32))


def _converted(values: Tensor, name: str, architecture: str, config: Mapping[str, Any]) -> Tensor:
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        return unpermute(
            values, config["num_attention_heads" if name.endswith("q_proj.weight") else "num_key_value_heads"]
        )
    if architecture in PLUS_ONE and name.endswith("norm.weight"):
        return values - 1
    return values


def unpermute(rows: Tensor, heads: int) -> Tensor:
    """Puts the rows of a Q or K projection back into half-rotation order.

    GGUF stores each head as interleaved pairs (0, d/2, 1, d/2 + 1, ...) for rotary embedding by neighbours; transformers rotates the
    first half of a head against the second, (0 .. d/2 - 1, d/2 .. d - 1).
    """
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
