"""Draws: the paper's own numbers, greedy by the maximum, cuts as defined, and frequencies that fit the probabilities."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from hexrt.kernels.native import load  # noqa: E402
from hexrt.llm.engine_draws import NativeSampler, Sampler  # noqa: E402
from hexrt.llm.engine_pass import DrawRow, PassBuffers  # noqa: E402
from hexrt.llm.engine_sampling import DRAWN, NOT_FINITE, NOTHING_ALLOWED, Drawn, philox, sample, uniform  # noqa: E402
from hexrt.protocol.host import Sampling  # noqa: E402

NATIVE = NativeSampler() if load().library is not None else None


def sampling(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, **more: Any) -> Sampling:
    return Sampling(temperature, top_k, top_p, seed, (), 10, **more)


def drawn(logits: Any, samplings: Sequence[Sampling], positions: Sequence[int] | None = None) -> Drawn:
    rows = [DrawRow(s, p) for s, p in zip(samplings, positions or [0] * len(samplings), strict=True)]
    draws = PassBuffers(torch.device("cpu"), logits.shape[-1], 16).draws(rows)
    plain = sample(logits, draws)
    if NATIVE is not None:
        assert_equal(NATIVE(logits, draws), plain)
    return plain


def assert_equal(native: Drawn, plain: Drawn) -> None:
    """The compiled kernel draws what plain torch draws; of a row that is not finite only the status means anything."""
    assert torch.equal(native.tokens[1], plain.tokens[1])
    known = plain.tokens[1] == DRAWN
    assert torch.equal(native.tokens[0][known], plain.tokens[0][known])
    assert torch.equal(native.ids, plain.ids)
    assert torch.allclose(native.logprobs, plain.logprobs, atol=1e-4)


def tokens(logits: Any, samplings: Sequence[Sampling], positions: Sequence[int] | None = None) -> list[int]:
    ids, states = drawn(logits, samplings, positions).tokens.tolist()
    assert states == [DRAWN] * len(ids)
    return ids


def many(logits: Any, how: Sampling, count: int) -> list[int]:
    """Draws at the answer positions 0 .. count."""
    return tokens(logits.expand(count, -1).contiguous(), [how] * count, range(count))


def kept(probabilities: Sequence[float], how: Sampling) -> set[int]:
    """What is drawn of these, for probabilities that are all large enough to come up in 150 draws."""
    return set(many(torch.tensor(probabilities).log(), how, 150))


@pytest.mark.parametrize("as_tensor", [False, True])
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
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...], as_tensor: bool
) -> None:
    if not as_tensor:
        assert philox(counter, key) == words
        return
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1))) == words


def test_numbers_are_even_and_depend_on_seed_and_position_alone() -> None:
    seeds, positions = torch.arange(20)[:, None], torch.arange(200)[None]
    numbers = uniform(seeds, positions)
    assert torch.equal(numbers[7:9, 30:31], uniform(seeds[7:9], positions[:, 30:31]))
    assert len(numbers.unique()) == numbers.numel()
    assert bool((numbers >= 0).all() & (numbers < 1).all())
    assert abs(float(numbers.mean()) - 0.5) < 0.02
    far = uniform(torch.tensor([2**63 - 1, 2**63 - 2]), torch.tensor([2**31, 2**31]))
    assert far[0] != far[1]


def test_a_number_is_that_of_the_words_in_whole_numbers() -> None:
    for seed, position in ((0, 0), (2**40 + 7, 3), (2**63 - 1, 2**33 + 5)):
        words = philox((position & 0xFFFFFFFF, position >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
        expected = ((words[0] << 32 | words[1]) >> 11) * 2.0**-53
        assert float(uniform(torch.tensor([seed]), torch.tensor([position]))) == expected


def test_temperature_zero_takes_the_largest_and_of_equals_the_first() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0], [2.0, 7.0, 7.0]])
    assert tokens(logits, [sampling(0.0)] * 3) == [1, 0, 1]


@pytest.mark.parametrize("vocabulary", [1, 7, 128, 384, 1000])
def test_the_largest_is_found_whatever_the_size_of_the_vocabulary(vocabulary: int) -> None:
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    assert tokens(logits, [sampling(0.0)] * 9) == logits.argmax(-1).tolist()


def test_a_pass_that_draws_nothing_draws_nothing() -> None:
    result = drawn(torch.zeros(0, 256), [])
    assert result.tokens.shape == (2, 0) and result.logprobs.shape == (0, 1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_is_not_finite_is_told_apart_and_still_gives_a_token(temperature: float) -> None:
    logits = torch.tensor([[0.0, math.nan, 1.0], [5.0, -90.0, -90.0], [math.inf, 0.0, 0.0], [-math.inf] * 3])
    ids, states = drawn(logits, [sampling(temperature, 2, 0.9)] * 4).tokens.tolist()
    assert states == [NOT_FINITE, DRAWN, NOT_FINITE, NOT_FINITE]
    assert ids[1] == 0
    assert all(0 <= token < 3 for token in ids)


def test_rows_are_drawn_by_their_own_parameters_whatever_stands_beside_them() -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(5))
    mixed = [
        sampling(0.0), sampling(0.7, seed=3), sampling(1.3, top_k=5, seed=9), sampling(1.0, top_p=0.5, seed=1),
        sampling(2.0, min_p=0.1, seed=4), sampling(1.5, 40, 0.8, 12, min_p=0.05),
    ]  # fmt: skip
    positions = [4, 5, 6, 7, 8, 9]
    together = tokens(logits, mixed, positions)
    alone = [tokens(logits[i : i + 1], [mixed[i]], [positions[i]])[0] for i in range(6)]
    assert together == alone
    backwards = tokens(logits.flip(0).contiguous(), mixed[::-1], positions[::-1])
    assert together == backwards[::-1]


def test_frequencies_fit_the_probabilities() -> None:
    logits = torch.tensor([1.0, 2.0, 0.0, -1.0])
    expected = torch.softmax(logits / 0.8, -1).tolist()
    found = many(logits, sampling(0.8, seed=7), 4000)
    for token, probability in enumerate(expected):
        assert abs(found.count(token) / 4000 - probability) < 0.03


@pytest.mark.parametrize("temperature", [1e-3, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([-50.0, 3.0, 60.0, 59.0])
    assert set(many(logits, sampling(temperature, top_p=0.9, seed=1), 20)) == {2}


def test_top_k_then_top_p_then_min_p_keep_the_fewest_likeliest() -> None:
    probabilities = (0.1, 0.4, 0.05, 0.3, 0.15)
    assert kept(probabilities, sampling()) == {0, 1, 2, 3, 4}
    assert kept(probabilities, sampling(top_k=99)) == {0, 1, 2, 3, 4}
    assert kept(probabilities, sampling(top_k=2)) == {1, 3}
    assert kept(probabilities, sampling(top_p=0.39)) == {1}
    assert kept(probabilities, sampling(top_p=0.5)) == {1, 3}
    assert kept(probabilities, sampling(top_p=0.8)) == {1, 3, 4}
    assert kept(probabilities, sampling(top_k=3, top_p=0.5)) == {1, 3}, "0.5 of the 0.85 that top-k left"
    assert kept(probabilities, sampling(min_p=0.3)) == {1, 3, 4}
    assert kept(probabilities, sampling(top_p=0.8, min_p=0.5)) == {1, 3}
    assert kept(probabilities, sampling(top_k=1, top_p=0.5, min_p=0.9)) == {1}


def test_of_equals_the_first_of_the_vocabulary_stay() -> None:
    assert kept((0.2, 0.2, 0.2, 0.2, 0.2), sampling(top_k=3)) == {0, 1, 2}
    assert kept((0.2, 0.2, 0.2, 0.2, 0.2), sampling(top_p=0.55)) == {0, 1, 2}
    assert kept((0.1, 0.3, 0.3, 0.3), sampling(top_k=2, top_p=0.9)) == {1, 2}


def test_a_flat_distribution_is_cut_where_top_p_says() -> None:
    found = many(torch.zeros(5000), sampling(top_p=0.9), 400)
    assert 4400 < max(found) <= 4500


def test_nothing_outside_what_is_kept_is_ever_drawn() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1))
    allowed = set(logits.topk(7).indices.tolist())
    assert set(many(logits, sampling(2.0, top_k=7, seed=1), 500)) == allowed


def by_sorting(probabilities: Any, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The same cuts by their plain definition, in float64."""
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))
    order = order[: top_k or len(order)]
    total = sum(probabilities[i] for i in order)
    while len(order) > 1 and sum(probabilities[i] for i in order[:-1]) >= top_p * total * (1 + 1e-9):
        order.pop()
    return {i for i in order if probabilities[i] >= min_p * probabilities[order[0]] * (1 - 1e-6)}


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(0, 45),
    st.sampled_from([1.0, 0.93, 0.71, 0.307, 0.011]), st.sampled_from([0.0, 0.0371, 0.513]),
)  # fmt: skip
def test_cuts_without_sorting_are_those_of_sorting(shares: list[int], top_k: int, top_p: float, min_p: float) -> None:
    weights = torch.tensor(shares, dtype=torch.float32)
    found = many((weights / weights.sum()).log(), sampling(1.0, top_k, top_p, 3, min_p=min_p), 40)
    allowed = by_sorting([share / sum(shares) for share in shares], top_k, top_p, min_p)
    edge = by_sorting(
        [share / sum(shares) for share in shares], top_k, min(1.0, top_p * (1 + 1e-6)), min_p * (1 - 1e-5)
    )
    assert set(found) <= allowed | edge


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2))
    own = torch.log_softmax(logits, -1)
    how = [sampling(0.7, 3, seed=5, logprobs=4), sampling(0.0), sampling(0.0, logprobs=0)]
    result = drawn(logits, how, [1, 2, 3])
    chosen = result.tokens[0].tolist()
    assert result.logprobs.shape == (2, 5)
    assert torch.allclose(result.logprobs[:, 0], torch.stack((own[0, chosen[0]], own[2, chosen[2]])))
    assert result.ids[0].tolist() == own[0].topk(4).indices.tolist()
    assert torch.allclose(result.logprobs[0, 1:], own[0].topk(4).values)


