"""The page pool: given these calls, expect exactly these states, hops and refusals."""

from __future__ import annotations

import msgspec
import pytest

from hexrt.core import SequenceId
from hexrt.errors import InvariantViolation, OutOfMemory
from hexrt.memory.frames import GRANULE, FrameSpace
from hexrt.memory.lru import Lists
from hexrt.memory.pool import NEVER, NOWHERE, Hop, Level, Lru, NextUse, PagePool, PageState, Policy
from hexrt.memory.tables import PageTables

DEVICE, HOST, NVME = Level
A, B, C = SequenceId(1), SequenceId(2), SequenceId(3)


def three_tiers(
    device: int = 4, host: int = 8, nvme: int = 16, policy: Policy | None = None
) -> tuple[PagePool, int, int]:
    """A pool with tiers of so many granules, a class of recomputable pages of one, and the host's class of tensors."""
    pool = PagePool(policy)
    pool.add_tier("cpu:0", DEVICE, FrameSpace(device * GRANULE))
    pool.add_tier("host", HOST, FrameSpace(host * GRANULE))
    pool.add_tier("nvme", NVME, FrameSpace(nvme * GRANULE))
    return pool, pool.add_class(0, GRANULE - 96, True), pool.add_class(1, GRANULE, False)


def stored(pool: PagePool, cls: int, count: int, level: Level = HOST) -> list[int]:
    """Unpinned pages that have a copy at their top and one at `level`."""
    pages = list(pool.create(cls, count))
    pool.unpin(pages)
    pool.commit(pool.begin(pages, level), sums=dict.fromkeys(pages, 77))
    return pages


# --- making and counting ------------------------------------------------------------------------------------------------


def test_new_pages_are_resident_pinned_and_dirty() -> None:
    pool, kv, _ = three_tiers()
    pages = pool.create(kv, 3)
    assert [(pool.state(p), pool.refs(p), pool.pins(p), pool.frame(p, DEVICE)) for p in pages] == [
        (PageState.RESIDENT, 1, 1, frame) for frame in range(3)
    ]
    assert pool.room(kv) == 1 and pool.capacity(kv) == 4
    told = pool.statistics()[0]
    assert (told.pages, told.dirty_pages, told.pinned_pages, told.frames.held_bytes) == (3, 3, 3, 3 * GRANULE)
    pool.check_integrity()


def test_pages_come_all_or_not_at_all() -> None:
    pool, kv, tensor = three_tiers()
    with pytest.raises(OutOfMemory, match="5 frames of 4096 bytes are needed and 4 are free of 4"):
        pool.create(kv, 5)
    assert pool.can_create(tensor, 2, 4) and not pool.can_create(tensor, 2, 5)
    with pytest.raises(OutOfMemory, match="contiguous"):
        pool.create(tensor, 2, 5)
    assert pool.room(tensor) == 8
    pool.check_integrity()


def test_a_page_is_gone_with_its_last_reference_and_pin() -> None:
    pool, kv, _ = three_tiers()
    (page,) = pool.create(kv, 1)
    pool.share([page])
    pool.release([page, page])
    assert page in pool  # a host may still read it
    pool.unpin([page])
    assert page not in pool and pool.room(kv) == 4
    for call in (pool.release, pool.share, pool.pin, pool.unpin, pool.write):
        with pytest.raises(InvariantViolation, match="none"):
            call([page])
    pool.check_integrity()


def test_releasing_or_unpinning_too_often_is_a_bug_with_the_pages_story() -> None:
    pool, kv, _ = three_tiers()
    (page,) = pool.create(kv, 1)
    pool.release([page])
    with pytest.raises(
        InvariantViolation, match=r"released too often: page 0 of class 0 .* RESIDENT .* 0 references, 1 pins"
    ):
        pool.release([page])
    (other,) = pool.create(kv, 1)
    pool.unpin([other])
    with pytest.raises(InvariantViolation, match="unpinned too often"):
        pool.unpin([other])


# --- moves --------------------------------------------------------------------------------------------------------------


def test_a_page_goes_down_and_comes_back_one_hop_at_a_time() -> None:
    pool, kv, _ = three_tiers()
    (page,) = pool.create(kv, 1)
    pool.unpin([page])
    move = pool.begin([page], HOST)
    assert move.hops == (Hop(page, (0, 0), (1, 0), GRANULE),)
    assert pool.state(page) is PageState.STORING and pool.moving(page) and pool.open_moves() == {move.number}
    pool.commit(move)
    assert pool.state(page) is PageState.RESIDENT and pool.has(page, HOST)
    pool.drop(page, DEVICE)
    assert pool.state(page) is PageState.ABSENT
    pool.commit(pool.begin([page], NVME), sums={page: 1 << 63})
    assert pool.sum(page) == 1 << 63
    pool.drop(page, HOST)
    pool.pin([page])
    up = pool.begin([page], HOST)
    assert pool.state(page) is PageState.LOADING
    pool.commit(up)
    assert pool.state(page) is PageState.ABSENT  # not at its top yet
    pool.commit(pool.begin([page], DEVICE))
    assert pool.state(page) is PageState.RESIDENT
    pool.check_integrity()


