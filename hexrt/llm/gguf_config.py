"""The config.json of a model from the metadata of its GGUF file, for the architectures whose every field is known here.

A field of the architecture that is not known is refused by name: it may change the model in a way that would not be noticed. Field names
and the values that a file leaves out are those of llama.cpp's converter and loader. Opens no file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from hexrt.errors import BadRequest, Unavailable
from hexrt.llm.gguf_header import TOKENS

COMMON = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "rope.freq_base", "rope.dimension_count", "vocab_size",
})  # fmt: skip
GEMMA2_27B, GEMMA3_27B = 46, 62
"""Layers of the two whose scores are scaled by their width over their heads; a file does not say so, llama.cpp goes by the layers too."""
GEMMA3_PERIOD = 6  # every sixth layer attends to everything


class Fields:
    """The metadata of one file, each field asked for by its name within the architecture. Raises BadRequest for one that makes no sense."""

    def __init__(self, meta: Mapping[str, Any], tensors: Collection[str]) -> None:
        """`tensors` may be empty where only the shape is wanted."""
        self.meta = meta
        self.tensors = tensors
        self.architecture = need(meta, "general.architecture")

    def count(self, name: str, otherwise: int | None = None) -> int:
        value = self.meta.get(f"{self.architecture}.{name}", otherwise)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
            raise BadRequest(f"the file has no usable {self.architecture}.{name}: {value!r}", "source")
        return value

    def number(self, name: str, otherwise: float | None = None) -> float:
        value = self.meta.get(f"{self.architecture}.{name}", otherwise)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise BadRequest(f"the file has no usable {self.architecture}.{name}: {value!r}", "source")
        return float(value)

    def token(self, name: str) -> int | None:
        """The id of a special token."""
        value = self.meta.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and not isinstance(value, int):
            raise BadRequest(f"the file has no usable tokenizer.ggml.{name}_token_id", "source")
        return value

    def tokens(self) -> int:
        value = self.meta.get(TOKENS)
        if isinstance(value, list):
            return len(value)
        return value if isinstance(value, int) else self.count("vocab_size")

    def check_known(self, more: Collection[str] = ()) -> None:
        for key in self.meta:
            prefix, _, name = key.partition(".")
            if prefix == self.architecture and name not in COMMON and name not in more:
                raise Unavailable(f"the field {key!r} changes the model in a way that is not known", key)


def need(meta: Mapping[str, Any], key: str) -> Any:
    if key not in meta:
        raise BadRequest(f"the file lacks the field {key!r}", "source")
    return meta[key]


def model_config(meta: Mapping[str, Any], tensors: Collection[str], dtype: str) -> dict[str, Any]:
    """Raises Unavailable for an architecture or field that is not known, BadRequest where the file contradicts itself."""
    fields = Fields(meta, tensors)
    make = ARCHITECTURES.get(fields.architecture)
    if make is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise Unavailable(f"architecture {fields.architecture!r} is not known; known: {known}", "general.architecture")
    return make(fields) | {"dtype": dtype}


def _base(fields: Fields, name: str, model_type: str) -> dict[str, Any]:
    width, heads = fields.count("embedding_length"), fields.count("attention.head_count")
    kv_heads = fields.count("attention.head_count_kv", heads)
    divides = not (width % heads) or f"{fields.architecture}.attention.key_length" in fields.meta
    if not divides or heads % kv_heads:
        raise BadRequest(f"{heads} query and {kv_heads} KV heads do not divide a width of {width}", "source")
    head_dim = fields.count("attention.key_length", width // heads or 1)
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise Unavailable("keys and values of different width are not known", "attention.value_length")
    if fields.count("rope.dimension_count", head_dim) != head_dim:
        raise Unavailable("rotary embedding of a part of each head is not known", "rope.dimension_count")
    theta = fields.number("rope.freq_base", 10000.0)
    eos = fields.token("eos")
    ends = [token for token in (eos, fields.token("eot")) if token is not None]
    return {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": fields.tokens(),
        "hidden_size": width,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in fields.tensors,
        "bos_token_id": fields.token("bos"),
        "eos_token_id": sorted(set(ends)) if len(set(ends)) > 1 else eos,
    }


def _llama(fields: Fields) -> dict[str, Any]:
    fields.check_known()
    return _base(fields, "LlamaForCausalLM", "llama") | {"attention_bias": False, "mlp_bias": False}


def _qwen2(fields: Fields) -> dict[str, Any]:
    fields.check_known()
    return _base(fields, "Qwen2ForCausalLM", "qwen2") | {"use_sliding_window": False}


def _qwen3(fields: Fields) -> dict[str, Any]:
    fields.check_known()
    return _base(fields, "Qwen3ForCausalLM", "qwen3") | {"attention_bias": False, "use_sliding_window": False}


def _gemma(fields: Fields, version: int, large: int) -> dict[str, Any]:
    base = _base(fields, f"Gemma{version}ForCausalLM", {2: "gemma2", 3: "gemma3_text"}[version])
    per_head = base["hidden_size"] // base["num_attention_heads"]
    return base | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": per_head if base["num_hidden_layers"] == large else base["head_dim"],
        "sliding_window": fields.count("attention.sliding_window"),
    }


def _gemma2(fields: Fields) -> dict[str, Any]:
    fields.check_known({"attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"})
    config = _gemma(fields, 2, GEMMA2_27B)
    kinds = ("sliding_attention", "full_attention")
    return config | {
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "layer_types": [kinds[layer % 2] for layer in range(config["num_hidden_layers"])],
    }


def _gemma3(fields: Fields) -> dict[str, Any]:
    fields.check_known({"attention.sliding_window", "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor"})
    config = _gemma(fields, 3, GEMMA3_27B)
    whole: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base", 1e6)}
    kind = fields.meta.get("gemma3.rope.scaling.type", "none")
    if kind == "linear":
        whole |= {"rope_type": "linear", "factor": fields.number("rope.scaling.factor")}
    elif kind != "none":
        raise Unavailable(f"rotary scaling of the kind {kind!r} is not known", "gemma3.rope.scaling.type")
    near = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)}
    layers = range(1, config["num_hidden_layers"] + 1)
    del config["rope_theta"]
    return config | {
        "layer_types": ["sliding_attention" if layer % GEMMA3_PERIOD else "full_attention" for layer in layers],
        "rope_parameters": {"full_attention": whole, "sliding_attention": near},
    }


ARCHITECTURES: Mapping[str, Callable[[Fields], dict[str, Any]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
