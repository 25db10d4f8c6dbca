"""Given these requests, priorities and costs: who is stopped, when, and where it goes on."""

from __future__ import annotations

import pytest

from hexrt.llm.batch import Emitted, Ended, Prefilled
from hexrt.protocol.host import BindPages, Cancel, Chunk, ChunkSequence, Release, Token
from hexrt.scheduling.retention import Candidate, victims
from tests.llm_desk import CANCELLED, Desk, ask, greedy


def running(desk: Desk, key: str, prompt: int, answer: int, priority: int = 0) -> None:
    """Adds a request and answers its first chunk, so that it has come on."""
    desk.engine.add(ask(key, prompt, answer, priority=priority), 0)
    for chunk in [m for m in desk.decide() if isinstance(m, Chunk)][:1]:
        desk.reply(chunk.command, *(Token(row.sequence, (1,), "a", "") for row in chunk.sequences))


def bring_back(desk: Desk, token: Token) -> None:
    """A recalled chunk never began; what runs gives `token`."""
    for flight in list(desk.engine._flights):
        if flight.recalled:
            desk.engine.chunk_failed(flight.command, CANCELLED)
        else:
            desk.reply(flight.command, token)


def test_a_stopped_sequence_leaves_at_the_end_of_its_chunk_and_goes_on_with_the_same_tokens() -> None:
    desk = Desk(frames=16, passes=1)
    running(desk, "a", 5, 8)
    desk.decide()
    desk.engine.preempt("a")
    assert desk.decide() == [Cancel(3)], "the queued chunk names it too"
    assert desk.engine.chunk_failed(3, CANCELLED) == []
    assert desk.engine.statistics().parked == 0, "the chunk that runs is not back"
    assert desk.reply(2, Token(1, (2,), "b", "")) == [Emitted("a", 1, (2,), "b")]
    sent = desk.decide()
    assert sent == [Release("m", 1)], "its last page is copied before it goes on"
    desk.answer_copies()
    bind, chunk = desk.decide()[:2]
    assert isinstance(bind, BindPages)
    assert chunk == Chunk(5, "m", 1, (ChunkSequence(1, 6, (2,), True, greedy(8), (1, 2)),)), (
        "six tokens are in the pages, the last answer token is not"
    )
    assert desk.engine.statistics().preemptions == 1
    outcomes = desk.reply(5, Token(1, (3,), "c", "stop"))
    assert outcomes == [Emitted("a", 2, (3,), "c"), Ended("a", "stop", (1, 2, 3), "abc", 15, 55)]


def test_an_urgent_request_without_room_stops_the_cheapest_of_the_least_urgent() -> None:
    desk = Desk(frames=9, passes=1, token_budget=64)
    for key, prompt in (("long", 12), ("short", 4)):
        running(desk, key, prompt, 4, priority=0)
    desk.engine.add(ask("middle", 8, 4, priority=1), 0)
    desk.decide()
    desk.engine.add(ask("urgent", 4, 4, priority=5), 0)
    sent = desk.decide()
    assert not [m for m in sent if isinstance(m, BindPages)]
    stopping = [s.request.key for s in desk.engine._sequences.values() if s.stopping]
    assert stopping == ["short"], "it gives what is needed, and costs least"


def test_nobody_is_stopped_for_an_equal_or_where_it_would_not_do() -> None:
    desk = Desk(frames=6, passes=1)
    running(desk, "a", 8, 4, priority=2)
    desk.engine.add(ask("equal", 12, 4, priority=2), 0)
    desk.decide()
    desk.engine.add(ask("high", 12, 4, priority=3), 0)
    desk.decide()
    stopping = [s.request.key for s in desk.engine._sequences.values() if s.stopping]
    assert stopping == ["a"]
    assert victims([Candidate("x", 1, 3, 1.0)], 1, 2) == []
    assert victims([Candidate("x", 0, 3, 1.0)], 1, 4) == []


def test_a_resumed_sequence_comes_on_before_it_is_stopped_again() -> None:
    desk = Desk(frames=4, passes=1)
    running(desk, "low", 8, 4)
    desk.engine.add(ask("one", 8, 4, priority=5), 0)
    desk.decide()
    bring_back(desk, Token(1, (2,), "", ""))
    sent = desk.decide()
    bound = [m for m in sent if isinstance(m, BindPages)]
    assert [m.sequence for m in bound] == [2]
    first = next(m for m in sent if isinstance(m, Chunk))
    desk.reply(first.command, Token(2, (1,), "", "stop"))
    sent = desk.decide()
    assert [m.sequence for m in sent if isinstance(m, BindPages)] == []
    for flight in list(desk.engine._flights):
        desk.reply(flight.command, Token(2, (), "", ""))
    assert [m.sequence for m in desk.decide() if isinstance(m, BindPages)] == [1]
    desk.engine.add(ask("two", 8, 4, priority=5), 0)
    desk.decide()
    assert not [s for s in desk.engine._sequences.values() if s.stopping], "low has not come on since"


