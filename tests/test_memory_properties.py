"""Random use of the page pool against a dictionary model with bytes: after every step both agree, and the pool's integrity holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hexrt.errors import InvariantViolation, OutOfMemory
from hexrt.memory import plan
from hexrt.memory.frames import GRANULE
from hexrt.memory.pool import NEVER, Level, Lru, NextUse
from tests.memory_model import Model
from tests.seeds import seeds

INDEX = st.integers(0, 1 << 16)
LEVELS = st.sampled_from([0, 1, 2])


class NothingToDo(Exception):
    """A walk asked to end a move, and none is open."""


class PoolMachine(RuleBasedStateMachine):
    @initialize(next_use=st.booleans())
    def start(self, next_use: bool) -> None:
        self.model = Model(NextUse() if next_use else Lru())

    def pick(self, index: int, count: int = 1) -> list[int]:
        pages = sorted(self.model.pages)
        return list(dict.fromkeys(pages[(index + i) % len(pages)] for i in range(count)))

    def has_pages(self) -> bool:
        return bool(self.model.pages)

    def has_moves(self) -> bool:
        return bool(self.model.moves)

    @rule(cls=st.integers(0, 3), count=st.integers(1, 5), span=st.integers(1, 5), pinned=st.booleans())
    def create(self, cls: int, count: int, span: int, pinned: bool) -> None:
        span = span if cls == 3 else 1
        fits = self.model.pool.can_create(cls, count, span)
        try:
            pages = self.model.create(cls, count, span)
            assert fits
            if not pinned:
                self.model.pool.unpin(pages)
                for page in pages:
                    self.model.pages[page].pins -= 1
        except OutOfMemory:
            assert not fits

    @rule(span=st.integers(1, 5), late=st.booleans())
    def adopt(self, span: int, late: bool) -> None:
        if self.model.pool.can_create(3, 1, span):
            self.model.adopt(3, span, late)

    @precondition(has_pages)
    @rule(index=INDEX, late=st.booleans())
    def cow(self, index: int, late: bool) -> None:
        (page,) = self.pick(index)
        told, pool = self.model.pages[page], self.model.pool
        if self.model.top(page) not in told.copies:
            with pytest.raises(InvariantViolation):
                pool.cow(page)
        elif pool.can_create(told.cls, 1, told.span):
            self.model.cow(page, late)

    @precondition(has_pages)
    @rule(
        index=INDEX,
        what=st.sampled_from(["share", "release", "pin", "unpin", "unpin", "write", "touch"]),
        count=st.integers(1, 4),
    )
    def count(self, index: int, what: str, count: int) -> None:
        for page in self.pick(index, count):
            told, pool = self.model.pages[page], self.model.pool
            if what == "share":
                pool.share((page,))
                told.refs += 1
            elif what == "pin":
                pool.pin((page,))
                told.pins += 1
            elif what == "release" and told.refs:
                pool.release((page,))
                told.refs -= 1
                self.model.bury(page)
            elif what == "unpin" and told.pins > sum(u.move.copy_of == page for u in self.model.moves.values()):
                pool.unpin((page,))
                told.pins -= 1
                self.model.bury(page)
            elif what == "write" and told.pins and self.model.top(page) in told.copies:
                self.model.write(page)
            elif what == "touch":
                pool.touch((page,))

    @precondition(has_pages)
    @rule(index=INDEX, steps=st.one_of(st.none(), st.integers(0, 200), st.just(NEVER)))
    def set_next_use(self, index: int, steps: int | None) -> None:
        self.model.pool.set_next_use(self.pick(index), steps)

    @precondition(has_pages)
    @rule(index=INDEX, level=LEVELS, count=st.integers(1, 4), late=st.booleans())
    def begin(self, index: int, level: int, count: int, late: bool) -> None:
        model, pool = self.model, self.model.pool
        able = {p: t for p, t in model.pages.items() if level not in t.copies and t.copies and not t.move}
        pages = sorted(able)[index % max(len(able), 1) :]
        pages = [p for p in pages if (able[p].cls, able[p].copies) == (able[pages[0]].cls, able[pages[0]].copies)][
            :count
        ]
        if not pages or pool.classes[model.pages[pages[0]].cls].tiers[level] < 0:
            return
        cls, tier = model.pages[pages[0]].cls, pool.classes[model.pages[pages[0]].cls].tiers[level]
        if sum(map(pool.span, pages)) > pool.room(cls, tier):
            with pytest.raises(OutOfMemory):
                pool.begin(pages, Level(level))
        elif cls != 3 or len(pages) == 1:
            model.try_begin(pages, level) if not late else self.begin_late(pages, level, cls, tier)
        else:
            for page in pages:
                model.try_begin([page], level)

    def begin_late(self, pages: list[int], level: int, cls: int, tier: int) -> None:
        if self.model.pool.can_create(cls, len(pages), self.model.pool.span(pages[0]), tier):
            self.model.begin(pages, level, late=True)

    @precondition(has_moves)
    @rule(index=INDEX, faults=st.integers(0, 15), bad_source=st.booleans(), aborted=st.booleans())
    def end(self, index: int, faults: int, bad_source: bool, aborted: bool) -> None:
        if not self.model.moves:
            raise NothingToDo
        number = sorted(self.model.moves)[index % len(self.model.moves)]
        hops = self.model.moves[number].move.hops
        bad = frozenset(hop.page for i, hop in enumerate(hops) if faults >> i & 1 and faults != 15)
        self.model.end(number, bad, bad_source, aborted and faults % 3 == 0)

    @precondition(has_pages)
    @rule(index=INDEX, level=LEVELS)
    def drop(self, index: int, level: int) -> None:
        (page,) = self.pick(index)
        told = self.model.pages[page]
        may = len(told.copies) > 1 or self.model.pool.classes[told.cls].recomputable
        if self.model.evictable(page, level) and may:
            self.model.drop(page, level)
        else:
            with pytest.raises(InvariantViolation):
                self.model.pool.drop(page, Level(level))

    @rule(index=INDEX, tier=st.integers(0, 3), dirty=st.booleans())
    def evict(self, index: int, tier: int, dirty: bool) -> None:
        pool = self.model.pool
        for page in list(pool.victims(tier, None, dirty))[: index % 4]:
            if not dirty or pool.classes[pool.cls(page)].recomputable:
                self.model.drop(page, int(pool.tiers[tier].level))

    @precondition(has_moves)
    @rule()
    def end_all(self) -> None:
        for number in sorted(self.model.moves):
            self.model.end(number, frozenset(), False, aborted=False)

    @rule(tier=st.integers(0, 3), cls=st.integers(0, 3), count=st.integers(1, 24), span=st.integers(1, 4))
    def make_room(self, tier: int, cls: int, count: int, span: int) -> None:
        if self.model.pool.classes[cls].tiers[self.model.pool.tiers[tier].level] == tier:
            self.model.make_room(tier, cls, count, span if cls == 3 else 1)

    @rule(tier=st.integers(0, 3), granules=st.integers(1, 12))
    def defragment(self, tier: int, granules: int) -> None:
        pool = self.model.pool
        pages = plan.defragment(pool, tier, granules * GRANULE)
        level = pool.tiers[tier].level
        if pages:
            before = [pool.frame(page, level) for page in pages]
            move = self.model.begin(pages, level, late=len(pages) % 2 == 0)
            assert all(hop.target[1] < hop.source[1] for hop in move.hops) and len(move.hops) == len(before)

    @rule(tier=st.integers(0, 2), granules=st.integers(1, 12))
    def write_back(self, tier: int, granules: int) -> None:
        pool = self.model.pool
        pages = plan.write_back(pool, tier, pool.tiers[tier].space.total_bytes // 2, granules * GRANULE)
        assert all(len(self.model.pages[page].copies) == 1 for page in pages)
        if pages:
            self.model.try_begin(pages, pool.tiers[tier].level + 1)

    @precondition(has_pages)
    @rule(index=INDEX, count=st.integers(1, 40), level=st.sampled_from([0, 1]), granules=st.integers(1, 12))
    def prefetch(self, index: int, count: int, level: int, granules: int) -> None:
        pages = plan.prefetch(self.model.pool, self.pick(index, count), Level(level), granules * GRANULE)
        if pages:
            self.model.try_begin(pages, level)

    @rule(tier=st.integers(0, 100))
    def tier_lost(self, tier: int) -> None:
        if tier in (16, 39, 61, 82):  # now and then
            self.model.tier_lost(tier % 4)

    @invariant()
    def everything_agrees(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        model = self.model
        for number in list(model.moves):
            model.end(number, frozenset(), False, aborted=number % 2 == 0)
        for page, told in list(model.pages.items()):
            model.pool.unpin([page] * told.pins)
            if told.refs:
                model.pool.release([page] * told.refs)
        model.pool.check_integrity()
        for tier in model.pool.tiers:
            assert tier.space.free_bytes == tier.space.total_bytes and tier.pages == 0


def walk(seed: int, steps: int) -> None:
    """The same rules, drawn so that tiers fill up, moves stay open for a while, and pages are written to under them."""
    chance = random.Random(seed)
    machine = PoolMachine()
    machine.start(next_use=bool(seed % 2))

    def flip() -> bool:
        return chance.random() < 0.5

    def index() -> int:
        return chance.randrange(1 << 16)

    def count(what: str) -> Callable[[], None]:
        return lambda: machine.count(index=index(), what=what, count=chance.randint(1, 6))

    actions: dict[Callable[[], None], int] = {
        lambda: machine.create(cls=chance.randrange(4), count=chance.randint(1, 5), span=chance.randint(1, 5), pinned=flip()): 10,
        lambda: machine.adopt(span=chance.randint(1, 5), late=flip()): 2,
        lambda: machine.cow(index=index(), late=flip()): 3,
        count("share"): 1, count("release"): 4, count("pin"): 6, count("unpin"): 8, count("write"): 8, count("touch"): 4,
        lambda: machine.set_next_use(index=index(), steps=chance.choice([None, NEVER, 0, 3, 20, 150])): 3,
        lambda: machine.begin(index=index(), level=chance.randrange(3), count=chance.randint(1, 4), late=flip()): 14,
        lambda: machine.end(index=index(), faults=chance.choice([0, 0, 0, 1, 2, 15]), bad_source=flip(), aborted=chance.random() < 0.2): 12,
        lambda: machine.evict(index=index(), tier=chance.randrange(4), dirty=chance.random() < 0.2): 5,
        lambda: machine.end_all(): 1,
        lambda: machine.make_room(tier=chance.randrange(4), cls=chance.randrange(4), count=chance.randint(4, 24), span=chance.randint(1, 4)): 8,
        lambda: machine.defragment(tier=chance.randrange(4), granules=chance.randint(1, 12)): 5,
        lambda: machine.write_back(tier=chance.randrange(3), granules=chance.randint(1, 12)): 3,
        lambda: machine.prefetch(index=index(), count=30, level=chance.randrange(2), granules=chance.randint(1, 12)): 3,
        lambda: machine.tier_lost(tier=chance.randrange(101)): 2,
    }  # fmt: skip
    for action in chance.choices(list(actions), list(actions.values()), k=steps):
        try:
            action() if machine.model.pages else next(iter(actions))()
        except NothingToDo:
            continue
        machine.everything_agrees()
    machine.teardown()


@pytest.mark.parametrize("seed", seeds(12, 1500))
def test_full_tiers_and_open_moves_agree_with_the_model(seed: int) -> None:
    walk(seed, 150)


def run(examples: int, steps: int) -> None:
    machine: Any = PoolMachine
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )


def test_the_pool_agrees_with_a_dictionary_model_after_every_step() -> None:
    run(40, 40)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_the_pool_agrees_with_a_dictionary_model_for_long() -> None:
    run(1500, 120)