def test_frames_of_a_move_are_reserved_for_all_its_pages_or_for_none() -> None:
    pool, kv, _ = three_tiers(device=4, host=2)
    pages = pool.create(kv, 3)
    with pytest.raises(OutOfMemory):
        pool.begin(pages, HOST)
    assert pool.room(kv, 1) == 2 and not pool.open_moves()
    assert all(pool.state(page) is PageState.RESIDENT for page in pages)
    pool.check_integrity()


def test_hops_go_in_order_of_their_sources_whatever_order_was_asked() -> None:
    pool, kv, _ = three_tiers()
    pages = list(pool.create(kv, 4))
    move = pool.begin([pages[i] for i in (2, 0, 3, 1)], HOST)
    assert [(hop.source[1], hop.target[1]) for hop in move.hops] == [(i * GRANULE, i * GRANULE) for i in range(4)]


def test_a_page_is_in_one_move_at_a_time_and_a_closed_tier_takes_none() -> None:
    pool, kv, _ = three_tiers()
    pages = list(pool.create(kv, 2))
    pool.begin(pages[:1], HOST)
    with pytest.raises(InvariantViolation, match="cannot be moved to HOST"):
        pool.begin(pages[:1], HOST)
    with pytest.raises(InvariantViolation, match="twice"):
        pool.begin([pages[1], pages[1]], HOST)
    pool.tiers[1].closed, pool.tiers[1].degraded = True, "a disk failed"
    with pytest.raises(OutOfMemory, match="host takes no pages: a disk failed"):
        pool.begin(pages[1:], HOST)
    assert pool.room(kv, 1) == 0
    pool.check_integrity()


def test_a_move_that_is_aborted_never_was() -> None:
    pool, kv, _ = three_tiers()
    pages = pool.create(kv, 2)
    move = pool.begin(pages, HOST)
    pool.abort(move)
    assert pool.room(kv, 1) == 8 and not pool.moving(pages[0])
    with pytest.raises(InvariantViolation, match="is not open"):
        pool.commit(move)
    pool.check_integrity()


def test_a_fault_frees_the_target_and_a_bad_source_is_lost() -> None:
    pool, kv, _ = three_tiers()
    first, second = stored(pool, kv, 2)
    for page in (first, second):
        pool.drop(page, DEVICE)
    pool.commit(pool.begin([first, second], DEVICE), faults=frozenset([second]))
    assert pool.has(first, DEVICE) and not pool.has(second, DEVICE) and pool.has(second, HOST)
    pool.commit(pool.begin([second], DEVICE), faults=frozenset([second]), bad_source=True)
    assert pool.is_lost(second) and pool.state(second) is PageState.ABSENT
    assert (pool.statistics()[0].faults, pool.statistics()[1].faults) == (1, 1)
    pool.check_integrity()


def test_a_page_released_in_a_move_is_gone_at_the_moves_end() -> None:
    for end in (PagePool.commit, PagePool.abort):
        pool, kv, _ = three_tiers()
        pages = pool.create(kv, 1)
        pool.unpin(pages)
        move = pool.begin(pages, HOST)
        pool.release(pages)
        assert pages[0] in pool and pool.room(kv) == 3
        end(pool, move)
        assert pages[0] not in pool and pool.room(kv) == 4 and pool.room(kv, 1) == 8
        pool.check_integrity()


def test_a_page_written_to_while_it_is_stored_keeps_only_what_was_written() -> None:
    pool, kv, _ = three_tiers()
    (page,) = stored(pool, kv, 1)
    pool.pin([page])
    move = pool.begin([page], NVME)
    pool.write([page])
    assert not pool.has(page, HOST)
    pool.commit(move)
    assert pool.has(page, DEVICE) and not pool.has(page, HOST) and not pool.has(page, NVME)
    assert pool.room(kv, 1) == 8
    pool.check_integrity()


def test_writing_voids_the_copies_below_and_needs_a_pin() -> None:
    pool, kv, _ = three_tiers()
    (page,) = stored(pool, kv, 1)
    with pytest.raises(InvariantViolation, match="not pinned"):
        pool.write([page])
    pool.pin([page])
    pool.write([page])
    assert not pool.has(page, HOST) and pool.statistics()[0].dirty_pages == 1


