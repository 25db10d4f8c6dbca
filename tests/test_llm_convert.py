"""A GGUF file becomes a model folder, whole or not at all, and whatever is not known in it is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")

from hexrt.errors import BadRequest, HexrtError, NotFound, Unavailable  # noqa: E402
from hexrt.llm.convert import (  # noqa: E402
    convert_gguf,
    file_digest,
    is_converted,
    main,
)
from hexrt.llm.gguf_config import model_config  # noqa: E402
from hexrt.llm.gguf_weights import tensor_names, unpermute, weight_names  # noqa: E402
from tests.llm_support import model_folder  # noqa: E402

WIDTH, HEADS, LAYERS, INNER = 32, 4, 2, 48
TOKENS = ["<s>", "</s>", "a", "b", "ab", "\u0120"]


def write_gguf(
    path: Path, leave_out: str = "", also: str = "", architecture: str = "llama", pre: str = "smollm", **extra: Any
) -> None:
    """A tiny Llama of made-up weights; `leave_out` names a tensor that is not written, `also` one more that is."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for key, value in extra.items():
        writer.add_float32(key, value)
    chance = np.random.default_rng(3)
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH // 2, WIDTH),
            "attn_v": (WIDTH // 2, WIDTH), "attn_output": (WIDTH, WIDTH), "ffn_gate": (INNER, WIDTH),
            "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        if name != leave_out:
            writer.add_tensor(f"{name}.weight", chance.standard_normal(shape, dtype=np.float32) * 0.1)
    if also:
        writer.add_tensor(also, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_folder_is_complete_and_made_once(tmp_path: Path) -> None:
    source, target = tmp_path / "tiny.gguf", tmp_path / "models" / "tiny"
    write_gguf(source)
    assert convert_gguf(source, target) is True
    assert convert_gguf(source, target) is False
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json", "conversion.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert [path.name for path in target.parent.iterdir()] == ["tiny"], "nothing temporary stays"
    assert is_converted(target, file_digest(source), "float32")
    assert not is_converted(target, file_digest(source), "bfloat16")


def test_a_folder_that_was_changed_is_made_again(tmp_path: Path) -> None:
    source, target = tmp_path / "tiny.gguf", tmp_path / "tiny"
    write_gguf(source)
    convert_gguf(source, target)
    (target / "config.json").write_text("{}")
    assert convert_gguf(source, target) is True
    assert json.loads((target / "config.json").read_text())["model_type"] == "llama"


def test_query_and_key_rows_go_back_to_half_rotation_order() -> None:
    rows = torch.arange(8)[:, None]  # one head of eight rows
    interleaved = rows.reshape(2, 4, 1).swapaxes(0, 1).reshape(8, 1)  # as GGUF keeps them: 0, 4, 1, 5, ...
    assert interleaved[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert (unpermute(interleaved, 1) == rows).all()
    two = torch.cat([interleaved, interleaved + 8])
    assert (unpermute(two, 2)[:, 0] == torch.arange(16)).all()


def test_the_converted_model_answers_as_it_should_and_tokenises_exactly() -> None:
    from tokenizers import Tokenizer

    tokeniser = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    ids = tokeniser.encode("<|im_start|>user\nIn 1984: 3½ cafés,\n\n  two  spaces<|im_end|>").ids
    assert tokeniser.decode(ids, skip_special_tokens=False).startswith(
        "<|im_start|>user\nIn 1984: 3½ cafés,\n\n  two  sp"
    )
    assert (ids[0], ids[-1]) == (1, 2)
    digits = [tokeniser.id_to_token(i) for i in tokeniser.encode("1984").ids]
    assert digits == ["1", "9", "8", "4"]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"architecture": "mamba"}, Unavailable, "architecture 'mamba' is not known"),
        ({"pre": "other"}, Unavailable, "pre-tokeniser 'other' is not known"),
        ({"llama.rope.scaling.factor": 2.0}, Unavailable, "'llama.rope.scaling.factor' changes the model"),
        ({"leave_out": "blk.1.ffn_up"}, BadRequest, r"1 tensors are missing, among them 'model.layers.1.mlp.up_proj"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], error: type[HexrtError], words: str
) -> None:
    source, target = tmp_path / "tiny.gguf", tmp_path / "out" / "tiny"
    write_gguf(source, **change)
    with pytest.raises(error, match=words):
        convert_gguf(source, target)
    assert not target.exists()
    assert not target.parent.exists() or not list(target.parent.iterdir())


@pytest.mark.parametrize("keep", [0, 3, 40, 500, 0.5, 0.99])
def test_a_file_that_breaks_off_is_refused(tmp_path: Path, keep: float) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source)
    data = source.read_bytes()
    source.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(BadRequest, match=r"'tiny.gguf' is not a readable GGUF file"):
        convert_gguf(source, tmp_path / "tiny")


def test_a_header_that_lies_about_its_counts_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source)
    data = bytearray(source.read_bytes())
    data[8:16] = (2**40).to_bytes(8, "little")
    source.write_bytes(data)
    with pytest.raises(BadRequest, match="not a readable GGUF file"):
        convert_gguf(source, tmp_path / "tiny")


def test_the_command_line_says_what_is_wrong_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "no.gguf"), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "error: source: there is no file 'no.gguf'\n"
    assert main(["package:no_such_package_here", str(tmp_path / "out")]) == 1
    assert "is not installed or holds 0 GGUF files" in capsys.readouterr().err


def test_an_unknown_tensor_or_dtype_is_named(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    for name in ("blk.2.attn_q.weight", "blk.0.attn_q.bias", "rope_freqs.weight", "blk.x.attn_q.weight"):
        write_gguf(source, also=name)
        with pytest.raises(Unavailable, match=f"the tensor '{name}' is not one of this model"):
            convert_gguf(source, tmp_path / "out")
    with pytest.raises(BadRequest, match="'int3' is none of float32"):
        convert_gguf(tmp_path / "a", tmp_path / "b", "int3")
    with pytest.raises(NotFound):
        convert_gguf(tmp_path / "a", tmp_path / "b")


def test_heads_that_do_not_divide_the_width_are_a_fault_of_the_file() -> None:
    meta: dict[str, Any] = {
        "general.architecture": "llama", "llama.embedding_length": 30, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
    }  # fmt: skip
    with pytest.raises(BadRequest, match="4 query and 2 KV heads do not divide a width of 30"):
        model_config(meta, set(), "float32")


def test_a_tied_model_expects_no_head_of_its_own(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    assert config["tie_word_embeddings"]
    whole = weight_names(config | {"tie_word_embeddings": False})
    assert whole.keys() - weight_names(config).keys() == {"lm_head.weight"}
    assert tensor_names("llama", LAYERS, whole)["output.weight"] == "lm_head.weight"
