"""The bandwidth model of links: learns, forgets slowly, and is not fooled by one slow copy."""

from __future__ import annotations

import math

import msgspec
import pytest

from hexrt.scheduling.links import Link, Links

MIB = 1 << 20


def test_a_link_that_was_measured_says_latency_a_piece_and_bandwidth() -> None:
    link = Link("device to host")
    link.set_measured(1_000, 10.0)
    assert link.estimate_ns(10 * MIB, 3) == 3_000 + MIB
    link.set_measured(0, 10.0)  # no measurement
    assert link.latency_ns == 1_000


def test_a_link_that_nobody_measured_believes_its_first_copy() -> None:
    link = Link()
    link.observe(64 * MIB, 1, 64 * MIB // 8)
    assert link.estimate_ns(64 * MIB) == pytest.approx(64 * MIB / 8, rel=0.01)


def test_large_copies_teach_the_bandwidth_and_small_ones_the_latency() -> None:
    link = Link()
    link.set_measured(20_000, 4.0)
    for _ in range(60):
        link.observe(32 * MIB, 1, 20_000 + 32 * MIB // 8)
        link.observe(4096, 1, 9_000)
    assert link.bytes_per_ns == pytest.approx(8.0, rel=0.02)
    assert link.latency_ns == pytest.approx(9_000 - 512, rel=0.02)


def test_one_outlier_changes_nothing_and_two_in_a_row_do() -> None:
    link = Link()
    link.set_measured(1_000, 8.0)
    before = link.estimate_ns(MIB)
    link.observe(MIB, 1, 50 * before)
    assert link.estimate_ns(MIB) == before
    link.observe(MIB, 1, before)
    link.observe(MIB, 1, 50 * before)
    assert link.estimate_ns(MIB) == pytest.approx(before, rel=0.01)
    link.observe(MIB, 1, 50 * before)
    assert link.estimate_ns(MIB) > 5 * before


def test_what_is_no_copy_teaches_nothing() -> None:
    link = Link()
    for size, pieces, took in ((0, 1, 5), (5, 0, 5), (5, 1, 0), (5, 1, -3)):
        link.observe(size, pieces, took)
    assert link.count == 0


NAMES = ("host", "nvme", "cpu:0")


def test_links_are_kept_over_a_restart_by_the_names_of_their_tiers() -> None:
    links, again, smaller = Links(), Links(), Links()
    links.set_measured((0, 1), 2_000, 12.0)
    links.observe((0, 2), 8 * MIB, 2, 8 * MIB)
    links.estimate_ns((2, 1), 1)  # never seen: not kept
    saved = links.dump(NAMES)
    again.load(saved, NAMES)
    assert again.estimate_ns((0, 1), MIB) == links.estimate_ns((0, 1), MIB)
    assert [between for between, _ in again.items()] == [(0, 1), (0, 2)]
    smaller.load(saved, ("host", "cpu:0"))  # the NVME tier was switched off
    assert [between for between, _ in smaller.items()] == [(0, 1)]
    assert smaller.estimate_ns((0, 1), MIB) == links.estimate_ns((0, 2), MIB)
    again.set_measured((0, 1), 500, 3.0)  # what a host measures at its start is newer
    assert again.estimate_ns((0, 1), MIB) == 500 + MIB // 3


@pytest.mark.parametrize("row", [(1.0, 0.0, 3), (-1.0, 1.0, 3), (math.nan, 1.0, 3), (1.0, math.inf, 3), (1.0, 1.0, 0)])
def test_links_that_cannot_be_are_refused_with_nothing_changed(row: tuple[float, float, int]) -> None:
    links = Links()
    before = links.estimate_ns((0, 1), MIB)
    with pytest.raises(msgspec.MsgspecError):
        links.load(msgspec.msgpack.encode([("host", "nvme", 1.0, 1.0, 1), ("host", "cpu:0", *row)]), NAMES)
    with pytest.raises(msgspec.MsgspecError):
        links.load(b"\xc1", NAMES)
    assert links.estimate_ns((0, 1), MIB) == before
