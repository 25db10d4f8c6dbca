"""Turns one GGUF file into a model folder: safetensors, config.json, tokenizer.json, tokenizer_config.json, generation_config.json.

`python -m hexrt.llm.convert SOURCE TARGET [--dtype float32]` (SOURCE may be `package:NAME`), or `convert_gguf`. Reads Llama-architecture files with a byte-level BPE
tokeniser and refuses by name whatever else it meets. The folder appears whole or not at all; `conversion.json` in it holds the digests of
the source and of every file, so that a second call with the same source only verifies them.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hexrt.errors import BadRequest, HexrtError, NotFound, Unavailable

if TYPE_CHECKING:
    from gguf import GGUFReader

FORMAT = 1
MANIFEST = "conversion.json"
DTYPES = ("float32", "bfloat16", "float16")

BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

ARCHITECTURE_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "vocab_size",
    }
)
PRE_TOKENISERS = frozenset({"smollm"})
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # token types of the GGUF specification


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_converted(target: Path, source_digest: str, dtype: str) -> bool:
    """Whether `target` was made from that source for that dtype and all its files are as they were written."""
    try:
        manifest = json.loads((target / MANIFEST).read_text())
        if (manifest["format"], manifest["source"], manifest["dtype"]) != (FORMAT, source_digest, dtype):
            return False
        return all(file_digest(target / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def convert_gguf(source: Path, target: Path, dtype: str = "float32") -> bool:
    """Writes the model folder `target`; returns False where it was there already and verified.

    Raises NotFound for a missing source, BadRequest for a file that is no GGUF or lies about itself, Unavailable for a model or
    tokeniser that is not known here. Nothing is left at `target` then, or what was there before.
    """
    if dtype not in DTYPES:
        raise BadRequest(f"{dtype!r} is none of {', '.join(DTYPES)}", "dtype")
    if not source.is_file():
        raise NotFound(f"there is no file {source.name!r}", "source")
    digest = file_digest(source)
    if is_converted(target, digest, dtype):
        return False
    reader = _open(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(meta, {tensor.name for tensor in reader.tensors}, dtype)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_tokeniser(meta, work)
        _write_weights(reader, config, dtype, work / "model.safetensors")
        _write_json(work / "config.json", config)
        eos = config["eos_token_id"]
        _write_json(work / "generation_config.json", {"bos_token_id": config["bos_token_id"], "eos_token_id": eos})
        files = {path.name: file_digest(path) for path in sorted(work.iterdir())}
        manifest = {"format": FORMAT, "source": digest, "source_name": source.name, "dtype": dtype, "files": files}
        _write_json(work / MANIFEST, manifest)
        _settle(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def _open(source: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(source)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise BadRequest(f"{source.name!r} is not a readable GGUF file: {error}", "source") from error


def _settle(work: Path, target: Path) -> None:
    """Puts the finished folder in its place, durably; an older one is set aside first and then removed."""
    for path in [*work.iterdir(), work]:
        path.chmod(0o755 if path is work else 0o644)
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    if target.exists():
        old = work.with_name(work.name + ".old")
        target.rename(old)
        work.rename(target)
        shutil.rmtree(old)
    else:
        work.rename(target)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _need(meta: Mapping[str, Any], key: str) -> Any:
    if key not in meta:
        raise BadRequest(f"the file lacks the field {key!r}", "source")
    return meta[key]


def model_config(meta: Mapping[str, Any], tensors: set[str], dtype: str) -> dict[str, Any]:
    """The config.json of a Llama model from GGUF metadata. Raises Unavailable or BadRequest naming the field that does not fit."""
    architecture = _need(meta, "general.architecture")
    if architecture != "llama":
        raise Unavailable(f"architecture {architecture!r} is not known; only 'llama' is", "general.architecture")
    for key in meta:
        if key.startswith("llama.") and key[len("llama.") :] not in ARCHITECTURE_KEYS:
            raise Unavailable(f"the field {key!r} changes the model in a way that is not known", key)
    width, heads = _need(meta, "llama.embedding_length"), _need(meta, "llama.attention.head_count")
    kv_heads = meta.get("llama.attention.head_count_kv", heads)
    if heads < 1 or kv_heads < 1 or width % heads or heads % kv_heads:
        raise BadRequest(f"{heads} query and {kv_heads} KV heads do not divide a width of {width}", "source")
    head_dim = width // heads
    if meta.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise Unavailable("rotary embedding of a part of each head is not known", "llama.rope.dimension_count")
    theta = meta.get("llama.rope.freq_base", 10000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_need(meta, "tokenizer.ggml.tokens")),
        "hidden_size": width,
        "intermediate_size": _need(meta, "llama.feed_forward_length"),
        "num_hidden_layers": _need(meta, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": _need(meta, "llama.context_length"),
        "rms_norm_eps": _need(meta, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": _need(meta, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _need(meta, "tokenizer.ggml.eos_token_id"),
        "dtype": dtype,
    }


def weight_name(name: str, layers: int) -> str:
    """The transformers name of a GGUF tensor. Raises Unavailable for one that a Llama model does not have."""
    part = name.split(".")
    if part[-1] == "weight":
        if len(part) == 2 and part[0] in OUTER:
            return f"{OUTER[part[0]]}.weight"
        if len(part) == 4 and part[0] == "blk" and part[1].isdecimal() and int(part[1]) < layers and part[2] in BLOCK:
            return f"model.layers.{int(part[1])}.{BLOCK[part[2]]}.weight"
    raise Unavailable(f"the tensor {name!r} is not one of a Llama model", name)


def expected_names(config: Mapping[str, Any]) -> set[str]:
    """The names of all weights that a model of this config has."""
    layers = config["num_hidden_layers"]
    names = {f"model.layers.{layer}.{part}.weight" for layer in range(layers) for part in BLOCK.values()}
    tied = config["tie_word_embeddings"]
    return names | {f"{part}.weight" for key, part in OUTER.items() if not (tied and key == "output")}


def _write_weights(reader: GGUFReader, config: Mapping[str, Any], dtype: str, path: Path) -> None:
    import numpy as np
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = weight_name(tensor.name, config["num_hidden_layers"])
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise Unavailable(f"cannot unpack {tensor.tensor_type.name} values", tensor.name) from error
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = unpermute(values, heads if name.endswith("q_proj.weight") else kv_heads)
        weights[name] = torch.from_numpy(np.array(values, dtype=np.float32)).to(getattr(torch, dtype)).contiguous()
    expected = expected_names(config)
    if missing := expected - weights.keys():
        raise BadRequest(f"{len(missing)} tensors are missing, among them {min(missing)!r}", "source")
    save_file(weights, str(path), metadata={"format": "pt"})


def unpermute(rows: Any, heads: int) -> Any:
    """Puts the rows of a Q or K projection back into half-rotation order.

    GGUF stores each head as interleaved pairs (0, d/2, 1, d/2 + 1, ...) for rotary embedding by neighbours; transformers rotates the
    first half of a head against the second, (0 .. d/2 - 1, d/2 .. d - 1).
    """
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_tokeniser(meta: Mapping[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    model, pre = _need(meta, "tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise Unavailable(f"tokeniser {model!r} is not known; only byte-level BPE ('gpt2') is", "tokenizer.ggml.model")
    if pre not in PRE_TOKENISERS:
        known = ", ".join(sorted(PRE_TOKENISERS))
        raise Unavailable(f"pre-tokeniser {pre!r} is not known; known: {known}", "tokenizer.ggml.pre")
    tokens, kinds = _need(meta, "tokenizer.ggml.tokens"), _need(meta, "tokenizer.ggml.token_type")
    if odd := set(kinds) - {NORMAL, CONTROL, USER_DEFINED}:
        raise Unavailable(f"tokens of type {min(odd)} are not known", "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _need(meta, "tokenizer.ggml.merges")]
    tokeniser = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokeniser.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokeniser.decoder = decoders.ByteLevel()
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind != NORMAL]
    tokeniser.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in added if k == CONTROL])
    tokeniser.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in added if k == USER_DEFINED])
    tokeniser.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[_need(meta, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[_need(meta, "tokenizer.ggml.eos_token_id")],
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "model_max_length": _need(meta, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    if template := meta.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", settings)


def packaged(name: str) -> Path:
    """The one GGUF file inside the installed package `name`, which is not imported. Raises NotFound."""
    spec = importlib.util.find_spec(name)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    found = [path for folder in folders for path in sorted(Path(folder).glob("**/*.gguf"))]
    if len(found) != 1:
        raise NotFound(f"the package {name!r} is not installed or holds {len(found)} GGUF files, not one", "source")
    return found[0]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("hexrt.llm.convert", description="Turn a GGUF file into a model folder.")
    parser.add_argument("source", help="a GGUF file, or package:NAME for the one inside an installed package")
    parser.add_argument("target", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    given = parser.parse_args(arguments)
    try:
        kind, _, name = given.source.partition(":")
        source = packaged(name) if kind == "package" else Path(given.source)
        made = convert_gguf(source, given.target, given.dtype)
    except HexrtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{given.target}: {'converted' if made else 'already there, verified'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
