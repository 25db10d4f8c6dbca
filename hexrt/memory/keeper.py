"""Which pages are on their way between tiers, who carries them, and who waits for them.

Owns the page pool of the daemon and every move that is open, from its beginning to its commit or abort. LLM engines and staging ask it for
room and for pages; `decide` writes Copy messages for the hosts, and what they report is handed back in. What a policy would like
(write-back, defragmentation) is asked of `memory.plan` when nothing urgent is to do. Pure; one owner, the daemon's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hexrt.errors import InvariantViolation, OutOfMemory
from hexrt.memory import plan
from hexrt.memory.frames import GRANULE, FrameSpace
from hexrt.memory.pool import Level, Move, Page, PagePool
from hexrt.memory.prices import Prices
from hexrt.memory.tiers import Tier
from hexrt.memory.traffic import Flight, Then, Traffic, TrafficStatistics
from hexrt.protocol.host import DEVICE, HOST, NVME, Copied, Piece, ToHost
from hexrt.scheduling.links import Links

DISK = "disk:0"
BATCH_BYTES = 32 << 20
"""Of one background move: what urgent work may have to wait behind."""
WRITE_FAULTS = 3
"""Failed writes after which a tier gets no more pages."""
PLACES = {Level.DEVICE: DEVICE, Level.HOST: HOST, Level.NVME: NVME}


class Keeper:
    def __init__(self, pool: PagePool, links: Links, wait_ns: int = 30_000_000_000) -> None:
        """`wait_ns`: how long somebody may wait for a copy, its expected time not counted, before the copy's host is replaced."""
        self.pool = pool
        self.links = links
        self.traffic = Traffic(links, wait_ns)
        self.wants_disk = False  # there is work for the host of the NVME tier, which is to be started
        self._has_disk = True  # or it may yet be had
        self.when_freed: list[Callable[[], None]] = []  # called when frames may have come free
        self.prices = Prices(pool, links)
        self._top: dict[str, int] = {}  # device -> the tier that its pages are used in
        self._host = self._nvme = -1
        self._write_faults = 0
        self._attend = False
        self._loaded_pages = self._loaded_bytes = self._stored_pages = self._stored_bytes = 0
        self._relocated_pages = self._relocated_bytes = self._copied_pages = self._copied_bytes = self._faults = 0

    # --- set-up -----------------------------------------------------------------------------------------------------

    def add_host(self, total_bytes: int) -> None:
        self._host = self.pool.add_tier("host", Level.HOST, FrameSpace(total_bytes))

    def add_nvme(self, total_bytes: int) -> None:
        self._nvme = self.pool.add_tier("nvme", Level.NVME, FrameSpace(total_bytes))

    def add_device(self, device: str, arena_bytes: int) -> None:
        """A device with an arena of its own; with 0 bytes it uses pages in place in the host's memory."""
        own = bool(arena_bytes)
        self._top[device] = self.pool.add_tier(device, Level.DEVICE, FrameSpace(arena_bytes)) if own else self._host

    def page_class(self, device: str, page_bytes: int) -> int:
        """The class of a model's KV pages on a device."""
        return self.pool.add_class(self._top[device], page_bytes, True)

    def learn_links(self, device: str, facts: Mapping[str, Any]) -> None:
        """What a host measured at its start: {links: {copy_bytes_per_s, latency_ns}}, or of the disk {read_bytes_per_s, write_bytes_per_s, latency_ns}."""
        if device == DISK:
            latency_ns = facts.get("latency_ns", 0.0)
            self.links.set_measured((self._nvme, self._host), latency_ns, facts.get("read_bytes_per_s", 0.0) / 1e9)
            self.links.set_measured((self._host, self._nvme), latency_ns, facts.get("write_bytes_per_s", 0.0) / 1e9)
        elif (measured := facts.get("links")) and self._top.get(device, self._host) != self._host:
            speed = measured["copy_bytes_per_s"] / 1e9
            for between in ((self._host, self._top[device]), (self._top[device], self._host)):
                self.links.set_measured(between, measured["latency_ns"], speed)

    def dump_links(self) -> bytes:
        return self.links.dump([tier.name for tier in self.pool.tiers])

    def load_links(self, data: bytes) -> None:
        """Once the tiers are there, and before hosts tell what they measured. Raises msgspec.MsgspecError."""
        self.links.load(data, [tier.name for tier in self.pool.tiers])

    # --- what engines ask for ---------------------------------------------------------------------------------------

    def freed(self) -> None:
        """Frames came free, or pages may be evicted that could not be: whoever waits for room may ask again."""
        self._attend = True
        for freed in self.when_freed:
            freed()

    def short_of(self, cls: int, count: int) -> int:
        """How many pages of the class could not be made at its top though all that may go from there went."""
        pool, tier = self.pool, self.pool.top(cls)
        if pool.can_create(cls, count, 1, tier):
            return 0
        room = plan.make_room(pool, tier, cls, count, True, 1, self.prices.admission(tier))
        return max(0, count - pool.room(cls, tier) - self._leaving(tier, cls) - room.frames)

    def store(self, pages: Sequence[Page], device: str) -> None:
        """Begins to write pages down from where the device uses them, so that they can give way at once when others need the room."""
        top = self._top[device]
        level = self.pool.tiers[top].level
        self._store(
            [p for p in pages if self.pool.is_evictable(p, level) and self.pool.columns.copies[p] == 1 << level], top
        )

    def make_room(self, cls: int, count: int) -> bool:
        """Whether `count` pages of the class can be made at its top now. If not, evictions may have begun: ask again when frames came free."""
        return self._make_room(self.pool.top(cls), cls, count)

    def _make_room(self, tier: int, cls: int, count: int, span: int = 1) -> bool:
        pool = self.pool
        if pool.can_create(cls, count, span, tier):
            return True
        room = plan.make_room(pool, tier, cls, count, True, span, self.prices.admission(tier))
        if span == 1 and pool.room(cls, tier) + self._leaving(tier, cls) + room.frames < count:
            return False  # nothing is given up for what cannot be had anyway
        level = pool.tiers[tier].level
        for page in (*room.drops, *room.discards):
            pool.drop(page, level)
        if room.stores:
            self._store(room.stores, tier)
        return pool.can_create(cls, count, span, tier)

    def _leaving(self, tier: int, cls: int) -> int:
        """Frames of the class's size whose content open moves carry down: they can be dropped soon."""
        record, level = self.pool.classes[cls], self.pool.tiers[tier].level
        return self.pool.tiers[tier].leaving[record.frame_classes[level]]

    def load(self, pages: Sequence[Page], device: str, then: Then) -> None:
        """Brings pinned pages one hop up, into their top tier. Raises OutOfMemory, with nothing begun, where its frames are not free."""
        top = self.pool.tiers[self._top[device]].level
        self._begin(pages, top, device if top is Level.DEVICE else DISK, then, urgent=True)

    def lift(self, pages: Iterable[Page]) -> bool:
        """Begins to bring pages from NVME to HOST, nobody waiting; False where there is no room for them."""
        pool = self.pool
        wanted = [p for p in pages if not pool.has(p, Level.HOST) and pool.has(p, Level.NVME) and not pool.moving(p)]
        if not wanted:
            return True
        if not self._make_room(self._host, pool.cls(wanted[0]), len(wanted)):
            return False
        self._begin(wanted, Level.HOST, DISK, None, urgent=True)
        return True

    def prefetch(self, pages: Sequence[Page], device: str) -> None:
        """The pages will be read soon: lifts them, and loads them where frames are free anyway."""
        pool, top = self.pool, self._top[device]
        pool.touch(pages)
        if not pages:
            return
        cls, level = pool.cls(pages[0]), pool.tiers[top].level
        near = plan.prefetch(pool, pages, level, pool.room(cls, top) * pool.page_bytes(cls))
        if near:
            self._begin(near, level, device if top != self._host else DISK, None, urgent=False)
        if top != self._host:
            self.lift(p for p in pages if not pool.is_lost(p) and not pool.has(p, Level.DEVICE))

    def copy_private(self, page: Page, device: str, then: Then) -> Page:
        """A page with the same content for somebody who is going to write to it. Raises OutOfMemory."""
        new, move = self.pool.cow(page)
        self._queue(move, device, then, urgent=True)
        return new

    # --- what staging asks for --------------------------------------------------------------------------------------

    def tensor_class(self) -> int:
        """The class of pages that are runs of granules in HOST, one a tensor; their content cannot be computed anew."""
        return self.pool.add_class(self._host, GRANULE, False)

    def adopt(self, place: int, offset: int, size: int, then: Then) -> Page | None:
        """Begins to take bytes of a segment into HOST; the page is pinned. None, with nothing begun, where there is no room now or nobody to copy."""
        cls, span = self.tensor_class(), -(-size // GRANULE)
        if not self._has_disk or not self._make_room(self._host, cls, 1, span):
            return None
        page, move = self.pool.adopt(cls, span)
        piece = Piece(place, offset, HOST, move.hops[0].target[1], size, 1)
        self._fly(Flight(move, DISK, (-1, self._host), (piece,), (page,), then), urgent=False)
        return page

    def fetch(self, pages: Sequence[Page], then: Then) -> bool:
        """Brings pinned tensors back from NVME; False, with nothing begun, where there is no room for all of them now."""
        spans = [self.pool.span(page) for page in pages]
        if not self._make_room(self._host, self.tensor_class(), len(pages), max(spans)):
            return False
        try:
            self._begin(pages, Level.HOST, DISK, then, urgent=True)
        except OutOfMemory:  # the room is there, but not in one piece for each
            return False
        return True

    # --- moves ------------------------------------------------------------------------------------------------------

    def _store(self, pages: Iterable[Page], tier: int) -> None:
        """Begins to write pages down, so far as the tier below has room."""
        pool = self.pool
        below = self._below(tier)
        if below < 0:
            return
        by_class: dict[int, list[Page]] = {}
        for page in pages:
            by_class.setdefault(pool.cls(page), []).append(page)
        for cls, group in by_class.items():
            if self._make_room(below, cls, len(group), max(pool.span(page) for page in group)):
                self._try_background(group, tier, below, urgent=True)

    def _below(self, tier: int) -> int:
        """The tier that pages of this one are written to; -1 where there is none that takes any."""
        level = self.pool.tiers[tier].level
        below = self._host if level is Level.DEVICE else self._nvme if level is Level.HOST else -1
        return -1 if below < 0 or self.pool.tiers[below].closed else below

    def _carrier(self, source: int, target: int) -> str:
        tiers = self.pool.tiers
        return next((tiers[t].name for t in (source, target) if tiers[t].level is Level.DEVICE), DISK)

    def _begin(self, pages: Sequence[Page], level: Level, device: str, then: Then | None, urgent: bool) -> None:
        self._queue(self.pool.begin(pages, level), device, then, urgent)

    def _try_background(self, pages: Sequence[Page], source: int, target: int, urgent: bool) -> bool:
        """Begins a move that nobody waits for by name; False where its frames are not to be had after all."""
        try:
            move = self.pool.begin(pages, self.pool.tiers[target].level)
        except OutOfMemory:
            return False
        self._queue(move, self._carrier(source, target), None, urgent, is_background=not urgent)
        return True

    def _queue(self, move: Move, device: str, then: Then | None, urgent: bool, is_background: bool = False) -> None:
        pieces: list[Piece] = []
        pages: list[Page] = []
        source, target = (PLACES[self.pool.tiers[tier].level] for tier in (move.hops[0].source[0], move.hops[0].target[0]))  # fmt: skip
        for run in plan.coalesce(move.hops):
            sums = tuple(self.pool.sum(page) for page in run.pages) if source == NVME else ()
            pieces.append(Piece(source, run.source_offset, target, run.target_offset, run.page_bytes, len(run.pages), sums))  # fmt: skip
            pages.extend(run.pages)
        link = (move.hops[0].source[0], move.hops[0].target[0])
        self._fly(Flight(move, device, link, tuple(pieces), tuple(pages), then, is_background), urgent)

    def _fly(self, flight: Flight, urgent: bool) -> None:
        self.traffic.queue(flight, urgent)
        self.wants_disk |= flight.device == DISK

    def decide(self, now_ns: int, devices: Mapping[str, Any], send: dict[str, list[ToHost]]) -> None:
        """Sends on the copies that their hosts can take; thinks of background work when something has changed."""
        if self._attend:
            self._attend = False
            self._think_ahead()
        if self.traffic.has_queued:
            self.traffic.send(now_ns, devices, send)

    # --- what comes back --------------------------------------------------------------------------------------------

    def copied(self, device: str, report: Copied) -> None:
        """Commits a move. A command that is none of ours changes nothing."""
        flight = self.traffic.land(device, report.command)
        if flight is None:
            return
        tiers = self.pool.tiers
        source, target = flight.link
        if source >= 0:
            self.links.observe(flight.link, report.bytes, len(flight.pieces), report.end_ns - report.start_ns)
        is_read = source >= 0 and tiers[source].level is Level.NVME
        faults = frozenset(flight.pages[fault.page] for fault in report.faults)
        if report.faults:
            self._note_fault(tiers[source if is_read else target], report, is_read)
        sums = dict(zip(flight.pages, report.sums, strict=True)) if report.sums else {}
        self.pool.commit(flight.move, faults, sums, bad_source=is_read)
        self._count(flight, len(flight.pages) - len(faults), report.bytes)
        self._end(flight, faults)

    def _note_fault(self, tier: Tier, report: Copied, is_read: bool) -> None:
        first, count = report.faults[0], len(report.faults)
        self._faults += count
        self._write_faults += 0 if is_read else count
        what = "read" if is_read else "written"
        tier.degraded = (
            f"{self._faults} pages could not be moved; the last could not be {what}: {first.kind}: {first.message}"
        )
        if tier.level is Level.NVME and (self._write_faults >= WRITE_FAULTS or first.kind == "full"):
            tier.closed = True
            tier.degraded += "; it takes no more pages"

    def _count(self, flight: Flight, pages: int, size: int) -> None:
        source, target = flight.link
        if source == target and flight.then is None:
            self._relocated_pages += pages
            self._relocated_bytes += size
        elif source == target:
            self._copied_pages += pages
            self._copied_bytes += size
        elif source >= 0 and self.pool.tiers[source].level < self.pool.tiers[target].level:
            self._stored_pages += pages
            self._stored_bytes += size
        else:
            self._loaded_pages += pages
            self._loaded_bytes += size

    def failed(self, device: str, command: int, reason: str) -> bool:
        """A host refused a whole copy. False where the command is none of ours."""
        flight = self.traffic.land(device, command)
        if flight is None:
            return False
        self._faults += len(flight.pages)
        self.pool.tiers[flight.link[1]].degraded = f"a copy failed: {reason}"
        self._abort(flight)
        return True

    def _abort(self, flight: Flight) -> None:
        self.pool.abort(flight.move)
        self._end(flight, frozenset(flight.pages))

    def _end(self, flight: Flight, faults: frozenset[Page]) -> None:
        if flight.then is not None:
            flight.then(faults)
        self.freed()

    def device_lost(self, device: str) -> None:
        """The host is gone: its copies never happened, and what only its arena held is lost."""
        for flight in self.traffic.take_all(device):
            self._abort(flight)
        top = self._top.get(device, -1)
        if top >= 0 and top != self._host:
            self.pool.tier_lost(top)
        if device == DISK and self._nvme >= 0:  # its file had no name
            self.pool.tier_lost(self._nvme)

    def no_nvme(self, reason: str) -> None:
        """Its host cannot be had: what waits for it never happens, and nothing is sent there any more."""
        self._has_disk = False
        self.close_nvme(reason)
        self.device_lost(DISK)

    def close_nvme(self, reason: str) -> None:
        """There is no page file: nothing is moved there any more."""
        if self._nvme >= 0:
            self.pool.tiers[self._nvme].degraded = reason
            self.pool.tiers[self._nvme].closed = True

    # --- ahead of time ----------------------------------------------------------------------------------------------

    def _think_ahead(self) -> None:
        """Writes back what pressure would have to write, and tidies up where nothing else is on its way."""
        pool = self.pool
        for number in range(len(pool.tiers)):
            below = self._below(number)
            if below < 0 or self.traffic.has_background((number, below)):
                continue
            low = plan.watermarks(pool, number).low
            pages = plan.write_back(pool, number, low, BATCH_BYTES, self.prices.admission(number))
            if pages:
                self._try_background(pages, number, below, urgent=False)
        if len(self.traffic):
            return
        for number, tier in enumerate(pool.tiers):
            if tier.level is Level.DEVICE or (tier.level is Level.HOST and self.wants_disk and self._has_disk):
                pages = plan.defragment(pool, number, BATCH_BYTES)
                if pages and self._try_background(pages, number, number, urgent=False):
                    return

    # --- looking in -------------------------------------------------------------------------------------------------

    def carried_by(self, device: str) -> tuple[Tier, ...]:
        """The tiers that a device moves pages between."""
        numbers = (self._host, self._nvme) if device == DISK else (self._top.get(device, -1), self._host)
        own = device == DISK or device in self._top
        return tuple(self.pool.tiers[number] for number in dict.fromkeys(numbers) if own and number >= 0)

    def statistics(self) -> TrafficStatistics:
        return TrafficStatistics(
            self._loaded_pages, self._loaded_bytes, self._stored_pages, self._stored_bytes, self._relocated_pages,
            self._relocated_bytes, self._copied_pages, self._copied_bytes, self._faults, len(self.traffic),
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Raises InvariantViolation unless the pool is whole and each of its open moves is one of ours."""
        self.pool.check_integrity()
        ours = {flight.move.number for flight in self.traffic}
        if ours != self.pool.open_moves():
            raise InvariantViolation(f"moves {sorted(self.pool.open_moves())} are open, and {sorted(ours)} are on their way")  # fmt: skip
