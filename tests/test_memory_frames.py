"""Frames and extents: long runs, frames that cross extents' edges, all or nothing, and integrity against brute force."""

from __future__ import annotations

import random

import pytest

from hexrt.errors import InvariantViolation, OutOfMemory
from hexrt.memory.bits import find_run, longest_run, run_around, runs_of
from hexrt.memory.frames import EXTENT_BYTES, GRANULE, FrameSpace
from tests.seeds import seeds

MIB = 1 << 20


def space(granules: int, extent: int = 8) -> FrameSpace:
    return FrameSpace(granules * GRANULE, extent * GRANULE)


@pytest.mark.parametrize("seed", seeds(20, 2000))
def test_runs_of_ones_are_found_as_by_hand(seed: int) -> None:
    chance = random.Random(seed)
    bits = chance.getrandbits(60) | chance.getrandbits(60)
    runs = list(runs_of(bits))
    text = bin(bits)[2:][::-1]
    assert [high - low for low, high in runs] == [len(part) for part in text.split("0") if part]
    assert longest_run(bits) == max((high - low for low, high in runs), default=0)
    for length in (1, 2, 3, 7, 20):
        assert find_run(bits, length) == text.find("1" * length)
    for low, high in runs:
        assert run_around(bits, chance.randrange(low, high)) == (low, high)


def test_the_same_size_is_the_same_class_and_no_class_has_broken_granules() -> None:
    frames = space(16)
    assert frames.add_class(GRANULE) == frames.add_class(GRANULE) != frames.add_class(2 * GRANULE)
    with pytest.raises(InvariantViolation, match="not whole granules"):
        frames.add_class(5000)


def test_a_tier_smaller_than_an_extent_is_one_and_the_last_may_be_shorter() -> None:
    assert FrameSpace(3 * GRANULE).extents == 1
    frames = space(19)
    cls = frames.add_class(GRANULE)
    assert (frames.extents, frames.capacity(cls), frames.available(cls)) == (3, 19, 19)
    assert list(frames.allocate(cls, 19)) == list(range(19))
    frames.check_integrity()


def test_frames_come_all_or_not_at_all() -> None:
    frames = space(8)
    cls = frames.add_class(GRANULE)
    held = frames.allocate(cls, 5)
    with pytest.raises(OutOfMemory, match="4 frames of 4096 bytes are needed and 3 are free of 8"):
        frames.allocate(cls, 4)
    assert not frames.can_allocate(cls, 4) and frames.can_allocate(cls, 3)
    frames.free(cls, held)
    assert frames.statistics().free_extents == 1


def test_many_frames_come_as_one_run_where_there_is_one() -> None:
    frames = space(16)
    cls = frames.add_class(GRANULE)
    every = frames.allocate(cls, 16)
    frames.free(cls, [every[1], every[3], *every[9:14]])
    assert list(frames.allocate(cls, 4)) == [9, 10, 11, 12]
    assert list(frames.allocate(cls, 3)) == [1, 3, 13]
    frames.check_integrity()


def test_a_single_frame_is_the_lowest_free_one() -> None:
    frames = space(24)
    cls = frames.add_class(GRANULE)
    every = frames.allocate(cls, 24)
    frames.free(cls, [20, 9, 2])
    assert [frames.allocate_run(cls, 1) for _ in range(3)] == [2, 9, 20]
    assert list(every) == list(range(24))


def test_pages_of_five_mib_lose_nothing_at_the_edges_of_extents() -> None:
    frames = FrameSpace(20 * EXTENT_BYTES)
    cls = frames.add_class(5 * MIB)
    assert frames.available(cls) == 20 * 32 // 5
    frames.allocate(cls, 128)
    frames.check_integrity()
    assert frames.statistics().lost_bytes == 0


def test_a_frame_that_crosses_an_edge_exists_only_while_both_extents_are_of_its_class() -> None:
    frames = space(16)
    threes, ones = frames.add_class(3 * GRANULE), frames.add_class(GRANULE)
    other = frames.allocate(ones, 1)  # takes the upper extent: it loses nothing there
    assert other[0] >= 8 and frames.available(threes) == 2
    frames.free(ones, other)
    assert frames.available(threes) == 5
    assert list(frames.allocate(threes, 5)) == [0, 1, 2, 3, 4]
    frames.free_run(threes, 3, 2)
    frames.check_integrity()
    assert frames.statistics().free_extents == 0  # frame 2 holds the second extent too
    frames.free_run(threes, 2, 1)
    frames.check_integrity()
    assert frames.statistics().free_extents == 1 and frames.available(ones) == 8


def test_a_frame_larger_than_an_extent_takes_several() -> None:
    frames = space(40)
    cls = frames.add_class(20 * GRANULE)
    assert frames.allocate_run(cls, 2) == 0
    frames.check_integrity()
    assert frames.statistics().free_extents == 0
    frames.free_run(cls, 0, 2)
    assert frames.statistics().free_extents == 5


