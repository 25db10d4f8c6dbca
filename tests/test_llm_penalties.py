"""Repetition penalties as transformers computes them, stop tokens, log-probabilities, limits, and bad input that ends its own sequence alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hexrt.protocol.host import ChunkSequence, Token  # noqa: E402
from tests.llm_families import tiny  # noqa: E402
from tests.llm_hand import PROMPT, Hand, sampling  # noqa: E402

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def hand(tmp_path_factory: pytest.TempPathFactory) -> Hand:
    return Hand(tmp_path_factory.mktemp("penalties") / "tiny")


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny("llama")


def generated(reference: Any, penalty: float, count: int) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        repetition_penalty=penalty,
    )  # fmt: skip
    found: list[int] = out[0][len(PROMPT) :].tolist()
    return found


@pytest.mark.parametrize("penalty", [1.3, 0.7, 4.0])
def test_a_penalty_gives_the_tokens_of_transformers(hand: Hand, reference: Any, penalty: float) -> None:
    expected = generated(reference, penalty, 24)
    assert expected != generated(reference, 1.0, 24)
    (token,) = hand.answers([sampling(24, repetition_penalty=penalty, stop_tokens=())])
    assert _same(token.ids, expected)


def _same(ids: tuple[int, ...], expected: list[int]) -> bool:
    """`min_new_tokens` forbids transformers the end token, which the engine may give."""
    cut = ids.index(2) if 2 in ids else len(ids)
    return cut > 4 and list(ids[:cut]) == expected[:cut]


def test_penalties_are_each_sequences_own_and_last_over_chunks(hand: Hand) -> None:
    mixed = [sampling(20, repetition_penalty=1.5), sampling(20), sampling(20, 0.9, repetition_penalty=0.8, seed=4), sampling(20, repetition_penalty=1.1)]  # fmt: skip
    together = hand.answers(mixed, passes=7)
    assert [hand.answers([one], passes=2)[0].ids for one in mixed] == [token.ids for token in together]


@pytest.mark.parametrize("answered", [1, 8])
def test_a_restart_knows_what_was_said(hand: Hand, answered: int) -> None:
    how = sampling(16, 0.9, repetition_penalty=1.6, seed=3)
    (whole,) = hand.answers([how])
    (rest,) = hand.answers([how], answered=whole.ids[:answered])
    assert whole.ids[:answered] + rest.ids == whole.ids


def test_a_slot_that_is_used_again_holds_nothing_of_before(hand: Hand) -> None:
    how = sampling(12, repetition_penalty=2.0)
    first = hand.answers([how])
    for _ in range(6):
        hand.answers([sampling(12, 1.5, repetition_penalty=2.0, seed=9)] * 3, prompt=(7, 8, 9))
    assert hand.answers([how]) == first
    assert len(hand.model.buffers.seen.pool) <= 4


def test_a_number_that_is_bound_again_begins_anew(hand: Hand) -> None:
    hand.bind(3)
    before = hand.chunk(3, ChunkSequence(3, 0, PROMPT, True, sampling(9, 1.0, repetition_penalty=1.5), (), PROMPT))[0]
    hand.engine.mask(3)
    hand.engine.release(3)
    hand.bind(3)
    again = hand.chunk(3, ChunkSequence(3, 0, PROMPT, True, sampling(9, 1.0, repetition_penalty=1.5), (), PROMPT))[0]
    hand.engine.release(3)
    assert again == before


def test_a_stop_token_ends_the_answer_and_is_part_of_it(hand: Hand) -> None:
    (whole,) = hand.answers([sampling(12)])
    wanted = whole.ids[5]
    (token,) = hand.answers([sampling(12, stop_tokens=(wanted, 319))], passes=8)
    assert token.ids == whole.ids[: whole.ids.index(wanted) + 1]
    assert token.finish == "stop"


def test_logprobs_come_one_for_each_token_and_are_the_models_own(hand: Hand, reference: Any) -> None:
    said = hand.answers([sampling(6, 1.3, top_k=9, seed=2, logprobs=4), sampling(6), sampling(6, logprobs=0)])
    assert [len(token.logprobs) for token in said] == [6, 0, 6]
    for token, top in ((said[0], 4), (said[2], 0)):
        with torch.no_grad():
            own = torch.log_softmax(reference(torch.tensor([[*PROMPT, *token.ids]])).logits[0].float(), -1)
        for at, (chosen, report) in enumerate(zip(token.ids, token.logprobs, strict=True)):
            row = own[len(PROMPT) + at - 1]
            assert math.isclose(report.logprob, float(row[chosen]), abs_tol=1e-3)
            assert [i for i, _ in report.top] == row.topk(top).indices.tolist()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"temperature": math.nan}, "params.temperature: nan is no value for it"),
        ({"temperature": -1.0}, "params.temperature: -1.0 is no value for it"),
        ({"temperature": math.inf}, "params.temperature: inf is no value for it"),
        ({"top_p": math.nan}, "params.top_p: nan is no value for it"),
        ({"top_p": 0.0}, "params.top_p: it must be above 0"),
        ({"top_k": -3}, "params.top_k: -3 is no value for it"),
        ({"min_p": math.nan}, "params.min_p: nan is no value for it"),
        ({"repetition_penalty": 0.0}, "params.repetition_penalty: it must be above 0"),
        ({"repetition_penalty": math.inf}, "params.repetition_penalty: inf is no value for it"),
    ],
)
def test_sampling_that_makes_no_sense_ends_its_own_sequence(hand: Hand, more: dict[str, Any], words: str) -> None:
    bad, good = hand.answers([sampling(**more), sampling(4)])
    assert (bad.ids, bad.finish) == ((), f"error: {words}")
    assert good.finish == "length"


def one(hand: Hand, entry: ChunkSequence, pages: int = 8) -> Token:
    hand.bind(entry.sequence, pages)
    (token,) = hand.chunk(2, entry)
    hand.engine.release(entry.sequence)
    return token


def test_ids_and_places_that_cannot_be_are_refused_by_name(hand: Hand) -> None:
    assert (
        one(hand, ChunkSequence(1, 0, (5, 320), True, sampling())).finish
        == "error: a token id is outside the vocabulary of 320"
    )
    assert (
        one(hand, ChunkSequence(1, 0, (5, -1), True, sampling())).finish
        == "error: a token id is outside the vocabulary of 320"
    )
    bad = ChunkSequence(1, 0, PROMPT, True, sampling(repetition_penalty=2.0), (), (5, 999))
    assert one(hand, bad).finish == "error: a token id is outside the vocabulary of 320"
    bad = ChunkSequence(1, 0, PROMPT, True, sampling(), (400,))
    assert one(hand, bad).finish == "error: a token id is outside the vocabulary of 320"
    words = "error: it would go to token 129, and the model's context holds 128"
    assert one(hand, ChunkSequence(1, 0, (7,) * 129, True, sampling())).finish == words
    assert one(hand, ChunkSequence(1, 0, (), False, sampling())).finish == "error: there is nothing to decode from"
    assert one(hand, ChunkSequence(1, 0, (7,), True)).finish == "error: it came without sampling parameters"


def test_a_context_that_is_full_ends_the_answer_where_it_is(hand: Hand) -> None:
    (token,) = hand.answers([sampling(10**9)], prompt=(7,) * 120, passes=64)
    assert len(token.ids) == 9, "the last one drawn has no place any more, and needs none"
    assert token.finish == "error: the model's context of 128 tokens is full"


def test_no_tokens_wanted_is_an_answer_of_none(hand: Hand) -> None:
    (token,) = hand.answers([sampling(0)])
    assert (token.ids, token.finish) == ((), "length")


@pytest.mark.parametrize("stage", ["before its first chunk", "between slices", "while it decodes"])
def test_a_masked_sequence_gains_nothing_more_and_its_neighbour_all(hand: Hand, stage: str) -> None:
    (alone,) = hand.answers([sampling(8)])
    for number in (1, 2):
        hand.bind(number)
    if stage == "before its first chunk":
        hand.engine.mask(2)
    slice_of = ChunkSequence(2, 0, PROMPT[:3], False, sampling(8)) if stage == "between slices" else ChunkSequence(2, 0, PROMPT, True, sampling(8))  # fmt: skip
    first = hand.chunk(3, ChunkSequence(1, 0, PROMPT, True, sampling(8)), slice_of)
    hand.engine.mask(2)
    at = len(PROMPT) + len(first[0].ids) - 1
    follow = ChunkSequence(2, 3, PROMPT[3:], True) if stage == "between slices" else ChunkSequence(2, at, (), False)
    second = hand.chunk(9, ChunkSequence(1, at, (), False), *([] if stage == "before its first chunk" else [follow]))
    assert first[0].ids + second[0].ids == alone.ids
    assert [token.ids for token in second[1:]] == [()] * len(second[1:])
    for number in (1, 2):
        hand.engine.release(number)
