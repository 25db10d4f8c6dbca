"""What becomes of a conversation's pages while its tool runs, by what each choice costs."""

from __future__ import annotations

import math

import pytest

from hexrt.scheduling.retention import Fate, Stake, retain

MS = 1_000_000


@pytest.mark.parametrize(
    ("needed", "swap", "recompute", "others", "fate"),
    [
        (None, 1 * MS, 9 * MS, True, Fate.DROP),
        (2 * MS, 5 * MS, 50 * MS, True, Fate.HOLD),
        (20 * MS, 5 * MS, 50 * MS, True, Fate.MOVE),
        (20 * MS, 5 * MS, 50 * MS, False, Fate.LEAVE),
        (20 * MS, 50 * MS, 5 * MS, True, Fate.LEAVE),
        (2 * MS, math.inf, 5 * MS, True, Fate.HOLD),
        (2 * MS, math.inf, math.inf, True, Fate.HOLD),
    ],
)
def test_the_cheapest_fate_is_chosen(
    needed: float | None, swap: float, recompute: float, others: bool, fate: Fate
) -> None:
    assert retain(Stake(needed, swap, recompute, others), 0, 2000 * MS).fate is fate


def test_a_hold_lasts_no_longer_than_bringing_back_would_cost_nor_than_is_allowed() -> None:
    assert retain(Stake(2 * MS, 5 * MS, 50 * MS, True), 100, 2000 * MS).until_ns == 100 + 5 * MS
    assert retain(Stake(2 * MS, math.inf, math.inf, True), 100, 7 * MS).until_ns == 100 + 7 * MS
    assert retain(Stake(2 * MS, 5 * MS, 50 * MS, False), 100, 0).fate is Fate.LEAVE, "holding is switched off"
