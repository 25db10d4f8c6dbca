"""What makes a loaded model fast on the CPU: packed weights, and decoder layers and norms as compiled code.

Owns nothing; changes the modules of a model in place, freeing each weight as its packed form is there. What is done to a module is decided
by what it computes, not by its name alone: a norm or an activation is replaced only where it gives what its replacement gives. The load
probe then compares the whole with the model as it was. In float32 with weights as they are everything stays float32.

Tried and left out: torch.compile. For SmolLM2-135M in float32 on one AVX2 core it compiles for 60 s and computes a token in 56 ms, where
transformers' own code takes 73 and these levers 55; with int4 weights, which it knows nothing of, they take 13.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hexrt.kernels.quantised import (
    BLOCK,
    PANEL,
    Packed,
    QuantisedEmbedding,
    QuantisedLinear,
    can_pack,
    kernels,
    multiplies_bf16,
    pack,
)
from hexrt.llm.engine_layer import ACTIVATIONS, FusedLayer, LayerWeights, RmsNorm, Room

LAYERS: dict[str, tuple[str, ...]] = {
    # Class of decoder layers: what their attention passes on, besides its scaling.
    "LlamaDecoderLayer": (),
    "MistralDecoderLayer": ("config.sliding_window",),
    "Qwen2DecoderLayer": ("sliding_window",),
    "Qwen3DecoderLayer": ("sliding_window",),
    "Gemma2DecoderLayer": ("sliding_window", "attn_logit_softcapping"),
    "Gemma3DecoderLayer": ("sliding_window",),
}
PASSED_AS = {"config.sliding_window": "sliding_window", "attn_logit_softcapping": "softcap"}
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Linear layers that choose experts: rounding their weights would choose others."""
FLOATS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
NORM_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def apply(module: Any, weights: str, dtype: str, threads: int) -> list[str]:
    """Changes `module` in place and returns the words of what was done. `weights`: as_dtype, int8 or int4.

    A model that is not on the CPU, or whose modules are of other kinds, stays as it is, as far as that goes.
    """
    del threads  # kernels take torch's
    kind = FLOATS.get(getattr(torch, dtype)) if weights == "as_dtype" else weights
    if kind is None or any(p.device.type != "cpu" for p in module.parameters()):
        return []
    if kernels() is None and weights == "as_dtype":
        return []
    levers = [kind] if kind == weights else ["packed weights"]
    fused = fuse_layers(module, kind) if kernels() is not None else 0
    packed = pack_embeddings(module, "int8" if kind == weights else kind, bool(fused)) + pack_linears(module, kind)
    if not fused + packed:
        return []
    normed = replace_norms(module) if kernels() is not None else 0
    return [*levers, *(["fused layers"] if fused else []), *(["rms norm"] if normed else [])]


# --- packed weights ---------------------------------------------------------------------------------------------------


def pack_linears(module: nn.Module, kind: str) -> int:
    """Packs the weights of all linear layers that can be; returns how many."""
    count = 0
    for parent in list(module.modules()):
        if isinstance(parent, FusedLayer):
            continue
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name not in ROUTERS and can_pack(*child.weight.shape):
                setattr(parent, name, QuantisedLinear(pack(child.weight, kind), child.bias))
                count += 1
    return count