def test_a_shared_page_is_copied_before_it_is_written_to() -> None:
    pool, kv, _ = three_tiers()
    (page,) = pool.create(kv, 1)
    pool.unpin([page])
    new, move = pool.cow(page)
    assert move.hops == (Hop(new, (0, 0), (0, GRANULE), GRANULE),) and pool.pins(page) == 1
    assert pool.state(new) is PageState.LOADING
    pool.commit(move)
    assert pool.state(new) is PageState.RESIDENT and (pool.refs(new), pool.pins(new), pool.pins(page)) == (1, 1, 0)
    pool.check_integrity()


def test_an_adopted_page_is_filled_from_outside_or_is_lost() -> None:
    pool, _, tensor = three_tiers()
    page, move = pool.adopt(tensor, 3)
    assert move.hops == (Hop(page, (NOWHERE, 0), (1, 0), 3 * GRANULE),)
    pool.commit(move)
    assert pool.state(page) is PageState.RESIDENT
    other, failing = pool.adopt(tensor, 2)
    pool.abort(failing)
    assert pool.is_lost(other) and pool.refs(other) == 1
    pool.check_integrity()


def test_a_relocated_page_takes_a_lower_frame_unless_it_is_pinned_meanwhile() -> None:
    pool, kv, _ = three_tiers()
    low, high = pool.create(kv, 2)
    pool.unpin([low, high])
    pool.release([low])
    move = pool.begin([high], DEVICE)
    assert pool.state(high) is PageState.STORING and pool.frame(high, DEVICE) == 1
    pool.pin([high])
    pool.commit(move)
    assert pool.frame(high, DEVICE) == 1
    with pytest.raises(InvariantViolation, match="pinned and relocated"):
        pool.begin([high], DEVICE)
    pool.unpin([high])
    pool.commit(pool.begin([high], DEVICE))
    assert pool.frame(high, DEVICE) == 0 and pool.room(kv) == 3
    with pytest.raises(OutOfMemory, match="no lower frames"):
        pool.begin([high], DEVICE)
    pool.check_integrity()


# --- evicting -----------------------------------------------------------------------------------------------------------


def test_the_last_copy_is_dropped_only_where_it_can_be_recomputed() -> None:
    pool, kv, tensor = three_tiers()
    pages = [*pool.create(kv, 1), *pool.create(tensor, 1)]
    for page, level in zip(pages, (DEVICE, HOST), strict=True):
        with pytest.raises(InvariantViolation, match="cannot be evicted"):
            pool.drop(page, level)
    pool.unpin(pages)
    pool.drop(pages[0], DEVICE)
    assert pool.is_lost(pages[0])
    with pytest.raises(InvariantViolation, match="last copy"):
        pool.drop(pages[1], HOST)
    assert pool.statistics()[0].discards == 1


def test_victims_come_coldest_first_and_neither_pinned_nor_moving() -> None:
    pool, kv, _ = three_tiers(device=6)
    pages = list(pool.create(kv, 6))
    pool.unpin(pages)
    pool.touch([pages[0], pages[3]])
    pool.pin([pages[1]])
    pool.begin([pages[2]], HOST)
    assert list(pool.victims(0)) == [pages[i] for i in (4, 5, 0, 3)]


def test_a_page_written_back_keeps_its_place_among_the_cold() -> None:
    pool, kv, _ = three_tiers(device=6)
    pages = list(pool.create(kv, 6))
    pool.unpin(pages)
    pool.commit(pool.begin(pages[1:3], HOST))
    assert list(pool.victims(0)) == pages
    assert list(pool.victims(0, kv, dirty=False)) == pages[1:3]


def test_a_pinned_page_guards_its_copy_at_the_top_and_else_those_it_comes_from() -> None:
    pool, kv, _ = three_tiers()
    (page,) = stored(pool, kv, 1)
    pool.pin([page])
    assert list(pool.victims(0)) == [] and list(pool.victims(1)) == [page]
    pool.unpin([page])
    pool.drop(page, DEVICE)
    pool.pin([page])
    assert list(pool.victims(1)) == []


def test_next_use_puts_those_never_read_again_first_and_the_unknown_between_far_and_near() -> None:
    pool, kv, _ = three_tiers(device=6, policy=NextUse())
    pages = list(pool.create(kv, 5))
    pool.unpin(pages)
    for page, steps in zip(pages, (1, None, NEVER, 500, 4), strict=True):
        pool.set_next_use([page], steps)
    assert list(pool.victims(0)) == [pages[i] for i in (2, 3, 1, 4, 0)]
    buckets = [NextUse().bucket(steps) for steps in range(300)]
    assert buckets == sorted(buckets, reverse=True) and set(buckets) == {1, 2, 3, 5, 6, 7}
    assert Lru().bucket(NEVER) == 0


