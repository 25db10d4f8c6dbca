"""The page file's engine against real files: what is stored comes back or is named, page by page, whatever single call fails."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from hexrt.cli import bench_disk
from hexrt.memory.arena import SYSTEM
from hexrt.memory.requests import MAX_PARTS, REQUEST_BYTES, Part, Request, Run, cut
from hexrt.protocol.host import HOST, Piece
from tests.disk_rig import FIXED, KIB, MIB, PAGE, SEGMENT, SIZE, Gate, Rig, load, store
from tests.seeds import seeds

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["direct", "buffered"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, request.param == "direct")
    yield made
    made.close()


@pytest.fixture
def direct(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, True)
    yield made
    made.close()


class TestBytes:
    @pytest.mark.parametrize("page_bytes", [4 * KIB, 12 * KIB, 360 * KIB, MIB, 4 * MIB, 5 * MIB, 9 * MIB + 4 * KIB])
    def test_pages_come_back_as_they_went_with_the_sums_of_their_bytes(self, rig: Rig, page_bytes: int) -> None:
        data, pages = rig.fill(), min(SIZE // page_bytes, 200)
        stored = rig.copy(store(page_bytes, pages))
        expected = tuple(xxh3_64_intdigest(data[n * page_bytes : (n + 1) * page_bytes]) for n in range(pages))
        assert (stored.sums, stored.faults, stored.bytes) == (expected, (), pages * page_bytes)
        rig.host[:] = bytes(SIZE)
        loaded = rig.copy(load(page_bytes, stored.sums))
        assert (loaded.sums, loaded.faults, loaded.bytes) == ((), (), pages * page_bytes)
        assert rig.host[: pages * page_bytes] == data[: pages * page_bytes]

    def test_pages_strewn_over_memory_keep_their_order_in_the_file(self, direct: Rig) -> None:
        data = direct.fill()
        order = random.Random(1).sample(range(100), 100)
        stored = direct.copy(*(store(4 * KIB, 1, page * 4 * KIB, n * 4 * KIB) for n, page in enumerate(order)))
        assert stored.sums == tuple(xxh3_64_intdigest(data[p * 4 * KIB : (p + 1) * 4 * KIB]) for p in order)
        direct.copy(load(4 * KIB, stored.sums, host=MIB))
        for n, page in enumerate(order):
            assert (
                direct.host[MIB + n * 4 * KIB : MIB + (n + 1) * 4 * KIB] == data[page * 4 * KIB : (page + 1) * 4 * KIB]
            )

    def test_bytes_move_between_host_and_segments_at_any_offset(self, rig: Rig) -> None:
        data = rig.fill()
        moved = rig.copy(Piece(HOST, 77, SEGMENT, 3, 5_000_001, 1), Piece(FIXED, 3, HOST, 6_000_001, 5_000_001, 1))
        assert (moved.bytes, moved.sums, moved.faults) == (10_000_002, (), ())
        assert rig.segment[3:5_000_004] == data[77:5_000_078] == rig.host[6_000_001:11_000_002]

    @pytest.mark.parametrize("shift", [-4 * KIB, 4 * KIB, 1, -MIB])
    def test_ends_that_overlap_are_moved_as_if_at_once(self, direct: Rig, shift: int) -> None:
        data = direct.fill()
        direct.copy(Piece(HOST, MIB, HOST, MIB + shift, 4 * KIB, 10 * 256))
        assert direct.host[MIB + shift : 11 * MIB + shift] == data[MIB : 11 * MIB]

    def test_one_copy_may_store_load_and_move(self, rig: Rig) -> None:
        data = rig.fill()
        sums = rig.copy(store(MIB, 2)).sums
        report = rig.copy(
            Piece(HOST, 4 * MIB, SEGMENT, 0, MIB, 1), load(MIB, sums, host=10 * MIB), store(5 * MIB, 1, 4 * MIB, 4 * MIB),
            store(MIB, 1, 0, 11 * MIB),
        )  # fmt: skip
        assert report.sums == (xxh3_64_intdigest(data[4 * MIB : 9 * MIB]), sums[0]) and report.bytes == 9 * MIB
        assert rig.segment[:MIB] == data[4 * MIB : 5 * MIB] and rig.host[10 * MIB : 12 * MIB] == data[: 2 * MIB]

    def test_a_copy_of_nothing_ends(self, direct: Rig) -> None:
        report = direct.copy()
        assert (report.bytes, report.sums, report.faults) == (0, (), ())

    @pytest.mark.parametrize("seed", seeds(4, 200))
    def test_many_copies_at_once_agree_with_a_dictionary(self, direct: Rig, seed: int) -> None:
        """Each page of the file has a value and a sum; copies in flight never share a page, as the daemon sees to."""
        chance = random.Random(seed)
        page_bytes = chance.choice([4 * KIB, 64 * KIB, 360 * KIB, 5 * MIB])
        slots = min(SIZE // page_bytes, 64)
        model: dict[int, tuple[bytes, int]] = {}
        for _ in range(6):
            slots_now = chance.sample(range(slots), slots)
            expected: dict[int, tuple[str, tuple[int, ...]]] = {}
            while slots_now:
                taken, slots_now = slots_now[: chance.randint(1, 9)], slots_now[9:]
                writes = all(slot in model for slot in taken) is False or chance.random() < 0.5
                for slot in taken:
                    fresh = chance.randbytes(64) * (page_bytes // 64) if writes else bytes(page_bytes)
                    direct.host[slot * page_bytes : (slot + 1) * page_bytes] = fresh
                    if writes:
                        model[slot] = (fresh, xxh3_64_intdigest(fresh))
                at = [slot * page_bytes for slot in taken]
                pieces = [store(page_bytes, 1, here, here) if writes else load(page_bytes, (model[slot][1],), here, here) for slot, here in zip(taken, at, strict=True)]  # fmt: skip
                expected[direct.begin(*pieces)] = ("w" if writes else "r", tuple(taken))
            for _ in range(len(expected)):
                report = direct.reports.get(timeout=30)
                kind, taken_now = expected.pop(report.command)
                assert report.faults == () and report.bytes == page_bytes * len(taken_now)
                assert report.sums == (tuple(model[slot][1] for slot in taken_now) if kind == "w" else ())
                for slot in taken_now:
                    assert direct.host[slot * page_bytes : (slot + 1) * page_bytes] == model[slot][0]
        assert direct.shown[-1] == 0


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[tuple[Rig, Gate]]:
    rig, gate = Rig(tmp_path, True, depth=1), Gate()
    rig.calls = replace(SYSTEM, pwritev=gate.pwritev)
    yield rig, gate
    gate.open.set()
    rig.close()


class TestSeveralAtOnce:
    def test_what_has_not_begun_can_be_taken_out_and_what_has_cannot(self, hanging: tuple[Rig, Gate]) -> None:
        rig, gate = hanging
        first = rig.begin(store(PAGE, 1))
        gate.entered.get(timeout=30)
        second = rig.begin(store(PAGE, 1, file=PAGE))
        assert rig.disk.take_out(second) and not rig.disk.take_out(second)
        assert not rig.disk.take_out(first) and not rig.disk.take_out(99)
        gate.open.set()
        assert rig.reports.get(timeout=30).command == first
        assert not rig.disk.take_out(first) and rig.shown == [first, 0]
        assert rig.copy(store(PAGE, 1)).command == 3  # and nothing of the second came

    def test_a_disk_that_hangs_holds_up_no_move_in_memory(self, hanging: tuple[Rig, Gate]) -> None:
        rig, gate = hanging
        stuck = rig.begin(store(PAGE, 1))
        gate.entered.get(timeout=30)
        assert rig.copy(Piece(HOST, 0, SEGMENT, 0, MIB, 4)).bytes == 4 * MIB
        assert rig.shown[0] == stuck and rig.shown[-1] == stuck
        gate.open.set()
        assert rig.reports.get(timeout=30).command == stuck and rig.shown[-1] == 0

    def test_a_small_copy_takes_its_turn_before_the_rest_of_a_large_one(self, hanging: tuple[Rig, Gate]) -> None:
        rig, gate = hanging
        large = rig.begin(store(MIB, 10))  # three requests
        gate.entered.get(timeout=30)
        small = rig.begin(store(PAGE, 1, file=11 * MIB))
        gate.open.set()
        assert [rig.reports.get(timeout=30).command for _ in range(2)] == [small, large]

    def test_stopping_drops_what_waits_and_leaves_no_thread(self, tmp_path: Path) -> None:
        before = threading.active_count()
        rig, gate = Rig(tmp_path, True, depth=1), Gate()
        rig.calls = replace(SYSTEM, pwritev=gate.pwritev)
        rig.begin(store(MIB, 10))
        gate.entered.get(timeout=30)
        rig.disk.stop()
        gate.open.set()
        rig.close()
        assert threading.active_count() == before and rig.reports.empty() and gate.entered.empty()


def run(page: int, pages: int, page_bytes: int) -> Run:
    return Run(page, pages, page_bytes, memoryview(bytes(page_bytes * pages)))


class TestRequests:
    def test_neighbours_in_the_file_go_in_one_request_wherever_they_lie_in_memory(self) -> None:
        found = cut([(True, n * 4096, run(n, 1, 4096)) for n in (3, 0, 2, 1)])
        assert [(r.offset, r.bytes, [part.page for part in r.runs]) for r in found if isinstance(r, Request)] == [
            (0, 4 * 4096, [0, 1, 2, 3])
        ]

    def test_a_long_run_is_cut_between_pages(self) -> None:
        found = [r for r in cut([(False, MIB, run(0, 30, 360 * KIB))]) if isinstance(r, Request)]
        assert [r.bytes // (360 * KIB) for r in found] == [11, 11, 8]
        assert [r.offset for r in found] == [MIB, MIB + 11 * 360 * KIB, MIB + 22 * 360 * KIB]
        assert [r.runs[0].page for r in found] == [0, 11, 22]

    def test_reads_and_writes_and_gaps_are_apart(self) -> None:
        entries = [(True, 0, run(0, 1, 4096)), (False, 4096, run(1, 1, 4096)), (True, 8192, run(2, 1, 4096))]
        assert sorted((r.write, r.offset) for r in cut(entries) if isinstance(r, Request)) == [(False, 4096), (True, 0), (True, 8192)]  # fmt: skip

    def test_no_request_has_more_parts_than_a_call_takes(self) -> None:
        found = [r for r in cut([(True, n * 4096, run(n, 1, 4096)) for n in range(600)]) if isinstance(r, Request)]
        assert [len(r.runs) for r in found] == [MAX_PARTS, 600 - MAX_PARTS]

    def test_a_page_larger_than_a_request_goes_in_parts(self) -> None:
        found = [p for p in cut([(True, MIB, run(5, 1, 9 * MIB))]) if isinstance(p, Part)]
        assert [(p.offset, len(p.memory), p.number) for p in found] == [(MIB, REQUEST_BYTES, 0), (5 * MIB, REQUEST_BYTES, 1), (9 * MIB, MIB, 2)]  # fmt: skip
        assert {p.whole.page for p in found} == {5} and found[0].whole.parts == 3


def test_the_measurement_has_a_row_each_way_and_leaves_nothing(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = bench_disk.measure(str(tmp_path), 8 * MIB, 360 * KIB)
    assert [row["name"] for row in rows] == ["host to NVMe", "NVMe to host"]
    assert all(row["ratio"] == row["value"] / row["limit"] > 0 for row in rows) and os.listdir(tmp_path) == []
