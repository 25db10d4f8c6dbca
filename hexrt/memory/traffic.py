"""The moves that are on their way: queued for a host, or with it, until its report.

Owns the order in which copies go out and how many a host has at a time. Knows bytes and places, not why pages move: that is the keeper's.
Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from hexrt.memory.pool import Move, Page
from hexrt.protocol.host import FIRST_SEGMENT, Copy, Piece, ToHost
from hexrt.scheduling.links import Links

IN_FLIGHT = 2
"""Copies that are with one host at a time: one is carried out, one is read in."""
SLOWER = 50
"""How many times as long as its link's estimate, beside the time that every copy is given, a copy may take before its host is taken for hung."""

Then = Callable[[frozenset[Page]], None]
"""Is told the pages of a move that did not arrive."""


class Carrier(Protocol):
    """What is asked of a device: `hexrt.brain.view.Device`."""

    ready: bool

    def next_command(self) -> int: ...


@dataclass(eq=False, slots=True)
class Flight:
    """An open move, with its host once `command` is set. `pages` are in the order of the pieces."""

    move: Move
    device: str
    link: tuple[int, int]  # source and target tier
    pieces: tuple[Piece, ...]
    pages: tuple[Page, ...]
    then: Then | None
    is_background: bool = False
    command: int = 0
    late_ns: int = 0  # when its host is taken for hung

    @property
    def bytes(self) -> int:
        return sum(piece.page_bytes * piece.pages for piece in self.pieces)


class TrafficStatistics(msgspec.Struct, frozen=True):
    loaded_pages: int
    loaded_bytes: int
    stored_pages: int
    stored_bytes: int
    relocated_pages: int
    relocated_bytes: int
    copied_pages: int  # within a tier, for sequences that part ways
    copied_bytes: int
    faults: int
    open_moves: int


class Traffic:
    def __init__(self, links: Links, wait_ns: int) -> None:
        """`wait_ns`: how long any copy may take, with its host working."""
        self.links = links
        self._wait_ns = wait_ns
        self._outbox: dict[str, deque[Flight]] = {}
        self._flights: dict[tuple[str, int], Flight] = {}
        self._with_host: dict[str, int] = {}
        self.places: set[int] = set()  # segments that copies which are sent now read, all of them the disk's host's

    def take_places(self) -> set[int]:
        places, self.places = self.places, set()
        return places

    def queue(self, flight: Flight, urgent: bool) -> None:
        queue = self._outbox.setdefault(flight.device, deque())
        if urgent:  # before what nobody waits for
            behind = next((i for i, other in enumerate(queue) if other.is_background), len(queue))
            queue.insert(behind, flight)
        else:
            queue.append(flight)

    def send(self, now_ns: int, devices: Mapping[str, Any], send: dict[str, list[ToHost]]) -> None:
        """Hands on the copies that their hosts can take now."""
        for name, queue in self._outbox.items():
            device: Carrier | None = devices.get(name)
            while queue and device is not None and device.ready and self._with_host.get(name, 0) < IN_FLIGHT:
                flight = queue.popleft()
                flight.command = device.next_command()
                estimate_ns = self.links.estimate_ns(flight.link, flight.bytes, len(flight.pieces))
                flight.late_ns = now_ns + self._wait_ns + SLOWER * estimate_ns
                self._flights[name, flight.command] = flight
                self.places.update(piece.source for piece in flight.pieces if piece.source >= FIRST_SEGMENT)
                self._with_host[name] = self._with_host.get(name, 0) + 1
                send.setdefault(name, []).append(Copy(flight.command, flight.pieces))

    def land(self, device: str, command: int) -> Flight | None:
        flight = self._flights.pop((device, command), None)
        if flight is not None:
            self._with_host[device] -= 1
        return flight

    def take_all(self, device: str) -> list[Flight]:
        """Everything of a host that is gone."""
        gone = [flight for (name, _), flight in self._flights.items() if name == device]
        gone += self._outbox.pop(device, ())
        self._flights = {key: flight for key, flight in self._flights.items() if key[0] != device}
        self._with_host.pop(device, None)
        return gone

    def overdue(self, now_ns: int) -> set[str]:
        """Hosts that have had a copy for far longer than it can take."""
        return {name for (name, _), flight in self._flights.items() if now_ns > flight.late_ns}

    @property
    def has_queued(self) -> bool:
        return any(self._outbox.values())

    def has_background(self, link: tuple[int, int]) -> bool:
        return any(flight.is_background and flight.link == link for flight in self)

    def __iter__(self) -> Iterator[Flight]:
        yield from self._flights.values()
        for queue in self._outbox.values():
            yield from queue

    def __len__(self) -> int:
        return len(self._flights) + sum(len(queue) for queue in self._outbox.values())
