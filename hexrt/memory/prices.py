"""What it takes to move pages, against what it takes to compute them again.

Owns what is known of computing a page of each class; speeds of links are `scheduling.links`'. The keeper and the LLM engines ask. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hexrt.memory import plan
from hexrt.memory.pool import NEVER, Level, Page, PagePool
from hexrt.scheduling.links import Links


class Prices:
    def __init__(self, pool: PagePool, links: Links) -> None:
        self.pool = pool
        self.links = links
        self.recompute_ns: dict[int, float] = {}  # class -> what computing one of its pages takes, where that is known
        never = pool.policy.bucket(NEVER)
        self._never = never if never != pool.policy.bucket(None) else -1

    def below_top(self, page: Page) -> int:
        """How many hops a page is away from where it is used: 0 there, 1 or 2 below. For a page with a copy somewhere."""
        pool = self.pool
        top = pool.tiers[pool.top(pool.cls(page))].level
        return next(level - top for level in range(top, Level.NVME + 1) if pool.has(page, Level(level)))

    def load_ns(self, pages: Sequence[Page]) -> int:
        """What bringing these pages, all of one class, to where they are used is expected to take, one hop after the other."""
        pool = self.pool
        cls = pool.cls(pages[0])
        tiers, levels, page_bytes = self._tiers(cls), pool.classes[cls].levels, pool.page_bytes(cls)
        deepest = [0] * len(tiers)
        for page in pages:
            deepest[levels.index(levels[0] + self.below_top(page))] += pool.span(page) * page_bytes
        total, size = 0, 0
        for below in range(len(tiers) - 1, 0, -1):
            size += deepest[below]
            total += self.links.estimate_ns((tiers[below], tiers[below - 1]), size) if size else 0
        return total

    def swap_ns(self, cls: int, count: int) -> float:
        """Storing so many pages one tier down and loading them again; infinite where there is no tier that takes them."""
        tiers = self._tiers(cls)
        if len(tiers) < 2 or self.pool.tiers[tiers[1]].closed:
            return float("inf")
        size = count * self.pool.page_bytes(cls)
        down, up = (tiers[0], tiers[1]), (tiers[1], tiers[0])
        return self.links.estimate_ns(down, size) + self.links.estimate_ns(up, size)

    def _tiers(self, cls: int) -> list[int]:
        """From where the class is used, downwards."""
        record = self.pool.classes[cls]
        return [record.tiers[level] for level in record.levels]

    def admission(self, tier: int) -> Callable[[Page], bool]:
        """Which pages of a tier are worth storing in the one below: such as are read again, and sooner loaded than computed.

        Tensors, which cannot be computed, always are, and nobody asks.
        """
        level, bucket = self.pool.tiers[tier].level, self.pool.columns.bucket

        def is_worth_storing(page: Page) -> bool:
            if bucket[page] == self._never:
                return False
            cls = self.pool.cls(page)
            recompute_ns = self.recompute_ns.get(cls)
            if recompute_ns is None:
                return True
            record = self.pool.classes[cls]
            below = next((record.tiers[at] for at in record.levels if at > level), -1)
            size = self.pool.span(page) * record.page_bytes
            return plan.admit(size, 0, self.links.estimate_ns((below, tier), size), recompute_ns, 1.0)

        return is_worth_storing