def test_an_urgent_prompt_takes_the_budget_of_the_next_chunk() -> None:
    desk = Desk(frames=40, passes=1, token_budget=8)
    desk.engine.add(ask("bulk", 40, 4), 0)
    desk.decide()
    desk.engine.add(ask("urgent", 6, 4, priority=3), 0)
    assert Cancel(2) in desk.decide(), "the queued chunk is full, of something less urgent"
    desk.engine.chunk_failed(2, CANCELLED)
    chunk = next(m for m in desk.decide() if isinstance(m, Chunk))
    assert [(row.sequence, len(row.ids)) for row in chunk.sequences] == [(2, 6), (1, 2)]


def test_a_prompt_is_not_passed_over_for_ever() -> None:
    desk = Desk(frames=4000, passes=1, token_budget=8)
    number, chunks = 0, 0
    desk.engine.add(ask("first", 8, 1, priority=5), 0)
    desk.engine.add(ask("low", 8, 1), 0)
    low = desk.engine._sequences["low"]
    while low.planned < 8:
        number += 1
        desk.engine.add(ask(number, 8, 1, priority=5), 0)
        for message in desk.decide():
            chunks += isinstance(message, Chunk)
        for flight in list(desk.engine._flights):
            if flight.recalled:
                desk.engine.chunk_failed(flight.command, CANCELLED)
            else:
                tokens = [Token(s.state.number, (1,) * s.gain, "", "length" if s.gain else "") for s in flight.shares]
                desk.reply(flight.command, *tokens)
        assert chunks < 100, "the prompt starves"


def test_a_parked_sequence_whose_pages_went_is_computed_again_and_nothing_is_said_twice() -> None:
    desk = Desk(frames=4, passes=1, token_budget=64)
    running(desk, "low", 9, 4)
    desk.engine.add(ask("high", 12, 4, priority=5), 0)
    desk.decide()
    bring_back(desk, Token(1, (2,), "b", ""))
    sent = desk.decide()
    assert [m.sequence for m in sent if isinstance(m, BindPages)] == [2], "there is no tier below: low's pages went"
    chunk = next(m for m in sent if isinstance(m, Chunk))
    desk.reply(chunk.command, Token(2, (7,), "", "stop"))
    desk.decide()
    for flight in list(desk.engine._flights):
        desk.reply(flight.command, Token(2, (), "", ""))
    row = next(m for m in desk.decide() if isinstance(m, Chunk)).sequences[0]
    assert (row.position, row.ids, row.answered) == (0, (*range(100, 109), 1, 2), (1, 2))
    flight = next(iter(desk.engine._flights))
    outcomes = desk.reply(flight.command, Token(1, (3,), "c", "length"))
    assert [o for o in outcomes if isinstance(o, Prefilled)] == []
    assert outcomes[-1] == Ended("low", "length", (1, 2, 3), "abc", 15, flight.command * 10 + 5)


@pytest.mark.parametrize("stage", ["parked", "stopping"])
def test_a_stopped_sequence_can_be_cancelled(stage: str) -> None:
    desk = Desk(frames=16, passes=1)
    running(desk, "a", 5, 8)
    desk.decide()
    desk.engine.preempt("a")
    if stage == "parked":
        desk.decide()
        desk.engine.chunk_failed(3, CANCELLED)
        desk.reply(2, Token(1, (2,), "", ""))
    desk.engine.cancel("a")
    for flight in list(desk.engine._flights):
        desk.reply(flight.command, Token(1, (2,), "", ""))
    desk.decide()
    assert desk.engine.is_idle
    assert desk.engine.statistics().frames_free == 16


def test_victims_are_the_least_urgent_then_the_cheapest_a_page_and_no_more_than_needed() -> None:
    candidates = [
        Candidate("urgent", 5, 50, 1.0), Candidate("mid", 2, 10, 1.0), Candidate("dear", 0, 10, 100.0), Candidate("cheap", 0, 4, 1.0),
    ]  # fmt: skip
    assert [c.key for c in victims(candidates, 6, 3)] == ["cheap"]
    assert [c.key for c in victims(candidates, 6, 8)] == ["dear"], (
        "cheap alone would not do, and with dear it is not needed"
    )
    assert [c.key for c in victims(candidates, 6, 12)] == ["cheap", "dear"]
    assert [c.key for c in victims(candidates, 5, 24)] == ["cheap", "dear", "mid"]
    assert victims(candidates, 5, 25) == []
