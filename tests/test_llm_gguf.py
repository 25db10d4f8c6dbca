"""GGUF files served as they are: weights and tokens as llama.cpp has them, and headers that lie refused before anything is taken for them."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from hexrt.config import Model  # noqa: E402
from hexrt.devices.body import Bodies  # noqa: E402
from hexrt.errors import Unavailable  # noqa: E402
from hexrt.llm.engine_load import end_tokens, load_weights, read_shape  # noqa: E402
from hexrt.llm.gguf_folder import folder_of  # noqa: E402
from hexrt.llm.gguf_header import GgufFault, read_header, read_shape_meta  # noqa: E402
from hexrt.llm.model_files import find_models, model_digest  # noqa: E402
from hexrt.llm.tokenise import load_vocabulary  # noqa: E402
from hexrt.ops.llm import OPS  # noqa: E402
from hexrt.protocol.host import VERSION, Hello, Launch  # noqa: E402
from hexrt.runtime.arenas import model_source  # noqa: E402
from tests.llm_families import NEAR, WIDE, judge, make, tiny, write_gguf  # noqa: E402

PROMPT = [1, *range(5, 41)]
TEXTS = (
    "hello the world", " the  world\n\n\n  and  12345 3½ cafés", "I'LL we'll THE they've", "日本 ã ä 🙂 é", "a\r\n\r\n b\t\tc  ",
    "<|im_start|>user\nthe<|im_end|> the </s>the", "...!!! ??  end   ", "the\n the \n\n", "", " ", "12 123 1234 a1b22c333",
    "x'th 'the", "_the__world--and",
)  # fmt: skip
torch.set_num_threads(1)  # more would only wait for one another

OWN: dict[str, dict[str, Any]] = {"gemma3": {"num_hidden_layers": 7, "layer_types": [NEAR] * 5 + [WIDE, NEAR]}}
"""What the format cannot say of a model is as llama.cpp takes it to be."""


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_a_file_holds_the_model_that_llama_cpp_takes_it_for(tmp_path: Path, family: str) -> None:
    model = tiny(family, **OWN.get(family, {}))
    model.set_attn_implementation("eager")
    path = write_gguf(tmp_path / "tiny.gguf", model, family)
    loaded = load_weights("tiny", path, "float32")
    loaded.set_attn_implementation("eager")
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        out = loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, min_new_tokens=20, do_sample=False)  # fmt: skip
    answer = out[0][len(PROMPT) :].tolist()
    assert len(set(answer)) > 2, "a model that always says the same proves nothing"
    assert judge(path, (), PROMPT, 20)["answer"] == answer
    assert end_tokens(loaded) == {2}


@pytest.mark.parametrize(
    ("vocabulary", "pre", "add_bos"),
    [
        ("gpt2", "gpt-2", None), ("gpt2", "smollm", True), ("gpt2", "llama-bpe", True), ("gpt2", "qwen2", False),
        ("llama", "", None), ("llama", "", False),
    ],
)  # fmt: skip
def test_its_tokeniser_gives_the_tokens_of_llama_cpp(tmp_path: Path, vocabulary: str, pre: str, add_bos: bool | None) -> None:  # fmt: skip
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama", num_hidden_layers=1), "llama", pre, vocabulary, add_bos)
    tokeniser = load_vocabulary(folder_of(path, "tiny", tmp_path / "state"), "tiny").tokeniser
    assert [tokeniser.encode(text).ids for text in TEXTS] == judge(path, TEXTS)["ids"]
    for text in TEXTS:
        back = tokeniser.decode(tokeniser.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        assert back.replace("> the </s> the", "> the </s>the") == text, (
            "SentencePiece puts a space after a control token"
        )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny("llama", num_hidden_layers=1), "llama")


def test_the_folder_that_stands_for_a_file_is_made_once_and_again_for_a_changed_file(source: Path, tmp_path: Path) -> None:  # fmt: skip
    path, state = tmp_path / "a.gguf", tmp_path / "state"
    path.write_bytes(source.read_bytes())
    folder = folder_of(path, "a", state)
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    made = (folder / "config.json").stat().st_ino
    assert folder_of(path, "a", state) == folder and (folder / "config.json").stat().st_ino == made
    assert load_vocabulary(folder, "a").template is not None
    os.utime(path, ns=(1, 1))
    again = folder_of(path, "a", state)
    assert again != folder
    assert list((state / "gguf").iterdir()) == [again], "the old one is gone, and nothing temporary stays"
    assert folder_of(tmp_path, "a", state) == tmp_path, "a folder stands for itself"


def test_a_pool_worker_makes_the_tokens_of_a_file(source: Path, tmp_path: Path) -> None:
    models = {"tiny": {"path": str(source), "is_exact": True}}
    hello = Hello(VERSION, 1, "pool:0", str(tmp_path), "/nowhere", {"models": models})
    inputs, params = ({"prompt": "the world"}, {"max_tokens": 3})
    launch = Launch(1, 1, "llm.generate", 0, b"r", "ask", 0, 10.0, *(msgspec.Raw(msgspec.msgpack.encode(v)) for v in (params, inputs)))  # fmt: skip
    output = msgspec.msgpack.decode(Bodies({op.name: op for op in OPS}, hello, 1 << 20).run(launch))
    tokeniser = load_vocabulary(folder_of(source, "tiny", tmp_path), "tiny").tokeniser
    text = tokeniser.decode(output["ids"], skip_special_tokens=False)
    assert text == "<|im_start|>user\nthe world<|im_end|>\n<|im_start|>assistant\n"


def test_the_daemon_knows_pages_context_and_weights_from_the_beginning_of_the_file(source: Path) -> None:
    found = model_source(str(source), Model(str(source), dtype="bfloat16"))
    assert (found.page_bytes, found.context_tokens) == (4096, 128)
    parameters = sum(p.numel() for p in tiny("llama", num_hidden_layers=1).parameters())
    assert abs(found.weight_bytes / 2 - parameters) < 0.4 * parameters
    whole = read_header(source)
    assert read_shape_meta(source)["tokenizer.ggml.tokens"] == len(whole.meta["tokenizer.ggml.tokens"]) == 320
    assert read_shape("tiny", source).vocabulary == 320


def test_models_are_found_by_their_files(source: Path, tmp_path: Path) -> None:
    make(tmp_path / "b", "llama", num_hidden_layers=1)
    sharded = make(tmp_path / "c", "llama", num_hidden_layers=1)
    (sharded / "model.safetensors").rename(sharded / "model-1.safetensors")
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model-1.safetensors"}}))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).symlink_to(source)
    (tmp_path / "d").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone.gguf").symlink_to("nowhere")
    found = {name: path.name for name, path in find_models(tmp_path).items()}
    assert found == {"a": "a.gguf", "b": "b", "c": "c"}
    assert find_models(tmp_path / "nowhere") == {}


def test_a_digest_changes_with_what_makes_other_keys_and_values(source: Path, tmp_path: Path) -> None:
    folder = make(tmp_path / "b", "llama", num_hidden_layers=1)
    digests = {model_digest(folder, "float32", "as_dtype"), model_digest(folder, "bfloat16", "as_dtype"), model_digest(source)}  # fmt: skip
    assert len(digests) == 3
    assert model_digest(folder, "float32", "as_dtype") in digests
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert model_digest(folder, "float32", "as_dtype") not in digests


# --- lies ---------------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def build(*parts: bytes, tensors: int = 0, entries: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    """A file of these parts, with 4 KiB behind them."""
    return magic + struct.pack("<IQQ", version, tensors, entries) + b"".join(parts) + bytes(4096)


ARCHITECTURE = entry("general.architecture", 8, text("llama"))
LIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "it is empty"),
    "short": (b"GGUF\3\0", "goes past the end"),
    "other": (build(magic=b"PK\3\4"), "does not begin with GGUF"),
    "old": (build(version=1), "of version 1"),
    "big-endian": (build(version=3 << 24), "of version 50331648"),
    "tensors": (build(tensors=1 << 60), "claims 1152921504606846976 tensors"),
    "many tensors": (build(tensors=1 << 16), "65536 tensors of 1572864 bytes at 24 goes past the end"),
    "entries": (build(entries=1 << 63), "claims 9223372036854775808 entries"),
    "string": (build(struct.pack("<Q", 1 << 63), entries=1), "a text of 9223372036854775808 bytes"),
    "utf-8": (build(struct.pack("<Q", 2) + b"\xff\xfe", entries=1), "is not UTF-8"),
    "type": (build(entry("a", 99, b""), entries=1), "of the unknown type 99"),
    "array": (build(entry("a", 9, struct.pack("<IQ", 4, 1 << 61)), entries=1), "has 2305843009213693952 elements"),
    "long array": (build(entry("a", 9, struct.pack("<IQ", 4, 1 << 20)), entries=1), "an array of 4194304 bytes"),
    "array of strings": (build(entry("a", 9, struct.pack("<IQ", 8, 1 << 20)), entries=1), "an array of 8388608 bytes"),
    "array of arrays": (build(entry("a", 9, struct.pack("<IQ", 9, 1)), entries=1), "the array at .* unknown type 9"),
    "twice": (build(ARCHITECTURE, ARCHITECTURE, entries=2), "'general.architecture' is there twice"),
    "alignment": (build(entry("general.alignment", 4, struct.pack("<I", 0)), entries=1), "alignment of 0"),
    "dimensions": (build(tensor("x", (1,) * 9), tensors=1), "has 9 dimensions"),
    "no elements": (build(tensor("x", (0,)), tensors=1), "does not divide"),
    "overflow": (build(tensor("x", (1 << 63, 1 << 63)), tensors=1), "goes past the end"),
    "offset": (build(tensor("x", (4,), offset=1 << 62), tensors=1), "goes past the end"),
    "odd offset": (build(tensor("x", (4,), offset=5), tensors=1), "no multiple of 32"),
    "kind": (build(tensor("x", (4,), kind=77), tensors=1), "of the unknown type 77"),
    "blocks": (build(tensor("x", (33,), kind=3), tensors=1), "does not divide into blocks of 32"),
    "same tensor": (build(tensor("x", (4,)), tensor("x", (4,)), tensors=2), "'x' is there twice"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_without_memory_for_what_it_claims(tmp_path: Path, lie: str) -> None:
    data, words = LIES[lie]
    path = tmp_path / "tiny.gguf"
    path.write_bytes(data)
    import gguf.constants  # noqa: F401  # not in what is measured

    tracemalloc.start()
    with pytest.raises(GgufFault, match=words) as caught:
        read_header(path)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 1 << 20
    assert str(tmp_path) not in str(caught.value)


def load_fails(path: Path, state: Path) -> list[str]:
    """What each way to the model says: its shape, its vocabulary and its weights. Each refuses it by name."""
    ways: list[Callable[[], Any]] = [
        lambda: read_shape("tiny", path), lambda: folder_of(path, "tiny", state), lambda: load_weights("tiny", path, "float32"),
    ]  # fmt: skip
    said = []
    for way in ways:
        with pytest.raises(Unavailable, match="'tiny'") as caught:
            way()
        said.append(str(caught.value))
        assert str(path.parent) not in said[-1]
    return said


def test_a_model_that_is_no_gguf_file_is_refused_by_name_wherever_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    assert all("is missing" in s or "does not exist" in s or "No such file" in s for s in load_fails(path, tmp_path))
    path.write_bytes(build(tensors=1 << 60))
    assert all("claims 1152921504606846976 tensors" in said for said in load_fails(path, tmp_path))
    assert model_source(str(path), Model("tiny.gguf")).page_bytes == 0
    path.unlink()
    path.symlink_to(path)
    load_fails(path, tmp_path)
    path.unlink()
    path.mkdir()
    load_fails(path, tmp_path)
    assert not (tmp_path / "gguf").exists() or not list((tmp_path / "gguf").iterdir())


@pytest.mark.parametrize(
    ("keep", "words"), [(0.5, "goes past the end"), (0.98, "goes past the end"), (100, "past the end")]
)
def test_a_file_that_breaks_off_is_refused(source: Path, tmp_path: Path, keep: float, words: str) -> None:
    data = source.read_bytes()
    path = tmp_path / "tiny.gguf"
    path.write_bytes(data[: int(keep * len(data)) if keep < 1 else int(keep)])
    with pytest.raises(Unavailable, match=f"'tiny'.*{words}"):
        load_weights("tiny", path, "float32")


def altered(source: Path, target: Path, old: bytes, new: bytes) -> Path:
    data = source.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    target.write_bytes(data.replace(old, new))
    return target


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.attention.head_count", 0, "no usable llama.attention.head_count: 0"),
        ("llama.attention.head_count", 3, "3 query and 2 KV heads do not divide"),
        ("llama.attention.head_count", 8, "2 weights are missing or of another shape, among them 'model.layers.0.self_attn.o"),
        ("llama.attention.head_count_kv", 1, "2 weights are missing or of another shape"),
        ("llama.block_count", 2, "weights are missing"),
        ("llama.embedding_length", 32, "weights are missing or of another shape"),
        ("llama.feed_forward_length", 1 << 30, "speaks of about 206158\\d+ weights, and its files hold at most"),
        ("llama.block_count", 1 << 30, "speaks of about"),
        ("tokenizer.ggml.eos_token_id", 5000, "cannot be loaded"),
    ],
)  # fmt: skip
def test_a_config_that_lies_about_the_weights_is_refused(source: Path, tmp_path: Path, key: str, value: int, words: str) -> None:  # fmt: skip
    meta = read_header(source).meta
    head = text(key) + struct.pack("<I", 4)
    path = altered(source, tmp_path / "tiny.gguf", head + struct.pack("<I", meta[key]), head + struct.pack("<I", value))
    if key.startswith("tokenizer"):
        with pytest.raises(Unavailable, match="'tiny' cannot be loaded: the eos_token_id 5000 is none of 320 tokens"):
            folder_of(path, "tiny", tmp_path / "state")
    else:
        with pytest.raises(Unavailable, match=f"'tiny' cannot be loaded: .*({words})"):
            load_weights("tiny", path, "float32")


def test_an_architecture_or_tokeniser_that_is_not_known_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    path = altered(source, tmp_path / "a.gguf", ARCHITECTURE, ARCHITECTURE.replace(b"llama", b"mamba"))
    with pytest.raises(Unavailable, match="'a' cannot be loaded: architecture 'mamba' is not known; known: gemma2"):
        load_weights("a", path, "float32")
    pre = entry("tokenizer.ggml.pre", 8, text("gpt-2"))
    path = altered(source, tmp_path / "b.gguf", pre, pre.replace(b"gpt-2", b"gpt-9"))
    with pytest.raises(Unavailable, match="'b' cannot be loaded: pre-tokeniser 'gpt-9' is not known"):
        folder_of(path, "b", tmp_path / "state")
    kind = entry("tokenizer.ggml.model", 8, text("gpt2"))
    path = altered(source, tmp_path / "c.gguf", kind, kind.replace(b"gpt2", b"bert"))
    with pytest.raises(Unavailable, match="'c' cannot be loaded: tokeniser 'bert' is not known"):
        folder_of(path, "c", tmp_path / "state")
