"""Plans over the page pool: the fewest copies, whom to evict, what to write ahead, to fetch ahead and to tidy up."""

from __future__ import annotations

import random

import pytest

from hexrt.memory import plan
from hexrt.memory.frames import GRANULE, FrameSpace
from hexrt.memory.keeper import Keeper
from hexrt.memory.plan import Room, Run
from hexrt.memory.pool import Hop, Level, PagePool
from hexrt.scheduling.links import Links
from tests.seeds import seeds

DEVICE, HOST, NVME = Level


def tiers(device: int = 8, host: int = 8, nvme: int = 16, extent: int = 8) -> PagePool:
    pool = PagePool()
    for name, level, granules in (("cpu:0", DEVICE, device), ("host", HOST, host), ("nvme", NVME, nvme)):
        if granules:
            pool.add_tier(name, level, FrameSpace(granules * GRANULE, extent * GRANULE))
    return pool


def loose(pool: PagePool, cls: int, count: int, span: int = 1) -> list[int]:
    pages = list(pool.create(cls, count, span))
    pool.unpin(pages)
    return pages


# --- coalesce -----------------------------------------------------------------------------------------------------------


def test_hops_that_touch_at_both_ends_are_one_copy() -> None:
    def hop(page: int, source: int, target: int) -> Hop:
        return Hop(page, (0, source * 10), (1, target * 10), 10)

    runs = plan.coalesce([hop(3, 6, 2), hop(1, 4, 0), hop(2, 5, 1), hop(4, 7, 9), hop(5, 9, 10)])
    assert runs == [Run(0, 40, 1, 0, 10, [1, 2, 3]), Run(0, 70, 1, 90, 10, [4]), Run(0, 90, 1, 100, 10, [5])]


def test_pages_of_other_sizes_or_tiers_are_never_one_copy() -> None:
    hops = [Hop(1, (0, 0), (1, 0), 10), Hop(2, (0, 10), (1, 10), 20), Hop(3, (0, 30), (2, 30), 20)]
    assert [run.pages for run in plan.coalesce(hops)] == [[1], [2], [3]]


@pytest.mark.parametrize("seed", seeds(20, 1000))
def test_coalesced_runs_hold_every_hop_once_and_none_could_be_joined(seed: int) -> None:
    chance = random.Random(seed)
    frames = chance.sample(range(40), 25)
    hops = [Hop(i, (0, 8 * f), (1, 8 * (f if chance.random() < 0.8 else 100 + i)), 8) for i, f in enumerate(frames)]
    runs = plan.coalesce(hops)
    found = [
        Hop(page, (r.source, r.source_offset + 8 * i), (r.target, r.target_offset + 8 * i), 8)
        for r in runs
        for i, page in enumerate(r.pages)
    ]
    assert sorted(found, key=lambda hop: hop.page) == hops
    ends = {(r.source_offset + 8 * len(r.pages), r.target_offset + 8 * len(r.pages)) for r in runs}
    assert not ends & {(r.source_offset, r.target_offset) for r in runs}


# --- make_room ----------------------------------------------------------------------------------------------------------


def test_where_there_is_room_nobody_goes() -> None:
    pool = tiers()
    kv = pool.add_class(0, GRANULE, True)
    loose(pool, kv, 3)
    assert plan.make_room(pool, 0, kv, 5, True) == Room()


def test_clean_pages_go_first_then_dirty_ones_are_stored() -> None:
    pool = tiers()
    kv = pool.add_class(0, GRANULE, True)
    pages = loose(pool, kv, 8)
    pool.commit(pool.begin(pages[4:6], HOST))
    assert plan.make_room(pool, 0, kv, 1, True) == Room(drops=[pages[4]])
    assert plan.make_room(pool, 0, kv, 4, True) == Room(drops=pages[4:6], stores=pages[:2])


def test_what_open_moves_will_free_is_waited_for() -> None:
    pool = tiers()
    kv = pool.add_class(0, GRANULE, True)
    pages = loose(pool, kv, 8)
    pool.begin(pages[:2], HOST)
    assert plan.make_room(pool, 0, kv, 2, True) == Room()
    assert plan.make_room(pool, 0, kv, 3, True) == Room(stores=[pages[2]])