def test_a_lost_tier_takes_its_copies_and_its_moves_along() -> None:
    pool, kv, _ = three_tiers()
    safe = stored(pool, kv, 1)[0]
    alone, moving = pool.create(kv, 2)
    pool.begin([moving], HOST)
    assert set(pool.tier_lost(0)) == {alone, moving}
    assert pool.has(safe, HOST) and not pool.open_moves() and pool.room(kv) == 4
    pool.check_integrity()
    pool.commit(pool.begin([safe], DEVICE))
    assert pool.state(safe) is PageState.RESIDENT


def test_a_tier_added_later_is_below_the_classes_that_are_there() -> None:
    pool = PagePool()
    pool.add_tier("cpu:0", DEVICE, FrameSpace(4 * GRANULE))
    kv = pool.add_class(0, GRANULE, True)
    assert pool.add_class(0, GRANULE, True) == kv != pool.add_class(0, GRANULE, False)
    (page,) = pool.create(kv, 1)
    with pytest.raises(InvariantViolation, match="cannot be moved to HOST"):
        pool.begin([page], HOST)
    pool.add_tier("host", HOST, FrameSpace(4 * GRANULE))
    with pytest.raises(InvariantViolation, match="second tier of HOST"):
        pool.add_tier("more", HOST, FrameSpace(4 * GRANULE))
    pool.commit(pool.begin([page], HOST))
    pool.check_integrity()


def test_statistics_count_copies_and_can_be_sent() -> None:
    pool, kv, _ = three_tiers()
    pages = stored(pool, kv, 3)
    pool.drop(pages[0], DEVICE)
    device, host, _ = pool.statistics()
    assert (device.copies_out, device.bytes_out, host.copies_in, host.bytes_in) == (3, 3 * GRANULE, 3, 3 * GRANULE)
    assert (device.evictions, device.pages, device.dirty_pages, host.dirty_pages) == (1, 2, 0, 1)
    assert b"cpu:0" in msgspec.json.encode(pool.statistics())


# --- lists and tables ---------------------------------------------------------------------------------------------------


def test_a_list_gives_up_any_node_and_knows_which_list_a_node_is_in() -> None:
    lists = Lists()
    lists.grow(5)
    first, second = lists.add_lists(1), lists.add_lists(1)
    lists.heat((0, 1, 2, 4), first)
    lists.heat((3,), second)
    lists.remove(1)
    lists.touch((0,))
    assert (list(lists.iterate(first)), lists.size(first), lists.front(first)) == ([2, 4, 0], 3, 2)
    assert (lists.list_of(3), lists.list_of(1), lists.front(second)) == (second, 0, 3)
    lists.take_out((1,))
    assert lists.list_of(1) == 0


def test_tables_hold_one_reference_an_entry_and_count_their_changes() -> None:
    pool, kv, _ = three_tiers(device=8)
    tables = PageTables(pool)
    tables.create(A, pool.create(kv, 4))
    pool.unpin(tables.table(A))
    assert tables.frames(A) == (0, 1, 2, 3) and tables.version(A) == 1
    assert list(tables.share(A, B, 2)) == list(tables.table(A)[:2])
    assert list(tables.truncate(A, 1)) and tables.version(A) == 2 and pool.room(kv) == 6
    tables.check_integrity()
    tables.release(A)
    assert pool.room(kv) == 6 and tables.sequences() == {B} and B in tables
    tables.release(B)
    assert pool.room(kv) == 8
    with pytest.raises(InvariantViolation, match="has no page table"):
        tables.table(A)


def test_a_table_takes_a_private_copy_in_and_says_where_it_is_lost() -> None:
    pool, kv, _ = three_tiers(device=8)
    tables = PageTables(pool)
    tables.create(A, pool.create(kv, 3))
    tables.share(A, B, 3)
    with pytest.raises(InvariantViolation, match="already"):
        tables.create(B)
    with pytest.raises(InvariantViolation, match="cannot share 9 of 3"):
        tables.share(A, C, 9)
    new, move = pool.cow(tables.table(B)[1])
    pool.commit(move)
    tables.create(C, (tables.table(A)[0], new))
    pool.share(tables.table(A)[:1])
    assert pool.refs(tables.table(A)[1]) == 2 and tables.lost_at(C) is None
    pool.unpin((new,))
    pool.unpin(tables.table(A))
    pool.drop(new, DEVICE)
    assert tables.lost_at(C) == 1 and tables.lost_at(A) is None
    with pytest.raises(InvariantViolation, match="no copy at DEVICE"):
        tables.frames(C)
    tables.check_integrity()
