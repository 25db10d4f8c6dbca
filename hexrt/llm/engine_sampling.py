"""Draws the next token from logits, by counter-based random numbers.

Owns nothing. The number for answer position i is a function of (seed, i) alone: Philox 4x32-10 (Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", SC 2011), replayed with that paper's test vectors in tests/test_llm_sampling.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hexrt.protocol.host import Sampling

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
FIRST_LOOK = 1024
"""So many of the likeliest tokens are looked at before all of them are sorted for top-p."""


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random words of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    high, low, _, _ = philox((position & MASK, position >> 32, 0, 0), (seed & MASK, seed >> 32))
    return float(((high << 32 | low) >> 11) * 2.0**-53)


def sample(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int | None]:
    """One token for each row of `logits` [rows, vocabulary], float32; None where a row is not finite."""
    best, ids = logits.max(-1)
    finite, greedy = torch.isfinite(best).tolist(), ids.tolist()
    return [
        None if not finite[row] else greedy[row] if s.temperature == 0 else draw(logits[row], s, uniform(s.seed, i))
        for row, (s, i) in enumerate(zip(samplings, positions, strict=True))
    ]


def draw(logits: Tensor, sampling: Sampling, number: float) -> int:
    """The token at `number` of the cumulated probabilities, in the order of the vocabulary, so that near ties do not reorder it."""
    # The largest is taken off first: over a tiny temperature it would be infinite.
    probabilities = torch.softmax((logits.double() - logits.max()) / sampling.temperature, -1)
    candidates = nucleus(probabilities, sampling.top_k, sampling.top_p)
    kept = probabilities if candidates is None else probabilities[candidates]
    sums = kept.cumsum(-1)
    at = min(int(torch.searchsorted(sums, number * sums[-1], right=True)), len(sums) - 1)
    return at if candidates is None else int(candidates[at])


def nucleus(probabilities: Tensor, top_k: int, top_p: float) -> Tensor | None:
    """The ids that may be drawn, ascending; None for all of them.

    First the `top_k` likeliest, then of those the fewest likeliest that together hold at least `top_p` of their probability.
    """
    size = probabilities.shape[-1]
    limit = min(top_k, size) if top_k else size
    if limit == size and top_p >= 1:
        return None
    looked = limit if top_k or top_p >= 1 else min(FIRST_LOOK, size)
    values, ids = probabilities.topk(looked)
    if top_p < 1:
        enough = top_p * (float(values.sum()) if top_k else 1.0)
        if looked < limit and float(values.sum()) < enough:
            values, ids = probabilities.sort(descending=True)
        ids = ids[: int(torch.searchsorted(values.cumsum(-1), enough)) + 1]
    return ids.sort().values
