"""How fast bytes go from tier to tier: measured at start, refined by every copy.

Owns the estimates, one `Link` for each (source tier, target tier). A copy takes latency * pieces + bytes / bandwidth. Pure: what is observed
is passed in; `dump` and `load` carry the estimates over a restart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

PRIOR_LATENCY_NS = 20_000.0
PRIOR_BYTES_PER_NS = 2.0
WEIGHT = 0.2
"""Of a new observation."""
OUTLIER = 3.0
"""A copy that took so many times as long as estimated counts only if the one before it did so too."""

Between = tuple[int, int]


class Link:
    def __init__(self, latency_ns: float = PRIOR_LATENCY_NS, bytes_per_ns: float = PRIOR_BYTES_PER_NS) -> None:
        self.latency_ns = latency_ns
        self.bytes_per_ns = bytes_per_ns
        self.count = 0  # copies observed
        self._suspect = False  # the last copy was an outlier

    def set_measured(self, latency_ns: float, bytes_per_ns: float) -> None:
        """What a measurement at start found, in place of what was known."""
        if latency_ns > 0 and bytes_per_ns > 0:
            self.latency_ns, self.bytes_per_ns = latency_ns, bytes_per_ns
            self.count = max(self.count, 1)
            self._suspect = False

    def estimate_ns(self, size: int, pieces: int = 1) -> int:
        """The expected time of a copy of `size` bytes in `pieces` contiguous runs."""
        return int(self.latency_ns * pieces + size / self.bytes_per_ns)

    def observe(self, size: int, pieces: int, took_ns: int) -> None:
        """Learns from a copy: its bandwidth where the bytes were most of the time, else the latency of a piece."""
        if took_ns <= 0 or size <= 0 or pieces <= 0:
            return
        expected = self.latency_ns * pieces + size / self.bytes_per_ns
        outlier = self.count > 0 and not expected / OUTLIER <= took_ns <= expected * OUTLIER
        if outlier and not self._suspect:
            self._suspect = True
            return
        self._suspect = outlier
        weight = WEIGHT if self.count else 1.0
        self.count += 1
        if size / self.bytes_per_ns >= self.latency_ns * pieces:
            on_bytes_ns = max(took_ns - self.latency_ns * pieces, took_ns / 2)
            ns_per_byte = 1 / self.bytes_per_ns
            self.bytes_per_ns = 1 / (ns_per_byte + weight * (on_bytes_ns / size - ns_per_byte))
        else:
            latency_ns = max(took_ns - size / self.bytes_per_ns, took_ns / 2) / pieces
            self.latency_ns += weight * (latency_ns - self.latency_ns)


class Links:
    """One link for each pair of tiers, made when it is first asked for."""

    def __init__(self) -> None:
        self._links: dict[Between, Link] = {}

    def link(self, between: Between) -> Link:
        found = self._links.get(between)
        if found is None:
            found = self._links[between] = Link()
        return found

    def set_measured(self, between: Between, latency_ns: float, bytes_per_ns: float) -> None:
        self.link(between).set_measured(latency_ns, bytes_per_ns)

    def observe(self, between: Between, size: int, pieces: int, took_ns: int) -> None:
        self.link(between).observe(size, pieces, took_ns)

    def estimate_ns(self, between: Between, size: int, pieces: int = 1) -> int:
        return self.link(between).estimate_ns(size, pieces)

    def items(self) -> list[tuple[Between, Link]]:
        return list(self._links.items())

    def dump(self, names: Sequence[str]) -> bytes:
        """What was learnt. `names` are the tiers' by number: another configuration may number them otherwise."""
        return msgspec.msgpack.encode(
            [
                (names[source], names[target], link.latency_ns, link.bytes_per_ns, link.count)
                for (source, target), link in self._links.items()
                if link.count and source >= 0 and target >= 0
            ]
        )

    def load(self, data: bytes, names: Sequence[str]) -> None:
        """Takes over what `dump` gave of tiers that are still there. Raises msgspec.MsgspecError, with nothing changed, on anything else."""
        rows = msgspec.msgpack.decode(data, type=list[tuple[str, str, float, float, int]])
        for _, _, latency_ns, bytes_per_ns, count in rows:
            if not (0 < latency_ns < math.inf and 0 < bytes_per_ns < math.inf and count > 0):
                raise msgspec.ValidationError(f"a link of {latency_ns} ns and {bytes_per_ns} bytes/ns, seen {count} times")  # fmt: skip
        for source, target, latency_ns, bytes_per_ns, count in rows:
            if source in names and target in names:
                link = self.link((names.index(source), names.index(target)))
                link.latency_ns, link.bytes_per_ns, link.count = latency_ns, bytes_per_ns, count
