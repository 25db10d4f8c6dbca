"""Model folders that are broken, lie or are of another kind: each is refused by name, takes no memory for its lies, and the host goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hexrt.brain.models import LoadedModel  # noqa: E402
from hexrt.errors import Unavailable  # noqa: E402
from hexrt.llm.engine_load import load_weights, read_shape  # noqa: E402
from hexrt.llm.model_files import about_parameters, weight_files  # noqa: E402
from hexrt.llm.tokenise import load_vocabulary, tokenise  # noqa: E402
from hexrt.protocol.host import HostFailed, HostFinished, LoadModel  # noqa: E402
from tests.llm_families import make, save_tokeniser, tiny, write_gguf  # noqa: E402
from tests.llm_support import HostProcess  # noqa: E402

torch.set_num_threads(1)  # more would only wait for one another


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "tiny", "llama")


def config(folder: Path, **more: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def shard(folder: Path) -> None:
    """Two shards and their index."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    where = {name: f"model-{1 + (at >= len(names) // 2)}.safetensors" for at, name in enumerate(names)}
    for file in set(where.values()):
        save_file({n: v for n, v in weights.items() if where[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-2.safetensors").unlink()


def cut(folder: Path, keep: float) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: int(keep * len(data))])


def outside(folder: Path) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    (folder / "model-2.safetensors").rename(folder.parent / "model-2.safetensors")
    index.write_text(index.read_text().replace("model-2", "../model-2"))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def header(folder: Path, size: int) -> None:
    (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + b"{" + bytes(100))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (missing_shard, "'model-2.safetensors' is missing, which its index names"),
    "index outside": (outside, "names a file outside of its folder"),
    "index garbage": (lambda f: (f / "model.safetensors.index.json").write_text("[1"), "cannot be loaded"),
    "truncated": (lambda f: cut(f, 0.7), "cannot be loaded"),
    "truncated header": (lambda f: cut(f, 0.01), "cannot be loaded"),
    "huge header": (lambda f: header(f, 1 << 62), "cannot be loaded"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "cannot be loaded"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "its folder holds no safetensors"),
    "pickled": (pickled, r"its weights are pickled \(pytorch_model.bin\), which is never read"),
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "it is an adapter"),
    "quantised": (lambda f: config(f, quantization_config={"quant_method": "gptq"}), "quantised by 'gptq'"),
    "own code": (lambda f: config(f, model_type="mine", auto_map={"AutoModelForCausalLM": "mine.M"}), "needs code of its own"),
    "unknown": (lambda f: config(f, model_type="mine"), "'mine' is not one that transformers knows"),
    "no type": (lambda f: config(f, model_type=None), "None is not one that transformers knows"),
    "encoder": (lambda f: config(f, is_encoder_decoder=True), "it is an encoder-decoder"),
    "layers": (lambda f: config(f, num_hidden_layers=1 << 30), "speaks of about"),
    "one layer more": (lambda f: config(f, num_hidden_layers=5), "9 weights are missing or of another shape"),
    "width": (lambda f: config(f, intermediate_size=1 << 40), "speaks of about"),
    "vocabulary": (lambda f: config(f, vocab_size=330), "weights are missing or of another shape"),
    "heads": (lambda f: config(f, num_attention_heads=8), "weights are missing or of another shape"),
    "KV heads": (lambda f: config(f, num_key_value_heads=4), "weights are missing or of another shape"),
    "activation": (lambda f: config(f, hidden_act="nothing"), "its config has a value that transformers does not know: 'nothing'"),
    "rope": (lambda f: config(f, rope_parameters={"rope_type": "none", "rope_theta": 1e4}), "that transformers does not know: 'none'"),
    "words": (lambda f: config(f, rope_parameters="x"), "field 'rope_parameters': TypeError: Field 'rope_parameters' with value 'x'"),
    "end": (lambda f: config(f, eos_token_id="x"), "field 'eos_token_id': TypeError: Field 'eos_token_id' with value 'x' doesn't match"),
    "epsilon": (lambda f: config(f, rms_norm_eps="x"), r"field 'rms_norm_eps': TypeError: .* expected float, got str"),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_weights_that_cannot_be_used_are_refused_by_the_models_name(folder: Path, how: str) -> None:
    damage, words = BROKEN[how]
    damage(folder)
    with pytest.raises(Unavailable, match=f"'tiny' cannot be loaded: .*{words}|'tiny' {words}") as caught:
        load_weights("tiny", folder, "float32")
    assert str(folder.parent) not in str(caught.value)
    assert "\n" not in caught.value.message


def test_weights_in_shards_are_those_of_one_file(folder: Path) -> None:
    whole = load_weights("tiny", folder, "float32").state_dict()
    shard(folder)
    assert [file.name for file in weight_files(folder)] == ["model-1.safetensors", "model-2.safetensors"]
    parts = load_weights("tiny", folder, "float32").state_dict()
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "config.json of the model 'tiny' cannot be read"),
        ("{", "config.json of the model 'tiny' cannot be read"),
        ('{"a": ' * 5000, "config.json of the model 'tiny' cannot be read"),
        ("{}", "no usable 'num_attention_heads'"),
        ('{"num_attention_heads": -1}', "no usable 'num_attention_heads'"),
    ],
)
def test_a_config_that_says_nothing_is_refused_by_name(folder: Path, content: str, words: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(Unavailable, match=words):
        read_shape("tiny", folder)


def test_a_pipe_is_refused_by_name_and_nobody_waits_for_it(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(Unavailable, match=r"config.json of the model 'tiny' cannot be read"):
        read_shape("tiny", folder)


def test_links_that_lead_nowhere_are_refused_by_name(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(Unavailable, match="'tiny'"):
        read_shape("tiny", loop)
    with pytest.raises(Unavailable, match="'tiny'"):
        load_vocabulary(loop, "tiny")
    folder = make(tmp_path / "tiny", "llama")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(Unavailable, match="'tiny' cannot be loaded"):
        load_weights("tiny", folder, "float32")


def test_the_number_of_weights_is_guessed_from_the_shape(folder: Path) -> None:
    exact = sum(parameter.numel() for parameter in tiny("llama").parameters())
    assert abs(about_parameters(json.loads((folder / "config.json").read_text())) - exact) < 0.3 * exact
    assert about_parameters({"hidden_size": 4}) == 0


def test_a_tokeniser_without_a_chat_template_still_takes_a_raw_prompt(folder: Path) -> None:
    save_tokeniser(folder, None)
    vocabulary = load_vocabulary(folder, "tiny")
    with pytest.raises(Unavailable, match="'tiny' has no chat template: set `raw`"):
        tokenise(vocabulary, "tiny", False, {"prompt": "the"})
    assert tokenise(vocabulary, "tiny", True, {"prompt": "the"})


def test_a_chat_template_that_cannot_be_parsed_is_refused_by_name_and_line(folder: Path) -> None:
    save_tokeniser(folder, "{% set a = 1 %}\n{% nonsense %}")
    with pytest.raises(Unavailable, match=r"'tiny' cannot be used: its chat template has a syntax error in line 2: .*'nonsense'") as caught:  # fmt: skip
        load_vocabulary(folder, "tiny")
    assert caught.value.where == "params.model"


# --- in a host ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def host(models: Path) -> Iterator[HostProcess]:
    process = HostProcess(models, 4 << 20)
    yield process
    process.close()


def test_a_host_refuses_broken_models_by_name_and_serves_the_next(host: HostProcess, models: Path) -> None:
    good = make(models / "good", "llama")
    broken = []
    for how in ("truncated", "missing shard", "pickled", "width"):
        BROKEN[how][0](make(models / how, "llama"))
        broken.append(how)
    (models / "bad.gguf").write_bytes(b"GGUF" + os.urandom(64))
    for name, size in (("words", 10**10), ("more words", 10**14)):
        config(make(models / name, "llama"), vocab_size=size)
        broken.append(name)
    os.mkfifo(models / "pipe.gguf")
    (models / "no tokeniser").mkdir()
    for file in ("config.json", "model.safetensors"):
        os.link(good / file, models / "no tokeniser" / file)
    for path in (*broken, "bad.gguf", "pipe.gguf", "no tokeniser", "nowhere"):
        report = host.ask(LoadModel(host.command(), "tiny", path, "float32", 16))
        assert isinstance(report, HostFailed), path
        assert report.error.kind == "unavailable" and "'tiny'" in report.error.message
        assert str(models) not in report.error.message
    assert host.load("good", "good")["context_tokens"] == 128


def test_what_a_host_says_of_a_model_tells_what_it_is_and_what_it_takes(host: HostProcess, models: Path) -> None:
    import msgspec

    make(models / "tiny", "qwen3")
    write_gguf(models / "tiny.gguf", tiny("qwen3"), "qwen3")
    found = []
    for path, dtype in (("tiny", "float32"), ("tiny", "bfloat16"), ("tiny.gguf", "float32")):
        report = host.ask(LoadModel(host.command(), "tiny", path, dtype, 16))
        assert isinstance(report, HostFinished), report
        found.append(msgspec.msgpack.decode(report.output, type=LoadedModel))
    exact, fast, file = found
    parameters = sum(parameter.numel() for parameter in tiny("qwen3").parameters())
    assert exact.facts["parameters"] == fast.facts["parameters"] == file.facts["parameters"] == parameters
    assert 4 * parameters <= exact.weight_bytes < 4 * parameters * 1.3
    assert 2 * parameters <= fast.weight_bytes < 4 * parameters
    assert len({exact.digest, fast.digest, file.digest}) == 3
    assert (exact.context_tokens, exact.page_bytes, fast.page_bytes) == (128, 16384, 8192)
    assert (exact.facts["architecture"], exact.facts["dtype"], exact.facts["weights"]) == ("Qwen3ForCausalLM", "float32", "as_dtype")  # fmt: skip
    assert {"attention", "levers", "kv_dtype", "threads"} <= exact.facts.keys()
