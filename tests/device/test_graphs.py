"""Decode passes as CUDA graphs: replayed, they draw what the passes themselves draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hexrt.kernels.attention import Attend, Reference
from hexrt.kernels.triton_attention import TritonAttention
from hexrt.llm.engine_attention import NAME, PagedPass, paged_attention
from hexrt.llm.engine_graphs import CUT, CudaCapture, DecodeGraphs
from hexrt.llm.engine_pass import Pass, advance
from hexrt.llm.engine_sampling import Drawn, sample
from tests.device.conftest import Clock
from tests.llm_families import FAMILIES, SIZES, tiny
from tests.llm_toy import PAGE, VOCABULARY, ToyModel, buffers, decoding, sampling, tokens_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PAGES, ROWS = 4, 24
SAMPLINGS = [
    sampling(), sampling(1.0, seed=4), sampling(0.7, top_k=5, seed=5), sampling(1.3, top_p=0.5, seed=6),
    sampling(2.0, top_k=40, top_p=0.9, min_p=0.05, seed=7),
]  # fmt: skip


def graphs(step: Any, vocabulary: int, most_bytes: int = 1 << 32) -> DecodeGraphs:
    device = torch.device("cuda")
    return DecodeGraphs(
        step, lambda inputs, drawn: advance(inputs, drawn, PAGE), device, vocabulary, rows=ROWS, width=PAGES,
        passes=16, most_bytes=most_bytes, capture=CudaCapture(device),
    )  # fmt: skip


def toy(attend: Attend) -> ToyModel:
    return ToyModel(attend, ROWS * PAGES + 1, "cuda")


class TinyModel:
    """A family's tiny model on the device, its K and V in pages."""

    def __init__(self, family: str) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, paged_attention)
        self.module = tiny(family).to("cuda")
        self.module.set_attn_implementation(NAME)
        shape = (ROWS * PAGES + 1, SIZES["num_hidden_layers"], 2, PAGE, SIZES["num_key_value_heads"], SIZES["head_dim"])
        self.arena = torch.zeros(shape, device="cuda")

    @torch.inference_mode()
    def step(self, inputs: Pass) -> Drawn:
        pages = PagedPass(self.arena, inputs.tensors, TritonAttention(), SIZES["max_position_embeddings"])
        out = self.module(
            input_ids=inputs.ids, position_ids=inputs.positions, use_cache=False, logits_to_keep=inputs.keep,
            hexrt_pages=pages,
        )  # fmt: skip
        return sample(out.logits[0].float(), inputs.draws)


@pytest.mark.parametrize("count", [1, 3, 5, 8, 17])
def test_a_replayed_chunk_draws_what_its_passes_draw(count: int) -> None:
    samplings = (SAMPLINGS * 4)[:count]
    answers = []
    for most_bytes in (1 << 32, 0):
        model = toy(TritonAttention())
        made = graphs(model.step, VOCABULARY, most_bytes)
        chunks = []
        for start in (3, 20):
            rows = decoding(samplings, start, PAGES, number=start)
            chunks += tokens_of(made.decode(buffers("cuda").fill(rows, 12), 12))
        answers.append(chunks)
        assert made.statistics().replays == (24 if most_bytes else 0)
    assert answers[0] == answers[1]
    reference = toy(Reference())
    drawn = tokens_of(graphs(reference.step, VOCABULARY, 0).decode(buffers("cuda").fill(decoding(samplings, 3, PAGES, number=3), 12), 12))  # fmt: skip
    assert answers[0][:12] == drawn


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.endswith(("moe", "oss"))])
def test_a_replayed_chunk_of_a_transformers_model_draws_what_its_passes_draw(family: str) -> None:
    answers = []
    for most_bytes in (1 << 32, 0):
        model = TinyModel(family)
        made = graphs(model.step, SIZES["vocab_size"], most_bytes)
        inputs = buffers("cuda", SIZES["vocab_size"]).fill(decoding(SAMPLINGS, 3, PAGES), 16)
        answers.append(tokens_of(made.decode(inputs, 16)))
        assert bool(made.statistics().replays) is bool(most_bytes)
    assert answers[0] == answers[1]


def test_graphs_count_the_memory_they_take_and_stop_at_their_limit() -> None:
    made = graphs(toy(TritonAttention()).step, VOCABULARY, most_bytes=1)
    assert made.warm_up(8, kind=CUT)
    taken = made.statistics().bytes
    print(f"\na graph of 8 rows took {taken} bytes")
    assert made.warm_up(16, kind=CUT) is (taken == 0)


@pytest.mark.parametrize("most_bytes", [1 << 32, 0], ids=["replayed", "as it is"])
def test_speed_is_printed(most_bytes: int, clock: Clock) -> None:
    model = TinyModel("llama")
    made = graphs(model.step, SIZES["vocab_size"], most_bytes)
    own = buffers("cuda", SIZES["vocab_size"])
    rows = decoding([sampling()] * 16, 3, PAGES)

    def run() -> None:
        made.decode(own.fill(rows, 8), 8)

    clock("8 passes of 16 rows of a tiny model, " + ("replayed" if most_bytes else "as they are"), run, 0)
