"""Draws: the paper's own numbers, greedy by the maximum, top-k and top-p as defined, and frequencies that fit the probabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hexrt.llm.engine_sampling import draw, nucleus, philox, sample, uniform  # noqa: E402
from hexrt.protocol.host import Sampling  # noqa: E402


def sampling(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> Sampling:
    return Sampling(temperature, top_k, top_p, seed, (), 10)


def kept(probabilities: Any, top_k: int, top_p: float) -> list[int]:
    ids = nucleus(probabilities, top_k, top_p)
    assert ids is not None
    return [int(i) for i in ids]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_authors_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert philox(counter, key) == words


def test_numbers_are_even_and_depend_on_seed_and_position_alone() -> None:
    numbers = [uniform(seed, i) for seed in range(20) for i in range(200)]
    assert numbers == [uniform(seed, i) for seed in range(20) for i in range(200)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= u < 1 for u in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert uniform(2**63 - 1, 2**31) != uniform(2**63 - 2, 2**31)


def test_temperature_zero_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert sample(logits, [sampling(0.0), sampling(0.0)], [0, 0]) == [1, 0]


def test_a_row_that_is_not_finite_is_told_apart() -> None:
    logits = torch.tensor([[0.0, math.nan, 1.0], [5.0, 3.0, 1.0], [math.inf, 0.0, 0.0]])
    assert sample(logits, [sampling(0.0)] * 3, [0] * 3) == [None, 0, None]


def test_rows_are_drawn_by_their_own_parameters_whatever_stands_beside_them() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(5))
    mixed = [sampling(0.0), sampling(0.7, seed=3), sampling(1.3, top_k=5, seed=9), sampling(1.0, top_p=0.5, seed=1)]
    together = sample(logits, mixed, [4, 5, 6, 7])
    alone = [sample(logits[i : i + 1], [mixed[i]], [4 + i])[0] for i in range(4)]
    assert together == alone


def test_frequencies_fit_the_probabilities() -> None:
    logits = torch.tensor([1.0, 2.0, 0.0, -1.0])
    expected = torch.softmax(logits / 0.8, -1).tolist()
    drawn = [draw(logits, sampling(0.8), uniform(7, i)) for i in range(4000)]
    for token, probability in enumerate(expected):
        assert abs(drawn.count(token) / 4000 - probability) < 0.03


@pytest.mark.parametrize("temperature", [1e-3, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([-50.0, 3.0, 60.0, 59.0])
    assert {draw(logits, sampling(temperature, top_p=0.9), uniform(1, i)) for i in range(20)} == {2}


def test_top_k_then_top_p_keep_the_fewest_likeliest() -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15], dtype=torch.float64)
    assert nucleus(probabilities, 0, 1.0) is None
    assert nucleus(probabilities, 99, 1.0) is None
    assert kept(probabilities, 2, 1.0) == [1, 3]
    assert kept(probabilities, 0, 0.39) == [1]
    assert kept(probabilities, 0, 0.5) == [1, 3]
    assert kept(probabilities, 0, 0.8) == [1, 3, 4]
    assert kept(probabilities, 3, 0.5) == [1, 3], "0.5 of the 0.85 that top-k left"


def test_a_flat_distribution_is_sorted_beyond_the_first_look() -> None:
    probabilities = torch.full((5000,), 1 / 5000, dtype=torch.float64)
    assert abs(len(kept(probabilities, 0, 0.9)) - 4500) <= 1


def test_nothing_outside_the_nucleus_is_ever_drawn() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1))
    allowed = set(logits.topk(7).indices.tolist())
    drawn = {draw(logits, sampling(2.0, top_k=7), uniform(1, i)) for i in range(500)}
    assert drawn == allowed
    assert draw(logits, sampling(2.0, top_k=7), 1 - 2**-53) in allowed
