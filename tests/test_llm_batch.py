"""Given these requests and reports, the batcher sends exactly these messages and says exactly these outcomes."""

from __future__ import annotations

from typing import Any

import pytest

from hexrt.errors import BadRequest, ErrorRecord, InvariantViolation, OutOfMemory
from hexrt.llm.batch import Emitted, Ended, Prefilled, Refused, SequenceRequest
from hexrt.protocol.host import BindPages, Cancel, Chunk, ChunkSequence, Release, Token
from tests.llm_desk import CANCELLED, Desk, ask, greedy


def test_a_prompt_is_bound_sliced_by_the_budget_and_then_decoded() -> None:
    desk = Desk()
    desk.engine.add(ask("a", 10, 5), 0)
    first, second = tuple(range(100, 108)), (108, 109)
    assert desk.decide() == [
        BindPages("m", 1, 0, (0, 1, 2, 3), 1),
        Chunk(1, "m", 1, (ChunkSequence(1, 0, first, False, greedy(5)),)),
        Chunk(2, "m", 2, (ChunkSequence(1, 8, second, True),)),
    ]
    assert desk.decide() == []
    assert desk.reply(1, Token(1, (), "", "")) == []
    assert desk.decide() == [Chunk(3, "m", 2, (ChunkSequence(1, 11, (), False),))]
    assert desk.reply(2, Token(1, (7, 8), "x", "")) == [Prefilled("a", 10, 25), Emitted("a", 0, (7, 8), "x")]
    assert desk.decide() == [Chunk(4, "m", 1, (ChunkSequence(1, 13, (), False),))]
    assert desk.reply(3, Token(1, (9,), "yz", "stop")) == [
        Emitted("a", 2, (9,), "yz"),
        Ended("a", "stop", (7, 8, 9), "xyz", 25, 35),
    ]
    assert desk.decide() == [Release("m", 1)]
    assert desk.engine.statistics().frames_free == 12, "the frames stay until the last chunk that names them is back"
    assert desk.reply(4, Token(1, (), "", "")) == []
    assert desk.engine.statistics().frames_free == 16
    assert desk.engine.is_idle


def test_sequences_join_and_leave_at_chunks() -> None:
    desk = Desk(passes=1)
    desk.engine.add(ask("a", 2, 3), 0)
    desk.decide()
    desk.reply(1, Token(1, (7,), "", ""))
    desk.engine.add(ask("b", 2, 1), 0)
    sent = desk.decide()
    assert sent[0] == BindPages("m", 2, 0, (2,), 1)
    assert sent[1] == Chunk(
        3, "m", 1, (ChunkSequence(1, 3, (), False), ChunkSequence(2, 0, (100, 101), True, greedy(1)))
    )
    desk.reply(2, Token(1, (8,), "", ""))
    assert desk.decide() == [], "a has no more tokens to come, b's only one is on its way"
    outcomes = desk.reply(3, Token(1, (9,), "", "length"), Token(2, (5,), "t", "length"))
    assert [type(o) for o in outcomes] == [Emitted, Ended, Prefilled, Emitted, Ended]
    assert desk.decide() == [Release("m", 1), Release("m", 2)]
    assert desk.engine.is_idle


def test_a_late_prompt_recalls_the_queued_chunk_and_joins_it() -> None:
    desk = Desk(passes=2)
    desk.engine.add(ask("a", 2, 20), 0)
    assert [type(m) for m in desk.decide()] == [BindPages, Chunk, Chunk]
    desk.engine.add(ask("b", 2, 4), 0)
    assert desk.decide()[1:] == [Cancel(2)]
    assert desk.decide() == [], "nothing is sent until it is known which came first"
    assert desk.engine.chunk_failed(2, CANCELLED) == []
    again = Chunk(3, "m", 2, (ChunkSequence(1, 3, (), False), ChunkSequence(2, 0, (100, 101), True, greedy(4))))
    assert desk.decide() == [again]
    desk.reply(1, Token(1, (1, 2), "", ""))
    assert desk.reply(3, Token(1, (3, 4), "", ""), Token(2, (5, 6), "", ""))[0] == Emitted("a", 2, (3, 4), "")


def test_a_recall_that_comes_too_late_changes_nothing() -> None:
    desk = Desk(passes=2)
    desk.engine.add(ask("a", 2, 20), 0)
    desk.decide()
    desk.engine.add(ask("b", 2, 4), 0)
    assert Cancel(2) in desk.decide()
    desk.reply(1, Token(1, (1, 2), "", ""))
    assert desk.decide() == []
    assert desk.reply(2, Token(1, (3, 4), "", "")) == [Emitted("a", 2, (3, 4), "")]
    sent = desk.decide()
    assert isinstance(sent[0], Chunk)
    assert [row.sequence for row in sent[0].sequences] == [1, 2]


