"""Whatever comes and in whatever order: every answer is whole, nothing waits for ever, and every frame returns."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable

from hypothesis import given, settings
from hypothesis import strategies as st

from hexrt.llm.batch import Emitted, Ended, Outcome, Prefilled
from hexrt.protocol.host import Cancel, Chunk, Chunked, ChunkSequence, Token
from tests.llm_desk import CANCELLED, Desk, ask


class ModelHost:
    """Plays a host over whole chunks: token i of the answer to a prompt of n tokens is (n + i) mod 50, and 49 ends an answer."""

    def __init__(self) -> None:
        self.answers: dict[int, list[int]] = {}
        self.limits: dict[int, int] = {}
        self.prompts: dict[int, int] = {}
        self.done: set[int] = set()

    def run(self, chunk: Chunk) -> Chunked:
        return Chunked(chunk.command, 0, 1, tuple(self._token(row, chunk.passes) for row in chunk.sequences))

    def _token(self, row: ChunkSequence, passes: int) -> Token:
        key = row.sequence
        if row.sampling is not None:
            self.answers[key], self.limits[key] = list(row.answered), row.sampling.max_tokens
        if row.last:
            self.prompts[key] = row.position + len(row.ids) - len(self.answers[key])
        new: list[int] = []
        if (row.last or not row.ids) and key not in self.done:
            assert row.ids or row.position == self.prompts[key] + len(self.answers[key]) - 1
            while len(new) < passes and key not in self.done:
                new.append((self.prompts[key] + len(self.answers[key])) % 50)
                self.answers[key].append(new[-1])
                if new[-1] == 49 or len(self.answers[key]) == self.limits[key]:
                    self.done.add(key)
        finish = "" if not new or key not in self.done else "stop" if new[-1] == 49 else "length"
        return Token(key, tuple(new), "", finish)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), budget=st.integers(1, 24), passes=st.integers(1, 6), frames=st.integers(8, 40))
def test_whatever_comes_each_answer_is_whole_and_every_frame_returns(
    seed: int, budget: int, passes: int, frames: int
) -> None:
    chance = random.Random(seed)
    desk, host = Desk(frames=frames, token_budget=budget, passes=passes), ModelHost()
    queue: list[Chunk] = []
    outcomes: dict[Hashable, list[Outcome]] = {}
    lengths: dict[int, tuple[int, int]] = {}
    cancelled: set[int] = set()
    for _ in range(3000):
        if len(lengths) < 12 and chance.random() < 0.3:
            prompt, answer = chance.randint(1, 20), chance.choice([0, 1, 3, 12])
            parent = chance.choice(sorted(lengths)) if lengths and chance.random() < 0.5 else None
            more = {"priority": chance.choice([0, 0, 3]), "root": chance.choice([b"", b"one"])}
            desk.engine.add(ask(len(lengths), prompt, answer, parent=parent, retain=chance.random() < 0.4, **more), 0)
            lengths[len(lengths)] = prompt, answer
        if lengths and chance.random() < 0.03:
            victim = chance.choice(sorted(lengths))
            cancelled.add(victim)
            desk.engine.cancel(victim)
        if lengths and chance.random() < 0.1:
            desk.engine.preempt(chance.choice(sorted(lengths)))
        for message in desk.decide():
            if isinstance(message, Chunk):
                queue.append(message)
            elif isinstance(message, Cancel) and len(queue) > 1 and chance.random() < 0.8:
                recalled = queue.pop()
                assert recalled.command == message.command
                assert desk.engine.chunk_failed(message.command, CANCELLED) == []
        assert len(queue) <= 2
        desk.answer_copies()
        if queue:
            report = host.run(queue.pop(0))
            for outcome in desk.engine.chunked(report, 0):
                outcomes.setdefault(outcome.key, []).append(outcome)
            desk.engine.check_integrity()
        elif len(lengths) == 12 and desk.engine.is_idle:
            break
    else:
        raise AssertionError(f"not idle: {desk.engine.statistics()}")
    for key, (prompt, answer) in lengths.items():
        desk.engine.release(key)
        if key in cancelled:
            continue
        expected: list[int] = []
        while len(expected) < answer and 49 not in expected:
            expected.append((prompt + len(expected)) % 50)
        assert isinstance(outcomes[key][0], Prefilled)
        emitted = [o for o in outcomes[key] if isinstance(o, Emitted)]
        assert [o.first for o in emitted] == list(itertools.accumulate([0, *(len(o.ids) for o in emitted)]))[:-1]
        assert [token for o in emitted for token in o.ids] == expected
        assert isinstance(outcomes[key][-1], Ended if answer else Prefilled)
    desk.engine.pages.prefixes.clear()
    assert desk.engine.statistics().frames_free == frames