def pack_embeddings(module: Any, kind: str, wide: bool) -> int:
    """Packs the head, and the embedding with it where the two are one; `wide`: the layers take float32. Returns how many."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if type(head) is not nn.Linear or not can_pack(*head.weight.shape):
        return 0
    tied = isinstance(embedding, nn.Embedding) and embedding.weight.data_ptr() == head.weight.data_ptr()
    scale = getattr(embedding, "embed_scale", None)
    known = type(embedding) is nn.Embedding or (
        scale is not None and type(embedding).__name__.endswith("TextScaledWordEmbedding")
    )
    if tied and not known:
        return 0
    dtype = head.weight.dtype
    packed = pack(head.weight, kind)
    if tied:
        looked_up = torch.float32 if wide and not multiplies_bf16() else dtype
        module.set_input_embeddings(QuantisedEmbedding(packed, looked_up, None if scale is None else scale.to(dtype)))
    module.set_output_embeddings(QuantisedLinear(packed, head.bias))
    return 1


# --- norms ------------------------------------------------------------------------------------------------------------


def norm_weight(norm: Any) -> tuple[Tensor, float] | None:
    """float32 weight and epsilon with which `norm` is an RmsNorm, found by trying; None where it is none."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not type(norm).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if len(weight) % PANEL or weight.dtype not in NORM_TOLERANCE:
        return None
    x = torch.randn((4, len(weight)), generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    found = norm(x).float()
    unit = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    for candidate in (weight.detach().float(), weight.detach().float() + 1):
        if torch.allclose(
            found, unit * candidate, rtol=NORM_TOLERANCE[weight.dtype], atol=NORM_TOLERANCE[weight.dtype]
        ):
            return candidate.contiguous().clone(), eps
    return None


def replace_norms(module: Any) -> int:
    """Replaces what is left of RMS norms outside of fused layers; returns how many."""
    head = module.get_output_embeddings()
    count = 0
    for parent in _outside_layers(module):
        for name, child in list(parent.named_children()):
            if (found := norm_weight(child)) is not None:
                last = parent is getattr(module, "model", None) and not isinstance(head, QuantisedLinear)
                dtype: Any = child.weight.dtype if last else None
                setattr(parent, name, RmsNorm(*found, dtype))
                count += 1
    return count


def _outside_layers(module: nn.Module) -> Iterable[nn.Module]:
    for child in module.children():
        if not isinstance(child, FusedLayer):
            yield from _outside_layers(child)
    yield module


# --- fused layers -----------------------------------------------------------------------------------------------------


def fuse_layers(module: Any, kind: str) -> int:
    """Replaces the decoder layers of a known kind, all or none; returns how many."""
    layers = getattr(getattr(module, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers or not all(_can_fuse(layer) for layer in layers):
        return 0
    room = Room()
    for number, layer in enumerate(layers):
        layers[number] = _fuse(layer, kind, room)
    return len(layers)


def _can_fuse(layer: Any) -> bool:
    if type(layer).__name__ not in LAYERS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v, o = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    linears = (q, k, v, o, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if any(type(linear) is not nn.Linear or not can_pack(*linear.weight.shape) for linear in linears):
        return False
    d, width = attention.head_dim, q.in_features
    shapes = (
        d % BLOCK == 0 and k.out_features == v.out_features and o.out_features == width == mlp.down_proj.out_features
    )
    norms = {name: norm_weight(norm) for name, norm in _norms(layer).items()}
    known = all(norms.values()) and len({found[1] for found in norms.values() if found}) == 1
    return shapes and width % BLOCK == 0 and known and _activation(mlp) is not None


def _norms(layer: Any) -> dict[str, Any]:
    """The norms of a layer by their name in layer.c."""
    attention = layer.self_attn
    four = hasattr(layer, "pre_feedforward_layernorm")
    found = {
        "norm": layer.input_layernorm,
        "query_norm": getattr(attention, "q_norm", None),
        "key_norm": getattr(attention, "k_norm", None),
        "attended_norm": layer.post_attention_layernorm if four else None,
        "mlp_norm": layer.pre_feedforward_layernorm if four else layer.post_attention_layernorm,
        "mlp_out_norm": layer.post_feedforward_layernorm if four else None,
    }
    return {name: norm for name, norm in found.items() if norm is not None}


def _activation(mlp: Any) -> int | None:
    x = torch.linspace(-6, 6, 97)
    found = mlp.act_fn(x)
    return next((i for i, known in enumerate(ACTIVATIONS) if torch.allclose(found, known(x), atol=1e-6)), None)


def _fuse(layer: Any, kind: str, room: Room) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    gate, up = mlp.gate_proj, mlp.up_proj
    qkv = pack(torch.cat([q.weight, k.weight, v.weight]), kind)
    gate_up = pack(_in_turns(gate.weight, up.weight), kind)
    out, down = pack(attention.o_proj.weight, kind), pack(mlp.down_proj.weight, kind)
    norms = {name: found for name, norm in _norms(layer).items() if (found := norm_weight(norm)) is not None}
    activation = _activation(mlp)
    assert activation is not None
    weights = LayerWeights(
        qkv, out, gate_up, down, _biases(torch.cat, q, k, v), _biases(None, attention.o_proj),
        _biases(_in_turns, gate, up), _biases(None, mlp.down_proj),
        {name: found[0] for name, found in norms.items()}, norms["norm"][1], activation,
    )  # fmt: skip
    first = 0
    for name, linear in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
        setattr(attention, name, QuantisedLinear(qkv.part(first, linear.out_features), linear.bias))
        first += linear.out_features
    for name, linear, turn in (("gate_proj", gate, 0), ("up_proj", up, 1)):
        half = Packed(kind, linear.out_features, linear.in_features, gate_up.panels[turn::2])
        setattr(mlp, name, QuantisedLinear(half, linear.bias))
    attention.o_proj = QuantisedLinear(out, attention.o_proj.bias)
    mlp.down_proj = QuantisedLinear(down, mlp.down_proj.bias)
    return FusedLayer(layer, weights, room, _passed(layer))


def _passed(layer: Any) -> dict[str, Any]:
    passed = {}
    for name in LAYERS[type(layer).__name__]:
        value = layer.self_attn
        for part in name.split("."):
            value = getattr(value, part)
        passed[PASSED_AS.get(name, name)] = value
    return passed


def _in_turns(gate: Tensor, up: Tensor) -> Tensor:
    """Sixteen rows of the one, then sixteen of the other."""
    both = torch.stack([one.reshape(-1, PANEL, *one.shape[1:]) for one in (gate, up)], 1)
    return both.flatten(0, 2)


def _biases(join: Any, *linears: Any) -> Tensor | None:
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return None
    parts = [
        torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach().float() for linear in linears
    ]
    joined: Tensor = parts[0] if join is None else join(parts) if join is torch.cat else join(*parts)
    return joined.contiguous()
