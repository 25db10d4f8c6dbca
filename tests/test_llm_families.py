"""Models of each family, tiny and seeded, over pages: logits as eager attention has them, greedy tokens as generate's, or a refusal by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hexrt.devices.places import anonymous  # noqa: E402
from hexrt.errors import Unavailable  # noqa: E402
from hexrt.llm.engine_model import PagedModel  # noqa: E402
from hexrt.llm.engine_pass import GREEDY, Row  # noqa: E402
from tests.llm_families import FAMILIES, SIZES, WINDOW, make, tiny, write_gguf  # noqa: E402

torch.set_num_threads(1)  # more would only wait for one another

PROMPT = [1, *range(5, 41)]
FRAMES = np.array([9, 2, 7, 0, 5], np.int32)
EXPERTS = ("gpt_oss", "qwen3_moe")


def load(folder: Path, dtype: str = "float32", **more: Any) -> PagedModel:
    return PagedModel("tiny", folder, dtype, memoryview(anonymous(4 << 20)), 16, **more)


def eager(folder: Path, dtype: str = "float32") -> Any:
    """The model by itself, as transformers loads it."""
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager").eval()


def pass_of(model: PagedModel, ids: Sequence[int], start: int) -> Any:
    return model.run_over([Row(ids, FRAMES, start, GREEDY)], model.arena)[0][-1].clone()


def answer(model: PagedModel, prompt: Sequence[int], count: int, cut: int) -> tuple[list[int], Any]:
    """Greedy tokens and the logits they were drawn from; the prompt is read in two slices, the second from `cut` on."""
    logits = []
    if cut:
        pass_of(model, prompt[:cut], 0)
    ids, done = list(prompt), cut
    for _ in range(count):
        logits.append(pass_of(model, ids[done:], done))
        done = len(ids)
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], torch.stack(logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_with_the_logits_of_eager_attention_and_the_tokens_of_generate(tmp_path: Path, family: str) -> None:  # fmt: skip
    folder = make(tmp_path / "tiny", family)
    model, alone = load(folder), eager(folder)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        out = alone.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, min_new_tokens=20, do_sample=False, eos_token_id=None)  # fmt: skip
        expected = alone(out[:, :-1], use_cache=False).logits[0, len(PROMPT) - 1 :].float()
    tokens = out[0][len(PROMPT) :].tolist()
    assert len(set(tokens)) > 2, "a model that always says the same proves nothing"
    for cut in (0, 17):
        found, logits = answer(model, PROMPT, 20, cut)
        assert found == tokens
        assert float((logits - expected).abs().max()) < 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in EXPERTS])
def test_in_bfloat16_the_distribution_is_that_of_eager_attention(tmp_path: Path, family: str) -> None:
    folder = make(tmp_path / "tiny", family)
    model, alone = load(folder, "bfloat16"), eager(folder, "bfloat16")
    found, logits = answer(model, PROMPT, 8, 17)
    with torch.inference_mode():
        expected = alone(torch.tensor([[*PROMPT, *found[:-1]]]), use_cache=False).logits[0, len(PROMPT) - 1 :].float()
    likely = torch.log_softmax(expected, -1)
    off = (likely.exp() * (likely - torch.log_softmax(logits, -1))).sum(-1)
    assert float(off.max()) < 0.05


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_served_in_bfloat16_though_a_rounding_may_choose_another(tmp_path: Path, family: str) -> None:
    assert load(make(tmp_path / "tiny", family), "bfloat16").arena.dtype == torch.bfloat16


def test_pages_of_sixteen_bits_under_a_float32_model_are_probed_by_its_distribution(tmp_path: Path) -> None:
    model = load(make(tmp_path / "tiny", "llama"), kv_dtype="bfloat16")
    assert (model.arena.dtype, model.page_bytes) == (torch.bfloat16, 8192)


def test_windows_caps_and_sinks_change_what_is_said(tmp_path: Path) -> None:
    """What the families above are there to prove is not a matter of no consequence at these sizes."""
    folder = make(tmp_path / "a", "gemma2")
    config = json.loads((folder / "config.json").read_text())
    tokens = answer(load(folder), PROMPT, 8, 0)[0]
    for change in ({"sliding_window": 128}, {"attn_logit_softcapping": 1.0}):
        (folder / "config.json").write_text(json.dumps(config | change))
        assert answer(load(folder), PROMPT, 8, 0)[0] != tokens, change
    assert WINDOW < len(PROMPT)


def test_a_gguf_file_is_served_as_the_folder_is_that_it_was_made_of(tmp_path: Path) -> None:
    folder = make(tmp_path / "tiny", "qwen3")
    path = write_gguf(tmp_path / "tiny.gguf", tiny("qwen3"), "qwen3")
    found, other = load(path), load(folder)
    assert torch.equal(answer(found, PROMPT, 4, 0)[1], answer(other, PROMPT, 4, 0)[1])
    assert (found.eos, found.page_bytes, found.shape) == (other.eos, other.page_bytes, other.shape)


# --- refused ------------------------------------------------------------------------------------------------------


def save(folder: Path, family: str, **more: Any) -> Path:
    """A model of a family that is not among those that are served."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**more)
    kind = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}ForConditionalGeneration")  # fmt: skip
    kind(config).save_pretrained(folder)
    return folder


SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
UNSERVED: dict[str, tuple[dict[str, Any], str]] = {
    "T5": ({"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}, "no usable|encoder-decoder"),
    "Bart": (
        {"vocab_size": 97, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64},
        "no usable|encoder-decoder",
    ),
    "Mamba": ({"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "no usable"),
    "Bloom": (SMALL | {"n_head": 4, "n_layer": 2}, "no usable|attention cannot be replaced"),
    "FalconH1": (
        SIZES | {"num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8},
        "FalconH1ForCausalLM keeps a state of its own beside K and V",
    ),
    "Lfm2": (
        {key: value for key, value in SIZES.items() if key != "head_dim"} | {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        "layers of the kind 'conv', which pages do not do",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", UNSERVED)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of libraries that some of these models would like to have
def test_what_is_no_plain_decoder_is_refused_by_name(tmp_path: Path, family: str) -> None:
    more, words = UNSERVED[family]
    folder = save(tmp_path / "tiny", family, **more)
    with pytest.raises(Unavailable, match=f"'tiny' cannot be .*({words})|config.json.*({words})") as caught:
        load(folder)
    assert str(tmp_path) not in str(caught.value)