def test_nothing_is_recalled_for_a_prompt_that_a_full_budget_leaves_out() -> None:
    desk = Desk(passes=1)
    desk.engine.add(ask("a", 24, 4), 0)
    desk.decide()
    desk.engine.add(ask("b", 2, 4), 0)
    assert [type(m) for m in desk.decide()] == [BindPages]


def test_while_prompts_wait_for_budget_each_chunk_is_one_pass() -> None:
    desk = Desk(passes=4, frames=32)
    for name in "abc":
        desk.engine.add(ask(name, 6, 8), 0)
    chunks = [m for m in desk.decide() if isinstance(m, Chunk)]
    assert [[len(row.ids) for row in chunk.sequences] for chunk in chunks] == [[6, 2], [0, 4, 4]]
    assert [chunk.passes for chunk in chunks] == [1, 1]
    desk.reply(1, Token(1, (1,), "", ""), Token(2, (), "", ""))
    last = desk.decide()[0]
    assert isinstance(last, Chunk)
    assert ([len(row.ids) for row in last.sequences], last.passes) == ([0, 0, 2], 4)


def test_all_pages_are_reserved_or_none() -> None:
    desk = Desk(frames=4)
    desk.engine.add(ask("a", 8, 4), 0)
    desk.engine.add(ask("b", 5, 4), 0)
    assert [m.sequence for m in desk.decide() if isinstance(m, BindPages)] == [1]
    assert desk.engine.statistics().frames_free == 1
    assert desk.engine.statistics().waiting == 1
    desk.reply(1, Token(1, (1, 2), "", "stop"))
    desk.reply(2, Token(1, (), "", ""))
    sent = desk.decide()
    assert sent[0] == Release("m", 1)
    assert isinstance(sent[1], BindPages)
    assert sent[1].sequence == 2


def test_a_higher_priority_goes_first_and_equal_ones_by_arrival() -> None:
    desk = Desk(frames=3, passes=1)
    desk.engine.add(ask("low", 4, 8, priority=0), 0)
    desk.engine.add(ask("first", 4, 8, priority=5), 0)
    desk.engine.add(ask("second", 4, 8, priority=5), 0)
    order = []
    while not desk.engine.is_idle:
        sent = desk.decide()
        order += [m.sequence for m in sent if isinstance(m, BindPages)]
        for chunk in [m for m in sent if isinstance(m, Chunk)]:
            desk.reply(chunk.command, *(Token(row.sequence, (1,), "", "stop") for row in chunk.sequences[:1]))
    assert order == [2, 3, 1]


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    desk = Desk(frames=4, passes=1)
    desk.engine.add(ask("small 0", 4, 4), 0)
    desk.decide()
    desk.engine.add(ask("large", 8, 8), 0)
    admitted, pending, number = [], [1, 2], 0
    while "large" not in admitted:
        number += 1
        assert number < 100, "the large request starves"
        desk.engine.add(ask(f"small {number}", 4, 4), 0)
        sent = desk.decide()
        for m in sent:
            if isinstance(m, BindPages):
                admitted.append("large" if m.sequence == 2 else "small")
            if isinstance(m, Chunk):
                pending.append(m.command)
        for command in sorted(set(pending)):
            flight = next((f for f in desk.engine._flights if f.command == command), None)
            if flight is not None and not flight.recalled:
                tokens = [Token(s.state.number, (1,) * max(1, s.gain), "", "stop") for s in flight.shares]
                desk.reply(command, *tokens)
            elif flight is not None:
                desk.engine.chunk_failed(command, CANCELLED)
    assert 1 <= admitted.count("small") <= 20


def finish_prefill(desk: Desk, key: str, prompt: int, **more: Any) -> None:
    desk.engine.add(ask(key, prompt, 0, **more), 0)
    for chunk in [m for m in desk.decide() if isinstance(m, Chunk)]:
        desk.reply(chunk.command, *(Token(row.sequence, (), "", "") for row in chunk.sequences))


def test_a_prefill_alone_ends_with_its_prompt_and_keeps_the_pages_until_released() -> None:
    desk = Desk()
    desk.engine.add(ask("p", 6, 0, retain=True), 0)
    assert desk.decide()[1:] == [Chunk(1, "m", 1, (ChunkSequence(1, 0, tuple(range(100, 106)), False),))]
    assert desk.reply(1, Token(1, (), "", "")) == [Prefilled("p", 10, 15)]
    assert desk.decide() == [Release("m", 1)]
    assert desk.engine.statistics().retained == 1
    assert desk.engine.statistics().frames_free == 14
    desk.engine.release("p")
    desk.engine.check_integrity()
    assert desk.engine.statistics().frames_free == 16
    desk.engine.release("p")


