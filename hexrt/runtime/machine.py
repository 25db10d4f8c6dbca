"""Answers about the machine: its devices, and its memory with what moves there and who holds it. Pure; reads the brain's tables, changes nothing."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from hexrt.brain.decide import Brain
from hexrt.brain.view import Device
from hexrt.core import DeviceKind
from hexrt.memory.keeper import DISK, Keeper
from hexrt.memory.pool import Level, Page, PagePool
from hexrt.memory.tiers import Tier, TierStatistics
from hexrt.protocol.messages import (
    DeviceList,
    DeviceStatus,
    Holder,
    LinkStatus,
    MemoryReport,
    Moved,
    TensorTotals,
    TierStatus,
)  # fmt: skip
from hexrt.runtime.entities import Run, Tensor

MOST_HOLDERS = 20
MOST_WHY = 500
"""Characters of an answer about what is wrong."""


def devices_of(brain: Brain) -> DeviceList:
    return DeviceList(0, tuple(_device(device, brain.engines.keeper) for device in brain.devices.values()))


def _device(device: Device, keeper: Keeper) -> DeviceStatus:
    launches, one_at_a_time = len(device.window), device.kind is DeviceKind.POOL
    return DeviceStatus(
        device.name, device.kind.value, "lost" if device.lost else "ready" if device.ready else "starting",
        min(launches, 1) if one_at_a_time else launches, max(0, launches - 1) if one_at_a_time else 0,
        device.done, device.facts, device.lost,
        "; ".join(f"{tier.name} {trouble}" for tier in keeper.carried_by(device.name) if (trouble := trouble_of(tier))),
    )  # fmt: skip


def trouble_of(tier: Tier) -> str:
    if not (tier.degraded or tier.closed):
        return ""
    return f"{'closed' if tier.closed else 'degraded'}: {tier.degraded[:MOST_WHY]}"


def memory_of(brain: Brain, runs: Iterable[Run], arena: Mapping[str, Any], uid: int | None) -> MemoryReport:
    """`uid`: whose runs may be named; None for everybody's. `arena`: of HOST, what kind of pages it has and why.

    Takes time in proportion to the tensors and sequences that there are.
    """
    keeper = brain.engines.keeper
    tensors, holders = _held(brain, runs, uid)
    return MemoryReport(
        0,
        tuple(_tier(t, s, keeper, brain.devices) for t, s in zip(keeper.pool.tiers, keeper.pool.statistics(), strict=True)),
        _links(keeper),
        Moved(**msgspec.structs.asdict(keeper.statistics())),
        tensors,
        str(arena.get("pages", "")),
        str(arena.get("why", ""))[:MOST_WHY],
        holders,
    )  # fmt: skip


def _tier(tier: Tier, s: TierStatistics, keeper: Keeper, devices: Mapping[str, Device]) -> TierStatus:
    state, why = _state(tier, keeper, devices)
    frames = s.frames
    return TierStatus(
        s.name, s.level, state, why[:MOST_WHY], frames.bytes, frames.held_bytes, frames.free_bytes,
        frames.largest_run_bytes, frames.fragmentation, s.pages, s.dirty_pages, s.pinned_pages, s.moving_pages,
        s.copies_in, s.copies_out, s.bytes_in, s.bytes_out, s.evictions, s.discards, s.faults,
    )  # fmt: skip


def _state(tier: Tier, keeper: Keeper, devices: Mapping[str, Device]) -> tuple[str, str]:
    if tier.closed:
        return "closed", tier.degraded
    device = devices.get(DISK if tier.level is Level.NVME else tier.name)
    if tier.level is Level.NVME and device is None:
        return "starting" if keeper.wants_disk else "unstarted", ""
    if device is not None and device.lost:
        return "lost", device.lost
    if tier.degraded:
        return "degraded", tier.degraded
    return "ok" if device is None or device.ready else "starting", ""


def _links(keeper: Keeper) -> tuple[LinkStatus, ...]:
    names = [tier.name for tier in keeper.pool.tiers]
    return tuple(
        LinkStatus(names[source], names[target], link.bytes_per_ns * 1e9, link.latency_ns, link.count)
        for (source, target), link in sorted(keeper.links.items(), key=lambda item: item[0])
        if source >= 0 and target >= 0
    )


def _held(brain: Brain, runs: Iterable[Run], uid: int | None) -> tuple[TensorTotals, tuple[Holder, ...]]:
    pool = brain.engines.keeper.pool
    pages: dict[bytes, set[Page]] = {}
    for key, table in brain.engines.holdings():
        pages.setdefault(key, set()).update(table)
    totals = dict.fromkeys(TensorTotals.__struct_fields__, 0)
    holders: list[Holder] = []
    for run in runs:
        if not run.tensors and run.id not in pages:
            continue
        tensors = list((run.tensors or {}).values())
        tensor_bytes = sum([tensor.bytes for tensor in tensors])
        _add(totals, tensors, tensor_bytes, pool)
        if uid is None or run.uid == uid:
            own = pages.get(run.id, ())
            page_bytes = sum(pool.span(page) * pool.page_bytes(pool.cls(page)) for page in own)
            holders.append(
                Holder(run.id, run.name, run.uid, run.state, len(own), page_bytes, len(tensors), tensor_bytes)
            )
    largest = heapq.nlargest(MOST_HOLDERS, holders, key=lambda h: h.page_bytes + h.tensor_bytes)
    return TensorTotals(**totals), tuple(largest)


def _add(totals: dict[str, int], tensors: Sequence[Tensor], tensor_bytes: int, pool: PagePool) -> None:
    paged = [tensor for tensor in tensors if tensor.page >= 0]  # most are not, and there may be many
    totals["segment_tensors"] += len(tensors) - len(paged)
    totals["segment_bytes"] += tensor_bytes - sum(tensor.bytes for tensor in paged)
    for tensor in paged:
        where = "host" if pool.has(tensor.page, Level.HOST) else "nvme"
        totals[f"{where}_tensors"] += 1
        totals[f"{where}_bytes"] += tensor.bytes