def test_rows_of_every_kind_are_drawn_alike_by_the_kernel_and_by_plain_torch() -> None:
    """Under penalties and grammars too, in vocabularies that no vector divides."""
    if NATIVE is None:
        pytest.skip(f"no compiled kernels: {load().why}")
    for vocabulary in (5, 320, 1003, 4096):
        buffers = PassBuffers(torch.device("cpu"), vocabulary, 16)
        draw = torch.Generator().manual_seed(vocabulary)

        def allow(address: int, size: int) -> None:
            ctypes.memset(address, 0b01011010, size)

        rows = [
            DrawRow(
                sampling(
                    (0.0, 0.7, 1.4)[n % 3], (0, 7, 90)[n % 7 % 3], (1.0, 0.85)[n % 2], n, min_p=(0.0, 0.02)[n % 5 % 2],
                    repetition_penalty=(1.0, 1.3, 0.6)[n // 3 % 3], logprobs=(-1, 0, 4)[n % 4 % 3],
                ),
                n, buffers.seen.take(range(0, vocabulary, 3)) if n // 3 % 3 else -1, allow if n % 4 == 1 else None,
            )
            for n in range(36)
        ]  # fmt: skip
        logits = torch.randn(36, vocabulary, generator=draw) * 4
        draws = buffers.draws(rows)
        before = draws.seen.clone()
        plain, after = sample(logits, draws), draws.seen.clone()
        draws.seen.copy_(before)
        native = NATIVE(logits, draws)
        assert_equal(native, plain)
        assert torch.equal(draws.seen, after)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            draws.seen.copy_(before)
            assert torch.equal(NATIVE(logits, draws).tokens, native.tokens)
        torch.set_num_threads(1)


def test_where_nothing_is_allowed_the_row_says_so() -> None:
    buffers = PassBuffers(torch.device("cpu"), 64, 16)
    draws = buffers.draws([DrawRow(sampling(0.8), 0, -1, lambda address, size: None), DrawRow(sampling(0.8), 0)])
    for drawn_by in (sample, Sampler(torch.device("cpu"))):
        assert drawn_by(torch.zeros(2, 64), draws).tokens[1].tolist() == [NOTHING_ALLOWED, DRAWN]