def test_without_room_below_recomputable_pages_are_discarded_and_others_stay() -> None:
    pool = tiers(device=8, host=0, nvme=0)
    kv, fixed = pool.add_class(0, GRANULE, True), pool.add_class(0, GRANULE, False)
    stays, goes = loose(pool, fixed, 4), loose(pool, kv, 4)
    assert plan.make_room(pool, 0, kv, 2, True) == Room(discards=goes[:2])
    assert plan.make_room(pool, 0, kv, 2, False) == Room()
    assert plan.make_room(pool, 0, kv, 8, True) == Room(discards=goes)
    assert stays


def test_a_full_tier_below_makes_room_itself_first() -> None:
    pool = tiers(device=4, host=4, nvme=8)
    kv = pool.add_class(0, GRANULE, True)
    below = loose(pool, kv, 4)
    pool.commit(pool.begin(below, HOST))
    for page in below:
        pool.drop(page, DEVICE)
    pages = loose(pool, kv, 4)
    assert plan.make_room(pool, 0, kv, 2, True) == Room(stores=pages[:2])
    assert plan.make_room(pool, 1, kv, 2, True) == Room(stores=below[:2])
    pool.pin(below)
    assert plan.make_room(pool, 0, kv, 2, True) == Room(discards=pages[:2])


def test_pages_not_worth_storing_are_discarded() -> None:
    pool = tiers()
    kv = pool.add_class(0, GRANULE, True)
    pages = loose(pool, kv, 8)
    room = plan.make_room(pool, 0, kv, 3, True, admits=lambda page: page == pages[1])
    assert (
        sorted(room.stores + room.discards) != [] and pages[1] in room.stores + room.discards
    ) or room.discards == pages[:3]
    assert len(room.stores) + len(room.discards) == 3 and set(room.stores) <= {pages[1]}


def test_an_extent_of_another_class_goes_whole_where_it_is_the_coldest() -> None:
    pool = tiers(device=16, host=32)
    kv, other = pool.add_class(0, GRANULE, True), pool.add_class(0, 2 * GRANULE, True)
    cold, hot = loose(pool, other, 4), loose(pool, kv, 8)
    room = plan.make_room(pool, 0, kv, 2, True)
    assert (sorted(room.stores), room.drops) == (sorted(cold), [])
    pool.touch(cold[:1])
    assert plan.make_room(pool, 0, kv, 2, True).stores == hot[:2]
    pool.pin(hot)
    assert sorted(plan.make_room(pool, 0, kv, 2, True).stores) == sorted(cold)
    pool.pin(cold[:1])
    assert plan.make_room(pool, 0, kv, 2, True) == Room()


def test_few_pages_of_another_class_in_the_only_extent_make_way_for_many() -> None:
    keeper = Keeper(PagePool(), Links())
    keeper.add_host(64 * GRANULE)
    keeper.add_device("cpu:0", 64 * GRANULE)
    pool, small, large = keeper.pool, keeper.page_class("cpu:0", GRANULE), keeper.page_class("cpu:0", 2 * GRANULE)
    few = loose(pool, small, 2)
    assert plan.make_room(pool, pool.top(large), large, 14, True).frames >= 14
    assert keeper.short_of(large, 14) == 0
    pool.pin(few[:1])
    assert not keeper.make_room(large, 14) and all(page in pool for page in few)
    pool.unpin(few[:1])
    assert keeper.make_room(large, 14) or keeper.traffic.has_queued
    for page in few:
        assert page not in pool or pool.moving(page)


def test_room_for_a_long_run_is_made_until_there_is_one() -> None:
    pool = tiers(device=0, host=16, nvme=64)
    tensor = pool.add_class(0, GRANULE, False)
    pages = loose(pool, tensor, 16)
    pool.release(pages[::2])
    rounds = 0
    while not pool.can_create(tensor, 1, 6):
        room = plan.make_room(pool, 0, tensor, 1, True, span=6)
        assert room.stores
        pool.commit(pool.begin(room.stores, NVME))
        for page in room.stores:
            pool.drop(page, HOST)
        rounds += 1
    assert rounds <= 3


# --- ahead of time ------------------------------------------------------------------------------------------------------