def test_several_children_share_the_full_pages_and_prefill_the_rest() -> None:
    desk = Desk()
    finish_prefill(desk, "p", 6, retain=True)
    for name in ("a", "b"):
        desk.engine.add(ask(name, 6, 4, parent="p"), 0)
    assert desk.decide() == [Release("m", 1)], "the page that both would write to is copied first"
    desk.answer_copies()
    sent = desk.decide()
    bound = [m for m in sent if isinstance(m, BindPages)]
    assert [m.frames for m in bound] == [(0, 2, 3), (0, 4, 5)]
    chunk = next(m for m in sent if isinstance(m, Chunk))
    assert [(row.position, row.ids, row.last) for row in chunk.sequences] == [(5, (105,), True)] * 2
    desk.engine.release("p")
    assert desk.engine.statistics().frames_free == 16 - 5, "the shared page outlives its first holder"
    desk.engine.check_integrity()


def test_an_answer_is_continued_from_its_pages_less_its_last_token() -> None:
    desk = Desk()
    desk.engine.add(ask("a", 5, 4, retain=True), 0)
    desk.decide()
    desk.reply(1, Token(1, (1, 2), "", ""))
    desk.reply(2, Token(1, (3, 4), "", "length"))
    desk.decide()
    ids = (*range(100, 105), 1, 2, 3, 4, 50, 51)
    desk.engine.add(SequenceRequest("b", ids, greedy(2), parent="a"), 0)
    chunk = next(m for m in desk.decide() if isinstance(m, Chunk))
    assert chunk.sequences[0].position == 8
    assert chunk.sequences[0].ids == (4, 50, 51)
    assert desk.engine.statistics().shared_tokens == 8


def test_a_parent_with_other_ids_is_shared_only_as_far_as_they_agree() -> None:
    desk = Desk()
    finish_prefill(desk, "p", 12, retain=True)
    desk.engine.add(SequenceRequest("a", (*range(100, 105), 9, 9, 9, 9, 9), greedy(2), parent="p"), 0)
    desk.decide()
    desk.answer_copies()
    chunk = next(m for m in desk.decide() if isinstance(m, Chunk))
    assert (chunk.sequences[0].position, chunk.sequences[0].ids) == (5, (9, 9, 9, 9, 9))


def test_retained_sequences_give_way_least_recently_used_first() -> None:
    desk = Desk(frames=6)
    finish_prefill(desk, "old", 8, retain=True)
    finish_prefill(desk, "new", 8, retain=True)
    desk.decide()
    desk.engine.add(ask("a", 8, 4), 0)
    desk.decide()
    old, new = desk.engine._sequences["old"], desk.engine._sequences["new"]
    assert len(desk.engine.pages.tables.table(old.number)) == 1, (
        "its later page was given up, and no more than was needed"
    )
    assert len(desk.engine.pages.tables.table(new.number)) == 2
    desk.engine.cancel("a")
    desk.reply(2, Token(3, (), "", ""))
    desk.engine.add(ask("b", 8, 1, parent="old"), 0)
    desk.decide()
    assert desk.engine.statistics().shared_tokens == 4, "what was given up is computed again"


def test_a_child_gets_its_parents_own_pages_where_there_are_no_others() -> None:
    desk = Desk(frames=4)
    finish_prefill(desk, "p", 11, retain=True)
    desk.engine.add(ask("a", 12, 4, parent="p"), 0)
    sent = desk.decide()
    assert next(m for m in sent if isinstance(m, BindPages)).frames[:2] == (0, 1)
    assert desk.engine.statistics().dropped_sequences == 0, "what they share is still the parent's"


def test_cancelling_masks_at_once_and_frees_after_the_last_chunk() -> None:
    desk = Desk()
    desk.engine.add(ask("a", 4, 20), 0)
    desk.decide()
    desk.engine.cancel("a")
    assert desk.decide() == [Release("m", 1)]
    assert desk.engine.statistics().frames_free == 10
    assert desk.reply(1, Token(1, (1,), "", "")) == []
    assert desk.reply(2, Token(1, (), "", "")) == []
    assert desk.engine.statistics().frames_free == 16
    assert desk.engine.is_idle


def test_cancelling_what_waits_or_is_unknown_sends_nothing() -> None:
    desk = Desk()
    desk.engine.add(ask("a", 4, 20), 0)
    desk.engine.cancel("a")
    desk.engine.cancel("never")
    assert desk.decide() == []
    assert desk.engine.is_idle


def test_a_fault_of_one_sequence_ends_that_one() -> None:
    desk = Desk()
    desk.engine.add(ask("a", 4, 20), 0)
    desk.engine.add(ask("b", 4, 20), 0)
    desk.decide()
    outcomes = desk.reply(1, Token(1, (), "", "error: logits are not finite"), Token(2, (1, 2), "", ""))
    assert outcomes[0] == Refused("a", ErrorRecord("task_failed", "logits are not finite"))
    assert outcomes[1:] == [Prefilled("b", 10, 15), Emitted("b", 0, (1, 2), "")]


