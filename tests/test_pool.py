"""The page pool: all or nothing, counted sharing, and integrity, against a dictionary model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hexrt.core import SequenceId
from hexrt.errors import InvariantViolation, OutOfMemory
from hexrt.memory.pool import PagePool

A, B, C = SequenceId(1), SequenceId(2), SequenceId(3)


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(4, 16)
    assert pool.allocate(A, 3) == (0, 1, 2)
    with pytest.raises(OutOfMemory, match="2 pages are needed and 1 of 4 are free"):
        pool.allocate(B, 2)
    assert pool.free == 1
    assert pool.allocate(A, 1) == (3,)
    pool.check_integrity()


def test_a_shared_frame_is_free_only_after_its_last_holder() -> None:
    pool = PagePool(4, 16)
    pool.allocate(A, 3)
    assert pool.share(A, B, 2) == (0, 1)
    assert pool.share(A, C, 1) == (0,)
    assert pool.statistics().shared == 2
    assert pool.reclaimable([A]) == 1
    assert pool.reclaimable([A, B]) == 2
    pool.release(A)
    assert pool.free == 2
    pool.release(B)
    assert pool.free == 3
    pool.release(C)
    assert pool.free == 4
    pool.check_integrity()


def test_dropping_entries_makes_an_older_table_stale() -> None:
    pool = PagePool(4, 16)
    pool.allocate(A, 3)
    before = pool.version(A)
    pool.truncate(A, 3)
    assert pool.version(A) == before
    pool.truncate(A, 1)
    assert pool.version(A) > before
    assert pool.table(A) == (0,)
    assert pool.free == 3


def test_pages_of_tokens_round_up() -> None:
    pool = PagePool(1, 16)
    assert [pool.pages_of(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_an_unknown_sequence_is_a_bug_and_named() -> None:
    with pytest.raises(InvariantViolation, match="sequence 7 has no page table"):
        PagePool(1, 16).release(SequenceId(7))


def test_sharing_more_than_there_is_changes_nothing() -> None:
    pool = PagePool(4, 16)
    pool.allocate(A, 1)
    with pytest.raises(InvariantViolation):
        pool.share(A, B, 2)
    assert pool.statistics().tables == 1
    pool.check_integrity()


def test_a_wrong_count_is_found() -> None:
    pool = PagePool(4, 16)
    pool.allocate(A, 2)
    pool._counts[1] = 2
    with pytest.raises(InvariantViolation, match="frame 1 is counted 2 times and held 1 times"):
        pool.check_integrity()


FRAMES = 12
names = st.integers(1, 5).map(SequenceId)


class AgainstDictionary(RuleBasedStateMachine):
    """Tables as plain lists; a frame is free where no list holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(FRAMES, 16)
        self.tables: dict[SequenceId, list[int]] = {}

    def held(self) -> set[int]:
        return {frame for table in self.tables.values() for frame in table}

    @rule(name=names, pages=st.integers(0, FRAMES + 1))
    def allocate(self, name: SequenceId, pages: int) -> None:
        free = FRAMES - len(self.held())
        assert self.pool.can_allocate(pages) == (pages <= free)
        if pages > free:
            with pytest.raises(OutOfMemory):
                self.pool.allocate(name, pages)
            return
        taken = self.pool.allocate(name, pages)
        assert len(set(taken)) == pages
        assert not set(taken) & self.held()
        self.tables.setdefault(name, []).extend(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), child=names)
    def share(self, data: st.DataObject, child: SequenceId) -> None:
        source = data.draw(st.sampled_from(sorted(self.tables)))
        pages = data.draw(st.integers(0, len(self.tables[source])))
        if child in self.tables:
            with pytest.raises(InvariantViolation):
                self.pool.share(source, child, pages)
            return
        self.tables[child] = list(self.pool.share(source, child, pages))
        assert self.tables[child] == self.tables[source][:pages]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tables)))
        pages = data.draw(st.integers(0, len(self.tables[name]) + 1))
        self.pool.truncate(name, pages)
        del self.tables[name][pages:]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.tables)), min_size=1, unique=True))
        expected = self.pool.free + self.pool.reclaimable(names)
        for name in names:
            self.pool.release(name)
            del self.tables[name]
        assert self.pool.free == expected

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.free == FRAMES - len(self.held())
        assert {name: list(self.pool.table(name)) for name in self.tables} == self.tables
        several = [f for f in self.held() if sum(f in table for table in self.tables.values()) > 1]
        assert self.pool.statistics().shared == len(several)


TestAgainstDictionary = AgainstDictionary.TestCase
TestAgainstDictionary.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
