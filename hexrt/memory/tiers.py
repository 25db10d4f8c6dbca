"""The records of the page pool: tiers, classes of pages, hops and moves, statistics.

Owns no decision; `pool.PagePool` keeps them, plans and the keeper read them. Only `degraded` and `closed` of a tier are set by others. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from hexrt.memory.columns import LEVELS, Level, Page
from hexrt.memory.frames import FrameSpace, FrameStatistics
from hexrt.memory.lru import Orders

NOWHERE = -1
"""The tier that the bytes of an adopted page come from: none of the pool's."""
NO_PAGE = 0xFFFF_FFFF


class Hop(msgspec.Struct, frozen=True, gc=False):
    page: Page
    source: tuple[int, int]  # tier, byte offset
    target: tuple[int, int]
    bytes: int


class Move(msgspec.Struct, frozen=True, gc=False):
    """Open until it is committed or aborted. All hops go between the same two tiers."""

    number: int
    hops: tuple[Hop, ...]
    level: Level
    copy_of: Page = NO_PAGE  # the page whose content a copy-on-write takes
    pages: Sequence[Page] = ()  # in the order of the hops
    frames: Sequence[int] = ()  # their new ones, where all hops go to another tier


@dataclass(eq=False, slots=True)
class Tier:
    name: str
    level: Level
    space: FrameSpace
    degraded: str = ""  # what is wrong with it, for people
    closed: bool = False  # takes no more pages
    owners: dict[int, array[int]] = field(default_factory=dict)  # frame class -> the page of each held frame
    users: dict[int, list[PageClass]] = field(
        default_factory=dict
    )  # frame class -> the classes of pages in such frames
    leaving: dict[int, int] = field(default_factory=dict)  # frame class -> frames whose content open moves carry down
    pages: int = 0
    dirty: int = 0
    pinned: int = 0
    copies_in: int = 0
    copies_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    evictions: int = 0
    discards: int = 0
    faults: int = 0


@dataclass(eq=False, slots=True)
class PageClass:
    """Of one size, used in one tier. Lists by level have -1 where the class has no tier."""

    number: int
    top: int
    level: Level
    page_bytes: int
    recomputable: bool
    tiers: list[int] = field(default_factory=lambda: [-1] * LEVELS)
    frame_classes: list[int] = field(default_factory=lambda: [-1] * LEVELS)
    lists: list[int] = field(default_factory=lambda: [-1] * LEVELS)  # the first of 2 a bucket: clean, dirty
    owners: list[array[int]] = field(default_factory=lambda: [array("I") for _ in range(LEVELS)])
    levels: tuple[int, ...] = ()  # that it has, its top first
    orders: Orders = ()


class TierStatistics(msgspec.Struct, frozen=True):
    name: str
    level: str
    degraded: str
    closed: bool
    pages: int  # that have a copy here
    dirty_pages: int  # whose only copy is here
    pinned_pages: int  # that are used in this tier
    moving_pages: int
    copies_in: int
    copies_out: int
    bytes_in: int
    bytes_out: int
    evictions: int  # dropped with a copy elsewhere
    discards: int  # dropped to be recomputed
    faults: int  # of copies to or from here
    frames: FrameStatistics
