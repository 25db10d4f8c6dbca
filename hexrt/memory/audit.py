"""Counting the page pool over: statistics of each tier, and whether everything agrees.

Owns nothing; `pool.PagePool` hands itself in. The integrity check takes time in proportion to pages and frames: for tests, and for idle times
there. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hexrt.errors import InvariantViolation
from hexrt.memory.columns import DEAD, STATES, Level, Page, PageState
from hexrt.memory.copies import Copies
from hexrt.memory.tiers import NO_PAGE, Hop, Move, PageClass, Tier, TierStatistics


def statistics(pool: Copies) -> tuple[TierStatistics, ...]:
    moving = [0] * len(pool.tiers)
    for move in pool.moves.values():
        for tier in {move.hops[0].source[0], move.hops[0].target[0]}:
            if tier >= 0:
                moving[tier] += len(move.hops)
    return tuple(
        TierStatistics(
            t.name, t.level.name.lower(), t.degraded, t.closed, t.pages, t.dirty, t.pinned, count, t.copies_in, t.copies_out,
            t.bytes_in, t.bytes_out, t.evictions, t.discards, t.faults, t.space.statistics(),
        )
        for t, count in zip(pool.tiers, moving, strict=True)
    )  # fmt: skip


def check_integrity(pool: Copies) -> None:
    """Raises InvariantViolation unless frames, owners, counts, lists, states and moves agree."""
    held: Counter[tuple[int, int]] = Counter()  # frames by tier and frame class
    pages: Counter[int] = Counter()
    dirty: Counter[int] = Counter()
    pinned: Counter[int] = Counter()
    in_moves = {hop.page: (move, hop) for move in pool.moves.values() for hop in move.hops}
    for page in range(len(pool.columns)):
        if pool.columns.cls[page] != DEAD:
            _check_page(pool, page, in_moves.pop(page, None))
            _count_page(pool, page, held, pages, dirty, pinned)
    if in_moves:
        raise InvariantViolation(f"in moves, and no pages: {sorted(in_moves)}")
    leaving: Counter[tuple[int, int]] = Counter()
    for move in pool.moves.values():
        _count_move(pool, move, held, leaving)
    for number, tier in enumerate(pool.tiers):
        tier.space.check_integrity()
        if (tier.pages, tier.dirty, tier.pinned) != (pages[number], dirty[number], pinned[number]):
            counted = f"{tier.pages} pages, {tier.dirty} dirty, {tier.pinned} pinned"
            raise InvariantViolation(
                f"{tier.name} counts {counted} and has {pages[number]}, {dirty[number]}, {pinned[number]}"
            )
        _check_tier(number, tier, held, leaving)
    _check_lists(pool)


def _check_page(pool: Copies, page: Page, moved: tuple[Move, Hop] | None) -> None:
    columns = pool.columns
    record, copies = pool.classes[columns.cls[page]], columns.copies[page]
    if columns.moves[page] != (moved[0].number if moved else 0):
        raise InvariantViolation(f"in the move {moved}: {pool.story(page)}")
    if not (columns.refs[page] or columns.pins[page] or moved):
        raise InvariantViolation(f"nobody counts on it: {pool.story(page)}")
    state = PageState.RESIDENT if copies >> record.level & 1 else PageState.ABSENT
    if moved:
        move, hop = moved
        source = pool.tiers[hop.source[0]].level if hop.source[0] >= 0 and move.copy_of == NO_PAGE else Level.NVME + 1
        state = PageState.LOADING if move.level < source else PageState.STORING
        if source <= Level.NVME and not copies >> source & 1:
            raise InvariantViolation(f"moved from where it is not: {pool.story(page)}")
    if STATES[columns.state[page]] is not state:
        raise InvariantViolation(f"should be {state.name}: {pool.story(page)}")
    for level in Level:
        if copies >> level & 1:
            frame, span, owners = columns.frames[level][page], columns.span[page], record.owners[level]
            if level not in record.levels or any(owners[f] != page for f in range(frame, frame + span)):
                raise InvariantViolation(f"not the owner of its frames at {level.name}: {pool.story(page)}")
        if columns.lists[level].list_of(page) != _list_for(pool, record, page, level):
            raise InvariantViolation(
                f"in list {columns.lists[level].list_of(page)} of {level.name}: {pool.story(page)}"
            )


def _list_for(pool: Copies, record: PageClass, page: Page, level: Level) -> int:
    """The list of the level that the page must be in, 0 for none: it has no copy there, moves, or is pinned and needs that copy."""
    columns = pool.columns
    copies, is_up = columns.copies[page], columns.copies[page] >> record.level & 1
    if not copies >> level & 1 or columns.moves[page] or (columns.pins[page] and (level == record.level or not is_up)):
        return 0
    return record.lists[level] + 2 * columns.bucket[page] + (copies == 1 << level)


def _count_page(
    pool: Copies,
    page: Page,
    held: Counter[tuple[int, int]],
    pages: Counter[int],
    dirty: Counter[int],
    pinned: Counter[int],
) -> None:
    columns = pool.columns
    record, copies = pool.classes[columns.cls[page]], columns.copies[page]
    pinned[record.top] += columns.pins[page] > 0
    for level in Level:
        if copies >> level & 1:
            tier = record.tiers[level]
            held[tier, record.frame_classes[level]] += columns.span[page]
            pages[tier] += 1
            dirty[tier] += copies == 1 << level


def _count_move(pool: Copies, move: Move, held: Counter[tuple[int, int]], leaving: Counter[tuple[int, int]]) -> None:
    columns = pool.columns
    for hop in move.hops:
        record, source = pool.classes[columns.cls[hop.page]], hop.source[0]
        held[hop.target[0], record.frame_classes[move.level]] += columns.span[hop.page]
        if source >= 0 and pool.tiers[source].level < move.level:
            leaving[source, record.frame_classes[pool.tiers[source].level]] += columns.span[hop.page]


def _check_tier(number: int, tier: Tier, held: Counter[tuple[int, int]], leaving: Counter[tuple[int, int]]) -> None:
    for cls in tier.space.classes:
        if tier.space.held(cls) != held[number, cls]:
            raise InvariantViolation(
                f"{tier.name} holds {tier.space.held(cls)} frames of class {cls} for {held[number, cls]} of pages and moves"
            )
        if tier.leaving.get(cls, 0) != leaving[number, cls]:
            raise InvariantViolation(f"{tier.leaving[cls]} frames of {tier.name} leave, not {leaving[number, cls]}")
    for cls, owners in tier.owners.items():
        space = tier.space
        owned = sum(owner != NO_PAGE for owner in owners)
        if owned > space.held(cls):
            raise InvariantViolation(f"{owned} frames of {tier.name} have owners and {space.held(cls)} are held")


def _listed(pool: Copies, level: Level) -> Iterator[tuple[int, int]]:
    for record in pool.classes:
        if record.tiers[level] >= 0:
            for number in range(record.lists[level], record.lists[level] + 2 * pool.policy.buckets):
                yield number, record.number


def _check_lists(pool: Copies) -> None:
    for level in Level:
        lists = pool.columns.lists[level]
        for number, cls in _listed(pool, level):
            members = list(lists.iterate(number))
            wrong = [p for p in members if pool.columns.cls[p] != cls or lists.list_of(p) != number]
            if wrong or len(members) != lists.size(number):
                raise InvariantViolation(
                    f"list {number} of {level.name} counts {lists.size(number)} pages and has {members}"
                )
