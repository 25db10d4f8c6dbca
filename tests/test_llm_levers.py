"""What makes a model fast changes nothing that it computes."""

from __future__ import annotations

import copy
import random
from pydoc_data import topics
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor, nn  # noqa: E402

from hexrt.kernels.native import load  # noqa: E402
from hexrt.kernels.quantised import QuantisedEmbedding, QuantisedLinear, memory_bytes, pack, unpack  # noqa: E402
from hexrt.llm.engine_layer import FusedLayer, RmsNorm  # noqa: E402
from hexrt.llm.engine_levers import apply, fuse_layers, norm_weight, pack_embeddings, pack_linears, replace_norms  # noqa: E402
from tests.llm_support import model_folder  # noqa: E402

pytestmark = pytest.mark.timeout(110)

SIZES = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Llama with biases": {"attention_bias": True, "mlp_bias": True}, "Mistral": {"sliding_window": 8}, "Qwen2": {}, "Qwen3": {},
    "Qwen3 tied": {"tie_word_embeddings": True}, "Llama tied": {"tie_word_embeddings": True},
    "Gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 24}, "Gemma3": {"sliding_window": 8, "query_pre_attn_scalar": 24},
}  # fmt: skip
CLASSES = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}


@pytest.fixture(autouse=True)
def kernels() -> None:
    torch.set_num_threads(2)
    if load().library is None:
        pytest.skip(f"no compiled kernels: {load().why}")


def tiny(family: str, dtype: str = "float32", **more: Any) -> Any:
    name = family.split()[0]
    config, kind = CLASSES.get(name, (f"{name}Config", f"{name}ForCausalLM"))
    torch.manual_seed(5)
    sizes = SIZES | FAMILIES.get(family, {}) | more
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    for name, parameter in model.named_parameters():  # norms and biases too say something then
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.0 if name.endswith("bias") or "Gemma" in family else 1.0, 0.2)
    return model.to(getattr(torch, dtype)).eval().requires_grad_(False)


IDS = torch.tensor([[random.Random(1).randrange(3, 160) for _ in range(40)]])


@torch.inference_mode()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(ids, use_cache=False).logits[0].float()


def divergence(expected: Tensor, found: Tensor) -> Tensor:
    one, other = expected.log_softmax(-1), found.log_softmax(-1)
    return (one.exp() * (one - other)).sum(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_the_logits_stay(family: str) -> None:
    model = tiny(family)
    expected = logits(model)
    assert apply(model, "as_dtype", "float32", 2) == ["packed weights", "fused layers", "rms norm"]
    assert all(isinstance(layer, FusedLayer) for layer in model.model.layers)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert (logits(model) - expected).abs().max() < 1e-4
    for count in (1, 5, 9):
        assert (logits(model, IDS[:, :count]) - expected[:count]).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_packed_weights_compute_what_their_numbers_do(family: str, weights: str) -> None:
    """The levers on packed weights against the model as transformers computes it with those weights unpacked."""
    model = tiny(family)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        head = plain.lm_head.weight
        for module in plain.modules():
            if type(module) is nn.Linear and module.weight is not head:
                module.weight.copy_(unpack(pack(module.weight, weights)))
        head.copy_(unpack(pack(head, "int8")))
    expected = logits(plain)
    assert apply(model, weights, "float32", 2) == [weights, "fused layers", "rms norm"]
    for count in (1, 3, 4, 40):
        off = (logits(model, IDS[:, :count]) - expected[:count]).abs().max()
        assert off < (1e-3 if weights == "int4" and count <= 3 else 1e-4)


@pytest.mark.parametrize("family", ["Llama tied", "Qwen3", "Gemma2"])
@pytest.mark.parametrize("weights", ["as_dtype", "int8"])
def test_in_bfloat16_the_answers_are_nearer_to_float32_than_before(family: str, weights: str) -> None:
    exact = logits(tiny(family, "bfloat16").float())
    model = tiny(family, "bfloat16")
    before = divergence(exact, logits(model)).mean()
    apply(model, weights, "bfloat16", 2)
    after = divergence(exact, logits(model)).mean()
    assert after < (before * 1.05 if weights == "as_dtype" else 0.01)


def test_each_lever_alone_keeps_the_logits() -> None:
    model = tiny("Qwen2 tied", tie_word_embeddings=True)
    expected = logits(model)
    for lever in (
        lambda m: pack_linears(m, "float32"),
        lambda m: pack_embeddings(m, "float32", False),
        replace_norms,
        lambda m: fuse_layers(m, "float32"),
    ):
        alone = copy.deepcopy(model)
        assert lever(alone) > 0
        assert (logits(alone) - expected).abs().max() < 1e-4


def test_a_tied_head_shares_its_memory_with_the_embedding() -> None:
    model = tiny("Llama tied")
    apply(model, "int4", "float32", 2)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, QuantisedEmbedding) and isinstance(head, QuantisedLinear)
    assert embedding.panels.data_ptr() == head.panels.data_ptr()
    untied = tiny("Llama")
    apply(untied, "int4", "float32", 2)
    assert type(untied.get_input_embeddings()) is nn.Embedding