def test_a_run_may_go_over_several_extents() -> None:
    frames = space(40)
    cls = frames.add_class(GRANULE)
    first = frames.allocate_run(cls, 32)
    assert frames.can_allocate_run(cls, 8) and not frames.can_allocate_run(cls, 9)
    with pytest.raises(OutOfMemory, match="9 contiguous frames of 4096 bytes"):
        frames.allocate_run(cls, 9)
    frames.free_run(cls, first + 5, 21)
    assert frames.can_allocate_run(cls, 21) and not frames.can_allocate_run(cls, 22)
    assert frames.allocate_run(cls, 21) == first + 5


def test_the_lowest_run_below_a_limit_is_found_or_none_is() -> None:
    frames = space(16)
    cls = frames.add_class(GRANULE)
    frames.allocate(cls, 16)
    frames.free(cls, [2, 5, 6, 12])
    assert frames.allocate_below(cls, 2, 5) == -1
    assert frames.allocate_below(cls, 2, 9) == 5
    assert frames.allocate_below(cls, 1, 12) == 2
    assert frames.allocate_below(cls, 1, 12) == -1


def test_freeing_twice_is_a_bug_and_changes_nothing() -> None:
    frames = space(16)
    cls = frames.add_class(GRANULE)
    frames.allocate(cls, 8)  # the upper extent
    frames.free_run(cls, 11, 2)
    for first, span in ((11, 1), (10, 2), (2, 1), (40, 1)):
        with pytest.raises(InvariantViolation, match="freed"):
            frames.free_run(cls, first, span)
    frames.check_integrity()


def test_statistics_say_how_scattered_the_free_bytes_are() -> None:
    frames = space(16)
    cls = frames.add_class(GRANULE)
    frames.allocate(cls, 16)
    frames.free(cls, [1, 3, 4, 9])
    told = frames.statistics()
    assert (told.bytes, told.free_bytes, told.held_bytes) == (16 * GRANULE, 4 * GRANULE, 12 * GRANULE)
    assert (told.runs, told.largest_run_bytes, told.fragmentation) == (3, 2 * GRANULE, 0.5)
    assert frames.own_free(cls) == (4, 2) and frames.packed_end(cls) == 12


class Space:
    """A frame space and a list of what is held in it, compared by brute force."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.extent = GRANULE * chance.choice([1, 3, 8, 16])
        self.frames = FrameSpace(GRANULE * chance.randrange(1, 80), self.extent)
        self.classes = [self.frames.add_class(GRANULE * k) for k in chance.sample([1, 2, 3, 5, 7, 20], 3)]
        self.held: list[tuple[int, int, int]] = []

    def owners(self) -> dict[int, int]:
        """Extent -> class, of those cut."""
        owners = {}
        for cls, first, span in self.held:
            size = self.frames.frame_bytes(cls)
            for extent in range(first * size // self.extent, ((first + span) * size - 1) // self.extent + 1):
                assert owners.setdefault(extent, cls) == cls
        return owners

    def usable(self, cls: int) -> set[int]:
        """Free frames whose extents are all the class's or nobody's."""
        size, owners = self.frames.frame_bytes(cls), self.owners()
        taken = {f for c, first, span in self.held if c == cls for f in range(first, first + span)}
        return {
            frame
            for frame in range(self.frames.total_bytes // size)
            if frame not in taken
            and all(
                owners.get(e, cls) == cls
                for e in range(frame * size // self.extent, ((frame + 1) * size - 1) // self.extent + 1)
            )
        }

    def step(self) -> None:
        chance, cls = self.chance, self.chance.choice(self.classes)
        usable, count = self.usable(cls), chance.randrange(1, 8)
        what = chance.random()
        if what < 0.35:
            assert self.frames.available(cls) == len(usable)
            if count <= len(usable):
                taken = self.frames.allocate(cls, count)
                assert set(taken) <= usable and list(taken) == sorted(set(taken)) and len(taken) == count
                self.held += [(cls, frame, 1) for frame in taken]
        elif what < 0.6:
            has_run = any(all(f + i in usable for i in range(count)) for f in usable)
            assert self.frames.can_allocate_run(cls, count) == has_run
            if has_run:
                first = self.frames.allocate_run(cls, count)
                assert all(first + i in usable for i in range(count))
                self.held.append((cls, first, count))
        elif self.held:
            self.frames.free_run(*self.held.pop(chance.randrange(len(self.held))))
        self.check()

    def check(self) -> None:
        self.frames.check_integrity()
        told = self.frames.statistics()
        assert told.held_bytes == sum(self.frames.frame_bytes(cls) * span for cls, _, span in self.held)
        assert told.free_bytes == self.frames.free_bytes
        assert told.free_extents == self.frames.extents - len(self.owners())


@pytest.mark.parametrize("seed", seeds(25, 2000))
def test_whatever_is_taken_and_freed_frames_are_those_that_brute_force_finds(seed: int) -> None:
    tried = Space(seed)
    for _ in range(60):
        tried.step()
    for held in tried.held:
        tried.frames.free_run(*held)
    tried.held = []
    tried.check()
