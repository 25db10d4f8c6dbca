"""A language model of one attention layer with seeded weights, which runs passes on any device, and attention over pages that no host reads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hexrt.kernels.attention import Attend, PassTensors
from hexrt.llm.engine_pass import DrawRow, Pass, PassBuffers, Row
from hexrt.llm.engine_sampling import Drawn, sample
from hexrt.protocol.host import Sampling

VOCABULARY, HEADS, KV_HEADS, DIMENSION, PAGE = 96, 4, 2, 16, 16
WIDTH = HEADS * DIMENSION


class GatheredAttention:
    """For rows of one token, in plain torch: all of a table is gathered and what lies past a row's end hidden."""

    name = "gathered"

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, arena: Tensor, layer: int, tensors: PassTensors, *,
        scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, out: Tensor,
    ) -> None:  # fmt: skip
        assert window is None and softcap is None and sinks is None
        pages = arena[:, layer]
        # The arena's last frame is nobody's here: what is not to be written goes there.
        slots = torch.where(tensors.slots < 0, (len(pages) - 1) * PAGE, tensors.slots)
        pages[:, 0].index_put_((slots // PAGE, slots % PAGE), key)
        pages[:, 1].index_put_((slots // PAGE, slots % PAGE), value)
        keys, values = (pages[:, kind][tensors.tables.long()].flatten(1, 2) for kind in (0, 1))
        grouped = query.view(len(query), KV_HEADS, -1, DIMENSION)
        scores = torch.einsum("rhgd,rkhd->rhgk", grouped, keys) * scale
        hidden = torch.arange(keys.shape[1], device=query.device)[None, :] >= tensors.ends[:, None]
        shares = torch.softmax(scores.masked_fill(hidden[:, None, None], -1e30), -1)
        out.copy_(torch.einsum("rhgk,rkhd->rhgd", shares, values).reshape(out.shape))


class ToyModel:
    """`frames` pages; the last is nobody's."""

    def __init__(self, attend: Attend, frames: int, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(3)

        def weights(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=draw) * shape[-1] ** -0.5).to(device)

        self.attend = attend
        self.embedding, self.places = weights(VOCABULARY, WIDTH) * 8, weights(4096, WIDTH) * 8
        self.into = weights((HEADS + 2 * KV_HEADS) * DIMENSION, WIDTH)
        self.head = weights(VOCABULARY, WIDTH) * 8
        self.arena = torch.zeros((frames, 1, 2, PAGE, KV_HEADS, DIMENSION), device=device)

    @torch.inference_mode()
    def step(self, inputs: Pass) -> Drawn:
        return sample(self.logits(inputs), inputs.draws)

    def logits(self, inputs: Pass) -> Tensor:
        read = self.embedding[inputs.ids[0]] + self.places[inputs.positions[0]]
        query, key, value = torch.nn.functional.linear(read, self.into).split(
            [HEADS * DIMENSION, KV_HEADS * DIMENSION, KV_HEADS * DIMENSION], -1
        )
        out = torch.empty((len(read), HEADS, DIMENSION), device=read.device)
        self.attend(
            query.view(-1, HEADS, DIMENSION), key.view(-1, KV_HEADS, DIMENSION), value.view(-1, KV_HEADS, DIMENSION),
            self.arena, 0, inputs.tensors, scale=DIMENSION**-0.5, out=out,
        )  # fmt: skip
        return torch.nn.functional.linear((read + out.flatten(1))[inputs.keep], self.head)


def sampling(temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, **more: float) -> Sampling:
    return Sampling(temperature, top_k, top_p, seed, (), 1000, **more)


def decoding(samplings: list[Sampling], start: int, pages: int, number: int = 0) -> list[Row]:
    """Rows that decode from place `start` + their number on; row r has frames r * pages onwards."""
    return [
        Row(
            (5 + row,), np.arange(row * pages, (row + 1) * pages, dtype=np.int32), start + row, DrawRow(one, number, -1)
        )
        for row, one in enumerate(samplings)
    ]


def buffers(device: str = "cpu", vocabulary: int = VOCABULARY) -> PassBuffers:
    return PassBuffers(torch.device(device), vocabulary, PAGE)


def tokens_of(drawn: list[Drawn]) -> list[list[int]]:
    """By pass."""
    assert not any(bool(one.tokens[1].any()) for one in drawn)
    return [one.tokens[0].tolist() for one in drawn]
