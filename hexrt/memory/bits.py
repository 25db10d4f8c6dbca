"""Runs of ones in Python ints: bitmaps of frames and of extents.

Owns nothing; pure functions of their arguments. Python's ints make each step over a whole bitmap one operation.
"""

from __future__ import annotations

from collections.abc import Iterator


def lowest(bits: int) -> int:
    """The place of the lowest one; -1 where there is none."""
    return (bits & -bits).bit_length() - 1


def find_run(bits: int, length: int) -> int:
    """Where the lowest `length` ones in a row begin; -1 where there are none. In O(log length) operations."""
    have = 1
    while have < length and bits:
        step = min(have, length - have)
        bits &= bits >> step
        have += step
    return lowest(bits)


def longest_run(bits: int) -> int:
    """The length of the longest run of ones. In O(log of it) operations."""
    if not bits:
        return 0
    have, stages = 1, [bits]  # stage k: where 2**k ones in a row begin
    while (doubled := bits & bits >> have) != 0:
        bits = doubled
        have *= 2
        stages.append(bits)
    for k in range(len(stages) - 2, -1, -1):  # what is left is prolonged by the powers of two below
        longer = bits & stages[k] >> have
        if longer:
            bits = longer
            have += 1 << k
    return have


def run_around(bits: int, place: int) -> tuple[int, int]:
    """The run of ones [low, high) that holds `place`, which is a one."""
    below = ~bits & ((1 << place) - 1)
    return below.bit_length(), place + lowest(~(bits >> place))


def runs_of(bits: int) -> Iterator[tuple[int, int]]:
    """The runs of ones [low, high), ascending."""
    while bits:
        low = lowest(bits)
        high = low + lowest(~(bits >> low))
        yield low, high
        bits &= -1 << high
