"""Tiny models of each family with seeded weights, as folders and as GGUF files, and llama.cpp as the judge of the latter.

A family is made of its own transformers classes. Its GGUF file is written as llama.cpp's converter would: Llama's Q and K rows in interleaved
pairs, Gemma's norms with one added. `judge` asks llama.cpp, in a child process, for tokens and greedy answers of a file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hexrt.llm.gguf_tokeniser import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NEAR, WIDE = "sliding_attention", "full_attention"
WINDOW = 12
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "layer_types": [NEAR, NEAR, WIDE, NEAR], "attn_logit_softcapping": None},
    ),
    "phi3": ("Phi3", {}),
    "gpt_oss": (
        "GptOss",
        {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}),
}  # fmt: skip
"""By name: the classes' prefix and what its config says beside SIZES. Windows are far shorter than the prompts of tests."""

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROLS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary, by byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    plain = [b for b in range(256) if (chr(b).isprintable() and not chr(b).isspace() and b < 127) or b in range(161, 173) or b in range(174, 256)]  # fmt: skip
    letters = {b: chr(b) for b in plain}
    letters |= {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in plain)}
    assert set(letters.values()) == set(ByteLevel.alphabet())
    return [letters[b] for b in range(256)]


PAIRS = (
    "t h",
    "th e",
    "i n",
    "Ġ t",
    "Ġt h",
    "Ġth e",
    "a n",
    "an d",
    "Ġ a",
    "Ġ Ġ",
    "ĠĠ ĠĠ",
    "1 2",
    "12 3",
    "l l",
    "' ll",
    "o r",
)
PAIRS += ("w or", "wor l", "worl d", "Ġ world", "Ċ Ċ", "e r", "r e", "ã ģ", "Ã ¤")  # fmt: skip


def byte_level_tokens() -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and types of a byte-level vocabulary of VOCABULARY tokens."""
    tokens = [*CONTROLS, *byte_letters(), *(pair.replace(" ", "") for pair in PAIRS)]
    types = [CONTROL] * len(CONTROLS) + [NORMAL] * (len(tokens) - len(CONTROLS))
    spare = [f"<spare{n}>" for n in range(VOCABULARY - len(tokens))]
    return tokens + spare, list(PAIRS), types + [CONTROL] * len(spare)


PIECES = (
    "the", "and", "in", "world", "wor", "ld", "th", "he", "an", "nd", "or", "wo", "ll", "er", "re", "12", "123", "▁the",
    "▁th", "▁t", "▁a", "▁and", "▁an", "▁world", "▁wor", "▁w", "▁wo", "▁▁", "▁▁▁▁",
)  # fmt: skip


def sentence_piece_tokens() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a SentencePiece vocabulary of VOCABULARY tokens."""
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyz", "1", "2", "3", "é", "日"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    pieces = [*PIECES, *letters][: VOCABULARY - len(tokens)]
    scores = [0.0] * len(tokens) + [-float(n) for n in range(len(pieces))]
    return tokens + pieces, scores, types + [NORMAL] * len(pieces)


def save_tokeniser(folder: Path, template: str | None = TEMPLATE) -> None:
    """tokenizer.json and tokenizer_config.json of the byte-level vocabulary, made by the library from its parts."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, merges, types = byte_level_tokens()
    model = models.BPE(vocab={t: n for n, t in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in merges])  # type: ignore[misc]
    tokeniser = Tokenizer(model)
    tokeniser.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokeniser.decoder = decoders.ByteLevel()
    tokeniser.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == CONTROL])  # fmt: skip
    tokeniser.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def tiny(family: str, **more: Any) -> Any:
    """The model of a family, in float32, with seeded weights that do not make all tokens tie."""
    import torch
    import transformers

    prefix, own = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(transformers, f"{prefix}Config")(**(SIZES | own | more))
    model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(parameter, std=0.02 if "embed" in name and prefix.startswith("Gemma") else 0.25)
        else:  # norms, as they are written: about one, or for Gemma about nothing
            parameter.data += 0.2 * torch.randn(parameter.shape)
    return model.eval()


def make(folder: Path, family: str, **more: Any) -> Path:
    """The model's folder, with a tokeniser."""
    tiny(family, **more).save_pretrained(folder)
    save_tokeniser(folder)
    return folder


# --- as GGUF ------------------------------------------------------------------------------------------------------

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3"}  # fmt: skip


def write_gguf(path: Path, model: Any, family: str, pre: str = "gpt-2", vocabulary: str = "gpt2", add_bos: bool | None = None) -> Path:  # fmt: skip
    """`model` in float32 as llama.cpp's converter writes it. `vocabulary`: gpt2 or llama."""
    import gguf

    from hexrt.llm.gguf_weights import PLUS_ONE, tensor_names

    architecture, config = ARCHITECTURES[family], model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if architecture in PLUS_ONE:
        writer.add_sliding_window(config.sliding_window)
    else:
        writer.add_rope_freq_base(10000.0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "gemma3":
        writer.add_rope_freq_base(1e6)
    _write_vocabulary(writer, pre, vocabulary, add_bos)
    weights = model.state_dict()
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    for place, name in tensor_names(architecture, config.num_hidden_layers, weights).items():
        writer.add_tensor(place, _converted(weights[name], name, architecture, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(values: Any, name: str, architecture: str, config: Any) -> Any:
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if name.endswith("q_proj.weight") else config.num_key_value_heads
        return values.reshape(heads, 2, -1, values.shape[1]).transpose(1, 2).reshape(values.shape).contiguous()
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    return values


def _write_vocabulary(writer: Any, pre: str, vocabulary: str, add_bos: bool | None) -> None:
    writer.add_tokenizer_model(vocabulary)
    if vocabulary == "gpt2":
        tokens, merges, types = byte_level_tokens()
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
    else:
        tokens, scores, types = sentence_piece_tokens()
        writer.add_token_scores(scores)
        writer.add_unk_token_id(0)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)


def judge(path: Path, texts: Sequence[str] = (), prompt: Sequence[int] = (), answer: int = 0) -> dict[str, Any]:
    """What llama.cpp says of the file: `ids` of each text, and the greedy `answer` to the ids of `prompt`. Skips where it is not installed."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    asked = json.dumps({"texts": list(texts), "prompt": list(prompt), "answer": answer})
    done = subprocess.run(
        [sys.executable, "-m", "tests.llm_families", str(path)], input=asked, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def _serve_once(path: str) -> None:
    import urllib.request

    import xllamacpp

    def ask(what: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{server.listening_address}/{what}", json.dumps(body).encode(), {"Content-Type": "application/json"})  # fmt: skip
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    asked = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = 128, 1, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    ids = [ask("tokenize", {"content": t, "add_special": True, "parse_special": True})["tokens"] for t in asked["texts"]]  # fmt: skip
    answer = []
    if asked["answer"]:
        body = {"prompt": asked["prompt"], "n_predict": asked["answer"], "temperature": 0, "ignore_eos": True, "return_tokens": True, "cache_prompt": False}  # fmt: skip
        answer = ask("completion", body)["tokens"]
    print(json.dumps({"ids": ids, "answer": answer}))


if __name__ == "__main__":
    _serve_once(sys.argv[1])