def test_the_coldest_dirty_pages_are_written_back_below_the_low_watermark_only() -> None:
    pool = tiers(device=32, host=64)
    kv = pool.add_class(0, GRANULE, True)
    low, high = plan.watermarks(pool, 0)
    assert (low, high) == (2 * GRANULE, 4 * GRANULE)
    pages = loose(pool, kv, 30)
    assert plan.write_back(pool, 0, low, 99 * GRANULE) == []
    pages += loose(pool, kv, 1)
    assert plan.write_back(pool, 0, low, 99 * GRANULE) == pages[:3]
    assert plan.write_back(pool, 0, low, 2 * GRANULE) == pages[:2]
    assert plan.write_back(pool, 0, low, 99 * GRANULE, lambda page: page != pages[0]) == pages[1:4]
    move = pool.begin(pages[:3], HOST)
    assert plan.write_back(pool, 0, low, 99 * GRANULE) == []  # on its way already
    pool.commit(move)
    assert plan.write_back(pool, 0, low, 99 * GRANULE) == []


def test_the_next_steps_pages_are_fetched_in_order_as_far_as_room_goes() -> None:
    pool = tiers(device=8, host=16)
    kv = pool.add_class(0, GRANULE, True)
    pages = loose(pool, kv, 6)
    pool.commit(pool.begin(pages, HOST))
    for page in pages[1:]:
        pool.drop(page, DEVICE)
    pool.begin(pages[2:3], DEVICE)
    assert plan.prefetch(pool, pages, DEVICE, 2 * GRANULE) == [pages[1], pages[3]]
    assert plan.prefetch(pool, [*reversed(pages)], DEVICE, 99 * GRANULE) == [pages[5], pages[4], pages[3], pages[1]]


def packed(pool: PagePool, tier: int, batch: int) -> int:
    """Carries out what defragmentation wants until it wants nothing; how many moves that took."""
    moves = 0
    while pages := plan.defragment(pool, tier, batch * GRANULE):
        move = pool.begin(pages, pool.tiers[tier].level)
        pool.check_integrity()
        pool.commit(move)
        pool.check_integrity()
        moves += 1
        assert moves < 1000
    return moves


def test_scattered_pages_move_together_so_that_extents_come_free() -> None:
    pool = tiers(device=32)
    kv = pool.add_class(0, GRANULE, True)
    pages = loose(pool, kv, 32)
    pool.release([page for page in pages if page % 4])
    assert pool.tiers[0].space.statistics().free_extents == 0
    assert packed(pool, 0, 4) > 0
    told = pool.tiers[0].space.statistics()
    assert (told.free_extents, told.fragmentation) == (3, 0.0)


def test_holes_within_one_extent_become_one_run_around_pinned_pages() -> None:
    pool = tiers(device=8)
    kv = pool.add_class(0, GRANULE, True)
    pages = loose(pool, kv, 8)
    pool.release([pages[0], pages[2], pages[5]])
    pool.pin([pages[7]])
    assert packed(pool, 0, 32) == 1
    assert pool.frame(pages[7], DEVICE) == 7
    assert sorted(pool.frame(p, DEVICE) for p in (pages[1], pages[3], pages[4], pages[6])) == [0, 1, 3, 4]


@pytest.mark.parametrize("seed", seeds(15, 600))
def test_defragmentation_ends_and_never_scatters(seed: int) -> None:
    chance = random.Random(seed)
    pool = tiers(device=48, extent=chance.choice([8, 12, 48]))
    classes = [pool.add_class(0, GRANULE * k, True) for k in chance.sample([1, 2, 3, 5], 2)]
    pages: list[int] = []
    for _ in range(30):
        cls, span = chance.choice(classes), chance.choice([1, 1, 2])
        if pool.can_create(cls, 1, span):
            pages += loose(pool, cls, 1, span)
    kept = [page for page in pages if chance.random() < 0.4 or not pool.release([page])]
    kept = [page for page in kept if page in pool]
    pool.pin(page for page in kept if chance.random() < 0.1)
    before = pool.tiers[0].space.statistics()
    packed(pool, 0, chance.randrange(1, 20))
    after = pool.tiers[0].space.statistics()
    assert after.free_extents >= before.free_extents and after.held_bytes == before.held_bytes


def test_a_page_is_stored_only_where_loading_it_back_is_cheaper_than_recomputing() -> None:
    assert plan.admit(4096, store_ns=10, load_ns=10, recompute_ns=100, reuse_probability=0.5)
    assert not plan.admit(4096, store_ns=10, load_ns=10, recompute_ns=25, reuse_probability=0.5)
    assert not plan.admit(4096, store_ns=1, load_ns=100, recompute_ns=50, reuse_probability=1.0)
    assert not plan.admit(4096, store_ns=1, load_ns=1, recompute_ns=1e9, reuse_probability=0.0)