def test_a_fault_of_a_parameter_is_the_requests_own() -> None:
    desk = Desk()
    desk.engine.add(ask("a", 4, 20), 0)
    desk.engine.add(ask("b", 4, 20), 0)
    desk.decide()
    said = "error: params.regex: lexer error: too large", "error: params: llguidance is not installed here"
    outcomes = desk.reply(1, *(Token(n, (), "", finish) for n, finish in enumerate(said, 1)))
    assert outcomes == [
        Refused("a", ErrorRecord("bad_request", "lexer error: too large", "params.regex")),
        Refused("b", ErrorRecord("task_failed", "params: llguidance is not installed here")),
    ]


def test_a_host_that_gives_too_few_tokens_is_not_waited_for() -> None:
    desk = Desk()
    desk.engine.add(ask("a", 4, 20), 0)
    desk.decide()
    (refused,) = desk.reply(1, Token(1, (1,), "", ""))
    assert isinstance(refused, Refused)
    assert "1 tokens where 2 were due" in refused.error.message


def test_a_failed_chunk_fails_its_sequences_and_no_others() -> None:
    desk = Desk(token_budget=4)
    desk.engine.add(ask("a", 4, 20), 0)
    desk.engine.add(ask("b", 4, 20), 0)
    desk.decide()
    error = ErrorRecord("task_failed", "out of memory")
    assert desk.engine.chunk_failed(1, error) == [Refused("a", error)]
    assert [type(o) for o in desk.reply(2, Token(1, (), "", ""), Token(2, (1, 2), "", ""))] == [Prefilled, Emitted]
    desk.engine.check_integrity()


def test_after_a_restart_what_was_answered_is_prefilled_and_counted() -> None:
    desk = Desk(passes=4)
    desk.engine.add(ask("a", 3, 4, answered=(7, 8), answered_text="seven ei"), 0)
    chunk = next(m for m in desk.decide() if isinstance(m, Chunk))
    assert chunk == Chunk(1, "m", 2, (ChunkSequence(1, 0, (100, 101, 102, 7, 8), True, greedy(4), (7, 8)),))
    assert desk.reply(1, Token(1, (9, 10), "ght", "length")) == [
        Prefilled("a", 10, 15),
        Emitted("a", 2, (9, 10), "ght"),
        Ended("a", "length", (7, 8, 9, 10), "seven eight", 15, 15),
    ]


def test_an_answer_that_was_complete_before_the_restart_ends_without_a_token() -> None:
    desk = Desk()
    desk.engine.add(ask("a", 3, 2, answered=(7, 8), answered_text="78"), 0)
    desk.decide()
    assert desk.reply(1, Token(1, (), "", "length")) == [
        Prefilled("a", 10, 15),
        Ended("a", "length", (7, 8), "78", 15, 15),
    ]


def test_a_lost_device_names_what_was_under_way_and_starts_empty() -> None:
    desk = Desk(frames=6)
    finish_prefill(desk, "kept", 4, retain=True)
    desk.engine.add(ask("live", 8, 8), 0)
    desk.engine.add(ask("waiting", 12, 8), 0)
    desk.decide()
    desk.keeper.device_lost("cpu:0")
    assert set(desk.engine.device_lost()) == {"live", "waiting"}
    assert desk.engine.is_idle
    assert desk.engine.statistics().frames_free == 6
    assert desk.reply(99) == [], "a report of the lost host is dropped"


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (ask("a", 0, 4), BadRequest, "the prompt is empty"),
        (ask("a", 64, 4), BadRequest, "64 tokens.*64 of 'm'.*at most 63"),
        (ask("a", 100, 4), BadRequest, "the prompt has 100 tokens"),
        (ask("a", 40, 20), OutOfMemory, "15 pages of 4 tokens, and the device has 10"),
    ],
)
def test_what_can_never_run_is_refused_with_numbers(
    request_: SequenceRequest, error: type[Exception], words: str
) -> None:
    desk = Desk(frames=10)
    with pytest.raises(error, match=words):
        desk.engine.add(request_, 0)
    assert desk.engine.is_idle


def test_an_answer_is_cut_to_what_the_context_leaves() -> None:
    desk = Desk(passes=1, token_budget=64)
    desk.engine.add(ask("a", 63, 1_000_000), 0)
    chunk = next(m for m in desk.decide() if isinstance(m, Chunk))
    assert chunk.sequences[0].sampling == greedy(1)


def test_a_key_is_added_once() -> None:
    desk = Desk()
    desk.engine.add(ask("a", 3, 4), 0)
    with pytest.raises(InvariantViolation, match="'a' was added twice"):
        desk.engine.add(ask("a", 3, 4), 0)
