"""What a bad disk does to a Copy: each page is good or named, whatever single call fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hexrt.errors import BadRequest, HexrtError, InvariantViolation, NotFound
from hexrt.memory.arena import SYSTEM
from hexrt.memory.requests import REQUEST_BYTES
from hexrt.protocol.host import HOST, NVME, Piece
from tests.disk_rig import FIXED, KIB, MIB, PAGE, SIZE, Broken, Rig, load, store

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


PAGES = 150  # three requests
WORDS = {"EIO": "io", "ENOSPC": "full", "EDQUOT": "full", "ENXIO": "io", "ETIMEDOUT": "io"}


class TestFaults:
    def test_a_flipped_byte_on_the_disk_is_a_fault_of_exactly_that_page(self, rig: Rig) -> None:
        for page_bytes, pages in ((4 * KIB, 50), (360 * KIB, 9), (5 * MIB, 2)):
            data = rig.fill()
            sums = rig.copy(store(page_bytes, pages)).sums
            os.fsync(rig.fd)
            plain = os.open(f"/proc/self/fd/{rig.fd}", os.O_RDWR)
            at = page_bytes + page_bytes // 2 + 11
            os.pwrite(plain, bytes([os.pread(plain, 1, at)[0] ^ 1]), at)
            os.fsync(plain)
            os.close(plain)
            report = rig.copy(load(page_bytes, sums))
            assert [(fault.page, fault.kind) for fault in report.faults] == [(1, "checksum")]
            assert report.bytes == (pages - 1) * page_bytes
            assert rig.host[:page_bytes] == data[:page_bytes]

    @pytest.mark.parametrize("word", WORDS)
    @pytest.mark.parametrize("write", [True, False])
    def test_a_place_that_cannot_be_reached_costs_only_the_pages_on_it(self, rig: Rig, word: str, write: bool) -> None:
        data = rig.fill()
        sums = rig.copy(store(PAGE, PAGES)).sums
        first, last = 70 * PAGE + 512, 71 * PAGE + 512
        broken = Broken(lambda n, offset, size: word if offset < last and offset + size > first else None)
        rig.calls = broken.calls()
        report = rig.copy(store(PAGE, PAGES) if write else load(PAGE, sums))
        assert [(fault.page, fault.kind) for fault in report.faults] == [(70, WORDS[word]), (71, WORDS[word])]
        assert all(word in fault.message for fault in report.faults) and report.bytes == (PAGES - 2) * PAGE
        assert report.sums == (sums if write else ()) and rig.host[: 70 * PAGE] == data[: 70 * PAGE]

    @pytest.mark.parametrize("write", [True, False])
    @pytest.mark.parametrize("page_bytes, pages", [(PAGE, PAGES), (5 * MIB, 2)])
    def test_each_call_failing_in_turn_loses_no_page_unnamed(self, direct: Rig, write: bool, page_bytes: int, pages: int) -> None:  # fmt: skip
        data = direct.fill()
        sums = direct.copy(store(page_bytes, pages)).sums
        counter = Broken(lambda n, offset, size: None)
        direct.calls = counter.calls()
        direct.copy(store(page_bytes, pages) if write else load(page_bytes, sums))
        assert counter.count >= 3
        for nth in range(1, counter.count + 1):
            for word in ("EIO", "ENOSPC"):
                if not write:
                    direct.host[:] = bytes(SIZE)
                direct.calls = Broken(lambda n, offset, size, nth=nth, word=word: word if n == nth else None).calls()  # type: ignore[misc]
                report = direct.copy(store(page_bytes, pages) if write else load(page_bytes, sums))
                lost = {fault.page for fault in report.faults}
                # A failed request of several pages is done again page by page, and one failure does not come twice.
                assert len(lost) == (1 if page_bytes > REQUEST_BYTES else 0)
                direct.calls = SYSTEM
                again = direct.copy(load(page_bytes, sums)) if write else report
                assert {fault.page for fault in again.faults} <= lost
                for page in set(range(pages)) - lost:
                    at = slice(page * page_bytes, (page + 1) * page_bytes)
                    assert direct.host[at] == data[at]

    @pytest.mark.parametrize("write", [True, False])
    @pytest.mark.parametrize("done", [4 * KIB, 512 * KIB + 4 * KIB, MIB + 100])
    def test_a_short_count_is_carried_on_with_the_rest(self, rig: Rig, write: bool, done: int) -> None:
        data = rig.fill()
        sums = rig.copy(store(PAGE, PAGES)).sums
        os.fsync(rig.fd)
        broken = Broken(lambda n, offset, size: min(done, size) if n <= 3 else None)
        rig.calls = broken.calls()
        if not write:
            rig.host[:] = bytes(SIZE)
        report = rig.copy(store(PAGE, PAGES) if write else load(PAGE, sums))
        assert report.faults == () and 3 < broken.count <= 6  # a rest may be among the first three
        os.fsync(rig.fd)
        rig.calls = SYSTEM
        assert rig.copy(load(PAGE, sums)).faults == () and rig.host[: PAGE * PAGES] == data[: PAGE * PAGES]

    @pytest.mark.parametrize("write", [True, False])
    @pytest.mark.parametrize("done", [0, 100])
    def test_a_count_that_stays_short_is_a_fault_of_its_kind(self, direct: Rig, write: bool, done: int) -> None:
        direct.fill()
        sums = direct.copy(store(PAGE, 4)).sums
        direct.calls = Broken(lambda n, offset, size: done if offset <= 2 * PAGE < offset + size else None).calls()
        report = direct.copy(store(PAGE, 4) if write else load(PAGE, sums))
        assert [(fault.page, fault.kind) for fault in report.faults] == [(2, "short")]

    def test_a_file_cut_off_by_somebody_gives_short_pages(self, direct: Rig) -> None:
        direct.fill()
        sums = direct.copy(store(PAGE, 10)).sums
        os.ftruncate(direct.fd, 8 * PAGE + 512)
        report = direct.copy(load(PAGE, sums))
        assert [(fault.page, fault.kind) for fault in report.faults] == [(8, "short"), (9, "short")]

    def test_an_error_of_any_other_kind_ends_the_copy_and_no_thread(self, direct: Rig) -> None:
        def wrong(*_: object) -> int:
            raise ValueError("unheard of")

        direct.calls = replace(SYSTEM, pwritev=wrong)
        for page_bytes in (PAGE, 5 * MIB):
            for _ in range(6):
                report = direct.copy(store(page_bytes, 2))
                assert [(fault.page, fault.kind) for fault in report.faults] == [(0, "io"), (1, "io")]
        direct.calls = SYSTEM
        assert direct.copy(store(PAGE, 2)).faults == ()


REFUSED: list[tuple[Piece, type[HexrtError]]] = [
    (Piece(HOST, 0, NVME, 0, 4097, 1), BadRequest),
    (Piece(HOST, 0, NVME, 512, 4096, 1), BadRequest),
    (Piece(HOST, 512, NVME, 0, 4096, 1), BadRequest),
    (Piece(HOST, 0, NVME, 0, 0, 1), BadRequest),
    (Piece(HOST, 0, NVME, 0, 4096, 0), BadRequest),
    (Piece(HOST, 0, NVME, -4096, 4096, 1), BadRequest),
    (Piece(HOST, 0, NVME, SIZE, 4096, 1), BadRequest),
    (Piece(HOST, 0, NVME, 4096, SIZE, 1), BadRequest),
    (Piece(HOST, 0, NVME, 0, 4096, 1, (1,)), BadRequest),
    (Piece(NVME, 0, HOST, 0, 4096, 2, (1,)), BadRequest),
    (Piece(NVME, 0, HOST, 0, 4096, 1), BadRequest),
    (Piece(NVME, 0, NVME, 4096, 4096, 1, (1,)), BadRequest),
    (Piece(HOST, SIZE - 4096, NVME, 0, 8192, 1), InvariantViolation),
    (Piece(NVME, 0, FIXED, 0, 4096, 1, (1,)), InvariantViolation),
    (Piece(HOST, 0, FIXED, 0, 4096, 1), InvariantViolation),
    (Piece(HOST, 0, 99, 0, 4096, 1), NotFound),
    (Piece(99, 0, NVME, 0, 4096, 1), NotFound),
]


@pytest.mark.parametrize("piece, error", REFUSED)
def test_a_copy_with_a_piece_that_cannot_be_is_refused_whole(
    direct: Rig, piece: Piece, error: type[HexrtError]
) -> None:
    counter = Broken(lambda n, offset, size: None)
    direct.calls = counter.calls()
    with pytest.raises(error):
        direct.begin(store(4096, 1), piece)
    assert counter.count == 0 and direct.shown == [] and direct.copy(store(4096, 1)).faults == ()
