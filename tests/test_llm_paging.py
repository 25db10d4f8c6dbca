"""Pages that move under sequences: what a pass reads in a page is what was written there, whatever was moved, shared, copied or lost between."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hexrt.llm.batch import Emitted, Ended, Outcome, Prefilled, SequenceRequest
from hexrt.llm.sequence import Need
from hexrt.protocol.host import (
    NVME,
    BindPages,
    Cancel,
    Chunk,
    Chunked,
    ChunkSequence,
    Copied,
    Copy,
    CopyFault,
    Release,
    Token,
)
from tests.llm_desk import CANCELLED, PAGE_BYTES, Desk, ask
from tests.seeds import seeds

PAGE = 4
Cells = list[int | None]


def answer_to(prompt: int, most: int) -> tuple[int, ...]:
    answer: list[int] = []
    while len(answer) < most and 49 not in answer:
        answer.append((prompt + len(answer)) % 50)
    return tuple(answer)


class Machine:
    """The hosts of one device and of the disk, with their memory as lists of token ids: a model that reads every page it is given.

    The answer to a prompt of n tokens is (n + i) mod 50 for i = 0, 1, ...; 49 ends it.
    """

    def __init__(self) -> None:
        self.memory: dict[tuple[int, int], Cells] = {}  # (place, page offset) -> token ids
        self.sums: dict[int, Cells] = {}
        self.tables: dict[int, list[int]] = {}
        self.answers: dict[int, list[int]] = {}
        self.limits: dict[int, int] = {}
        self.prompts: dict[int, list[int]] = {}
        self.done: set[int] = set()

    def take(self, message: object) -> None:
        if isinstance(message, BindPages):
            table = self.tables.setdefault(message.sequence, [])
            table[message.first :] = message.frames
            self.prompts.setdefault(message.sequence, [])
        elif isinstance(message, Release):
            self.tables.pop(message.sequence, None)

    def lose(self, place: int) -> None:
        self.memory = {at: cells for at, cells in self.memory.items() if at[0] != place}
        if place == 0:
            self.tables.clear()

    def _cells(self, sequence: int, position: int) -> tuple[Cells, int]:
        frame = self.tables[sequence][position // PAGE]
        return self.memory.setdefault((0, frame * PAGE_BYTES), [None] * PAGE), position % PAGE

    def _write(self, sequence: int, position: int, token: int) -> None:
        cells, at = self._cells(sequence, position)
        cells[at] = token

    def run(self, chunk: Chunk) -> Chunked:
        return Chunked(
            chunk.command,
            0,
            1,
            tuple(self._token(row, chunk.passes) for row in chunk.sequences if row.sequence in self.tables),
        )

    def _token(self, row: ChunkSequence, passes: int) -> Token:
        key = row.sequence
        if row.sampling is not None:
            self.answers[key], self.limits[key] = list(row.answered), row.sampling.max_tokens
        for position, token in enumerate(row.ids, row.position):
            self._write(key, position, token)
        seen = [cells[at] for cells, at in (self._cells(key, p) for p in range(row.position + len(row.ids)))]
        new: list[int] = []
        if (row.last or not row.ids) and key not in self.done:
            if row.last:
                self.prompts[key] = [token for token in seen if token is not None][: len(seen) - len(self.answers[key])]
            assert seen == (self.prompts[key] + self.answers[key])[: len(seen)], f"sequence {key} reads {seen}"
            while len(new) < passes and key not in self.done:
                if not (row.last and not new):
                    self._write(key, len(self.prompts[key]) + len(self.answers[key]) - 1, self.answers[key][-1])
                new.append((len(self.prompts[key]) + len(self.answers[key])) % 50)
                self.answers[key].append(new[-1])
                if new[-1] == 49 or len(self.answers[key]) == self.limits[key]:
                    self.done.add(key)
        assert None not in seen, f"sequence {key} reads what nobody wrote: {seen}"
        finish = "" if not new or key not in self.done else "stop" if new[-1] == 49 else "length"
        return Token(key, tuple(new), "", finish)

    def copy(self, copy: Copy, fails: set[int]) -> Copied:
        sums, faults, number = [], [], 0
        for piece in copy.pieces:
            for page in range(piece.pages):
                cells = self.memory.get((piece.source, piece.source_offset + page * piece.page_bytes), [None] * PAGE)
                if piece.sums:
                    assert self.sums[piece.sums[page]] == cells
                if number in fails:
                    faults.append(CopyFault(number, "checksum" if piece.source == NVME else "io", "by the test"))
                else:
                    self.memory[piece.target, piece.target_offset + page * piece.page_bytes] = list(cells)
                if piece.target == NVME:
                    sums.append(len(self.sums) + 1)
                    self.sums[sums[-1]] = list(cells)
                number += 1
        size = sum(piece.pages * piece.page_bytes for piece in copy.pieces)
        return Copied(copy.command, 0, 1, size, tuple(sums), tuple(faults))


class Play:
    """One random history of requests, moves and faults."""

    def __init__(self, seed: int, frames: int, host: int, nvme: int, policy: str) -> None:
        self.chance = random.Random(seed)
        self.desk = Desk(
            frames, host, nvme, policy, token_budget=self.chance.randint(1, 24), passes=self.chance.randint(1, 4)
        )
        self.machine = Machine()
        self.queue: list[Chunk] = []
        self.outcomes: dict[Hashable, list[Outcome]] = {}
        self.asked: dict[int, SequenceRequest] = {}
        self.cancelled: set[int] = set()
        self.fault_rate = self.chance.choice([0, 0, 0.1])
        self.death_rate = self.chance.choice([0, 0, 0.02])

    def _ask(self) -> None:
        chance, key = self.chance, len(self.asked)
        prompt, answer = chance.randint(1, 28), chance.choice([0, 1, 3, 12])
        parent = chance.randrange(key) if key and chance.random() < 0.7 else None
        request = ask(
            key, prompt, answer, parent=parent, retain=chance.random() < 0.7, priority=chance.choice([0, 0, 0, 1, 5]),
            root=chance.choice([b"", b"one", b"one", b"other"]),
        )  # fmt: skip
        if parent is not None and chance.random() < 0.6:  # a conversation that goes on
            before = self.asked[parent]
            said = before.ids + answer_to(len(before.ids), before.sampling.max_tokens if before.sampling else 0)
            if len(said) < 38:
                request = replace(request, ids=said + tuple(range(200, 200 + chance.randint(1, 6))))
        self.desk.engine.add(request, 0)
        self.asked[key] = request

    def _lose(self, device: str) -> None:
        """A host dies: what it was to do never happens, its memory is gone, and what it had not ended is asked for again."""
        desk = self.desk
        desk.copies = [(name, copy) for name, copy in desk.copies if name != device]
        self.machine.lose(0 if device == "cpu:0" else NVME)
        desk.keeper.device_lost(device)
        if device == "cpu:0":
            self.queue.clear()
            for key in sorted(desk.engine.device_lost()):  # type: ignore[type-var]
                answered = tuple(t for o in self.outcomes.get(key, ()) if isinstance(o, Emitted) for t in o.ids)
                desk.engine.add(replace(self.asked[key], answered=answered), 0)  # type: ignore[index]
        desk.engine.check_integrity()

    def _send(self) -> None:
        for message in self.desk.decide():
            if isinstance(message, Chunk):
                self.queue.append(message)
            elif isinstance(message, Cancel):
                recalled = self.queue.pop()
                assert recalled.command == message.command
                assert self.desk.engine.chunk_failed(message.command, CANCELLED) == []
            else:
                self.machine.take(message)

    def step(self) -> None:
        chance, desk = self.chance, self.desk
        if len(self.asked) < 16 and chance.random() < 0.3:
            self._ask()
        if self.asked and chance.random() < 0.03:
            self.cancelled.add(victim := chance.choice(sorted(self.asked)))
            desk.engine.cancel(victim)
        if self.asked and chance.random() < 0.1:
            need = Need(chance.choice([1, 2, 9]), desk.now_ns + chance.choice([0.0, 1e6, 1e12]), 40)
            desk.engine.will_be_read(chance.choice(sorted(self.asked)), need)
        if self.asked and chance.random() < 0.1:
            desk.engine.preempt(chance.choice(sorted(self.asked)))
        desk.now_ns += 1
        if chance.random() < self.death_rate:
            self._lose(chance.choice(["cpu:0", "disk:0"]))
        desk.keeper.freed()
        self._send()
        if desk.copies and (not self.queue or chance.random() < 0.5):
            name, copy = desk.copies.pop(0)
            total = sum(piece.pages for piece in copy.pieces)
            fails = {n for n in range(total) if chance.random() < self.fault_rate}
            desk.keeper.copied(name, self.machine.copy(copy, fails))
        elif self.queue:
            for outcome in desk.engine.chunked(self.machine.run(self.queue.pop(0)), 0):
                self.outcomes.setdefault(outcome.key, []).append(outcome)
        desk.engine.check_integrity()

    def run(self) -> None:
        for _ in range(6000):
            self.step()
            if len(self.asked) == 16 and not self.queue and not self.desk.copies and self.desk.engine.is_idle:
                break
        else:
            raise AssertionError(f"not idle: {self.desk.engine.statistics()} {self.desk.keeper.statistics()}")

    def check(self) -> None:
        for key, request in self.asked.items():
            self.desk.engine.release(key)
            if key in self.cancelled:
                continue
            answer = request.sampling.max_tokens if request.sampling else 0
            expected = answer_to(len(request.ids), answer)
            outcomes = self.outcomes[key]
            assert isinstance(outcomes[0], Prefilled)
            emitted = [o for o in outcomes if isinstance(o, Emitted)]
            assert [o.first for o in emitted] == list(itertools.accumulate([0, *(len(o.ids) for o in emitted)]))[:-1]
            assert tuple(token for o in emitted for token in o.ids) == expected
            assert isinstance(outcomes[-1], Ended if answer else Prefilled)


@pytest.mark.parametrize("policy", ["lru", "next_use"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), frames=st.integers(14, 30), host=st.integers(1, 30), nvme=st.integers(0, 60))
def test_a_page_reads_as_it_was_written_whatever_moved_between(
    policy: str, seed: int, frames: int, host: int, nvme: int
) -> None:
    play = Play(seed, frames, host, nvme, policy)
    play.run()
    play.check()
    keeper = play.desk.keeper
    keeper.check_integrity()
    play.desk.engine.pages.prefixes.clear()
    assert play.desk.engine.statistics().frames_free == frames


@pytest.mark.parametrize("seed", seeds(4, 1000))
def test_histories_with_deaths_and_faults_read_what_was_written(seed: int) -> None:
    chance = random.Random(seed)
    play = Play(seed, chance.randint(14, 30), chance.randint(1, 30), chance.randint(0, 60), chance.choice(["lru", "next_use"]))  # fmt: skip
    play.run()
    play.check()
    play.desk.keeper.check_integrity()
    play.desk.engine.pages.prefixes.clear()
    assert play.desk.engine.statistics().frames_free == play.desk.engine.pages.capacity