def test_packing_frees_what_it_packs() -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True}
    model = tiny("Llama tied", **wide)
    before = memory_bytes(model)
    apply(model, "int4", "float32", 2)
    assert memory_bytes(model) < before * 0.2


def test_the_plain_layer_inside_a_fused_one_computes_the_same_from_the_same_weights() -> None:
    model = tiny("Gemma3")
    apply(model, "int8", "float32", 2)
    fused = logits(model)
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = layer.plain
    assert (logits(model) - fused).abs().max() < 1e-4


def test_generate_with_its_cache_goes_on_as_before() -> None:
    model = tiny("Qwen3 tied")
    more = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    prompts = torch.cat([IDS[:, :9], IDS[:, 9:18]])
    expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), **more)
    apply(model, "as_dtype", "float32", 2)
    assert torch.equal(model.generate(prompts, attention_mask=torch.ones_like(prompts), **more), expected)


def test_a_layer_of_another_kind_keeps_its_own_code_and_gets_packed_linear_layers() -> None:
    model = (
        transformers.GlmForCausalLM(transformers.GlmConfig(**SIZES, attention_bias=True)).eval().requires_grad_(False)
    )
    expected = logits(model)
    assert apply(model, "as_dtype", "float32", 2) == ["packed weights", "rms norm"]
    assert not any(isinstance(layer, FusedLayer) for layer in model.model.layers)
    assert (logits(model) - expected).abs().max() < 1e-4


def test_a_model_that_nothing_is_known_of_stays_as_it_is() -> None:
    model = tiny("Llama", hidden_size=72, intermediate_size=80, head_dim=18, num_key_value_heads=4)
    names = [type(module).__name__ for module in model.modules()]
    assert apply(model, "int4", "float32", 2) == []
    assert [type(module).__name__ for module in model.modules()] == names
    assert apply(tiny("Llama", "float16"), "as_dtype", "float16", 2) == []


def test_a_norm_is_known_by_what_it_computes() -> None:
    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight * 1.01

    assert norm_weight(OddRMSNorm()) is None
    assert norm_weight(nn.LayerNorm(32)) is None
    found = norm_weight(tiny("Gemma2").model.norm)
    assert found is not None
    x = torch.randn(3, 5, 64)
    torch.testing.assert_close(RmsNorm(*found)(x), tiny("Gemma2").model.norm(x))


def test_an_activation_that_is_not_known_is_not_fused() -> None:
    assert fuse_layers(tiny("Llama", hidden_act="relu"), "float32") == 0
    for name in ("gelu", "gelu_pytorch_tanh"):
        model = tiny("Llama", hidden_act=name)
        expected = logits(model)
        assert fuse_layers(model, "float32") == 3
        assert (logits(model) - expected).abs().max() < 1e-4


def test_the_demo_s_model_loses_nothing_in_int4_and_little_in_int8(capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer

    folder = str(model_folder())
    ids = torch.tensor([Tokenizer.from_file(folder + "/tokenizer.json").encode(topics.topics["for"]).ids[:200]])
    load_model: Any = transformers.AutoModelForCausalLM
    exact = logits(load_model.from_pretrained(folder, dtype=torch.float32).eval(), ids)
    for weights, bound in (("int4", 1e-5), ("int8", 0.1)):
        model = load_model.from_pretrained(folder, dtype=torch.float32).eval()
        apply(model, weights, "float32", 2)
        off = divergence(exact, logits(model, ids))
        single = divergence(exact[:1], logits(model, ids[:, :1]))
        with capsys.disabled():
            print(
                f"\n{weights}: KL against float32 over {ids.shape[1]} tokens: mean {off.mean():.2g}, most {off.max():.2g}"
            )
        assert max(off.max(), single.max()) < bound
        del model
