"""Who has the same beginning shares its full pages, and nobody else's."""

from __future__ import annotations

from hexrt.llm.batch import SequenceRequest
from hexrt.llm.prefix import root_key
from hexrt.protocol.host import BindPages, Chunk, Token
from tests.llm_desk import Desk, ask, greedy

ROOT = root_key(1000, "model", "fast")


def finish(desk: Desk, key: str, prompt: int, answer: tuple[int, ...] = (1, 2, 3), **more: object) -> None:
    """Runs a request to its end."""
    desk.engine.add(ask(key, prompt, len(answer), **({"root": ROOT} | more)), 0)
    given = list(answer)
    while not desk.engine.is_idle:
        desk.decide()
        for flight in list(desk.engine._flights):
            tokens = []
            for share in flight.shares:
                ids, given = given[: share.gain], given[share.gain :]
                tokens.append(Token(share.state.number, tuple(ids), "", "length" if ids and not given else ""))
            desk.reply(flight.command, *tokens)


def first_row(desk: Desk) -> tuple[int, int]:
    """Where the next chunk's first sequence begins, and with how many tokens."""
    row = next(m for m in desk.decide() if isinstance(m, Chunk)).sequences[0]
    return row.position, len(row.ids)


def test_the_key_of_a_page_depends_on_all_that_comes_before_and_on_whose_it_is() -> None:
    roots = {
        root_key(uid, digest, numerics) for uid in (None, 1, 2) for digest in "ab" for numerics in ("fast", "exact")
    }
    assert len(roots) == 12
    desk = Desk()
    desk.engine.add(ask("a", 12, 1, root=ROOT), 0)
    desk.engine.add(SequenceRequest("b", (0, *range(101, 112)), greedy(1), root=ROOT), 0)
    a, b = (desk.engine._sequences[key].keys(3, 4) for key in "ab")
    assert not set(a) & set(b)


def test_full_pages_of_prompt_and_answer_are_shared_after_their_sequence_ended() -> None:
    desk = Desk(token_budget=64)
    finish(desk, "a", 10, (110, 111, 112, 113))
    assert desk.engine.statistics().known_pages == 3, "thirteen tokens are in the pages"
    desk.engine.add(ask("b", 16, 2, root=ROOT), 0)
    assert first_row(desk) == (12, 4), "of its sixteen tokens twelve were computed as prompt and answer"
    assert desk.engine.statistics().shared_tokens == 12


def test_the_last_token_is_computed_even_where_all_of_the_prompt_is_known() -> None:
    desk = Desk(token_budget=64)
    finish(desk, "a", 8)
    desk.engine.add(ask("b", 8, 2, root=ROOT), 0)
    assert first_row(desk) == (4, 4)


def test_nothing_is_shared_with_another_root_or_without_one() -> None:
    desk = Desk(token_budget=64)
    finish(desk, "a", 12)
    for key, root in (("other user", root_key(1001, "model", "fast")), ("off", b"")):
        desk.engine.add(ask(key, 12, 1, root=root), 0)
    rows = next(m for m in desk.decide() if isinstance(m, Chunk)).sequences
    assert [row.position for row in rows] == [0, 0]


def test_a_request_waits_for_a_long_beginning_that_another_is_computing() -> None:
    desk = Desk(frames=100, token_budget=40, passes=1, context_tokens=400)
    desk.engine.add(ask("a", 80, 2, root=ROOT), 0)
    desk.engine.add(SequenceRequest("b", (*range(100, 172), 7, 7), greedy(2), root=ROOT), 0)
    assert [m.sequence for m in desk.decide() if isinstance(m, BindPages)] == [1]
    desk.reply(1, Token(1, (), "", ""))
    assert not [m for m in desk.decide() if isinstance(m, BindPages)], "half of it is not computed"
    desk.reply(2, Token(1, (5,), "", ""))
    bound = [m for m in desk.decide() if isinstance(m, BindPages)]
    assert [m.sequence for m in bound] == [2]
    assert desk.engine._sequences["b"].computed == 72


def test_a_request_does_not_wait_for_a_short_beginning_or_for_one_less_urgent() -> None:
    desk = Desk(frames=100, token_budget=8, passes=1, context_tokens=400)
    desk.engine.add(ask("a", 80, 2, root=ROOT), 0)
    desk.engine.add(SequenceRequest("short", (*range(100, 113), 7, 7), greedy(2), root=ROOT), 0)
    assert [m.sequence for m in desk.decide() if isinstance(m, BindPages)] == [1, 2]
    desk.engine.add(ask("urgent", 80, 2, root=ROOT, priority=1), 0)
    assert [m.sequence for m in desk.decide() if isinstance(m, BindPages)] == [3]


def test_who_waits_for_a_beginning_goes_on_when_its_maker_is_cancelled() -> None:
    desk = Desk(frames=100, token_budget=8, passes=1, context_tokens=400)
    desk.engine.add(ask("a", 80, 2, root=ROOT), 0)
    desk.engine.add(ask("b", 80, 2, root=ROOT), 0)
    assert [m.sequence for m in desk.decide() if isinstance(m, BindPages)] == [1]
    desk.engine.cancel("a")
    for flight in list(desk.engine._flights):
        desk.reply(flight.command, Token(1, (), "", ""))
    assert [m.sequence for m in desk.decide() if isinstance(m, BindPages)] == [2]


def test_known_pages_give_way_before_anything_else_and_are_not_stored_unless_somebody_took_them() -> None:
    desk = Desk(frames=8, host=8, policy="next_use", token_budget=64)
    finish(desk, "a", 12)
    assert desk.engine.statistics().frames_free == 5
    desk.engine.add(SequenceRequest("b", tuple(range(200, 228)), greedy(4)), 0)
    assert [m.sequence for m in desk.decide() if isinstance(m, BindPages)] == [2]
    assert not desk.copies, "nobody ever took them, so they are not worth a copy"
    assert desk.engine.pages.prefixes.find(desk.engine._sequences["b"].chain) == []


def test_pages_that_were_taken_once_are_stored_and_come_back() -> None:
    desk = Desk(frames=8, host=8, policy="next_use", token_budget=64)
    finish(desk, "a", 12)
    finish(desk, "again", 12)
    desk.engine.add(SequenceRequest("b", tuple(range(200, 228)), greedy(4)), 0)
    desk.decide()
    assert desk.copies, "they are written down before they give way"
    desk.answer_copies()
    desk.decide()
    desk.engine.cancel("b")
    for flight in list(desk.engine._flights):
        desk.reply(flight.command, Token(3, (), "", ""))
    desk.decide()
    desk.engine.add(ask("c", 12, 1, root=ROOT), 0)
    desk.decide()
    desk.answer_copies()
    assert first_row(desk) == (8, 4)


def test_lost_pages_are_forgotten_and_computed_again() -> None:
    desk = Desk(token_budget=64)
    finish(desk, "a", 12)
    desk.keeper.device_lost("cpu:0")
    desk.engine.device_lost()
    desk.engine.add(ask("b", 12, 1, root=ROOT), 0)
    assert first_row(desk) == (0, 12)
