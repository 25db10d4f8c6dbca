"""Tells a host that hangs from one that works: by signs of life of its loop, and by how long its engine's commands take.

Owns what was noticed about one life of one host. A pool worker runs bodies on its loop, so while one runs it need not answer: the step's
timeout ends that. Any other host answers a Ping at once whatever it computes. Loop thread only.
"""

from __future__ import annotations

from dataclasses import dataclass

from hexrt.brain.engines import Engines
from hexrt.brain.view import Device
from hexrt.core import DeviceKind
from hexrt.devices.link import HostLink
from hexrt.protocol.host import Ping

QUIET_NS = 10_000_000_000
"""How long a host that holds work may say nothing before it is asked for a sign of life."""
SILENT_NS = 20_000_000_000
"""How long it may take for that before it is taken for dead."""
START_NS = 120_000_000_000
"""How long a host may take to be ready."""
STALLED_NS = 2_000_000_000
"""The time between two checks after which the first of them means nothing any more."""


@dataclass(eq=False, slots=True)
class Watchdog:
    hung: str = ""  # why the host was taken for hung
    asked_ns: int = 0
    command: int = 0  # that it runs
    since_ns: int = 0

    def is_hung(self, device: Device, link: HostLink, engines: Engines, now_ns: int) -> bool:
        """Asks for signs of life as needed. True, with `hung` set, once the host is to be replaced."""
        if self.hung or device.lost:
            return False
        if not device.ready:
            if now_ns - device.last_report_ns > START_NS:
                self.hung = f"not ready after {START_NS // 10**9} s"
        elif device.window:
            running = link.running_command
            if running != self.command:
                self.command, self.since_ns = running, now_ns
            if device.kind is not DeviceKind.POOL or not running:
                self._check_answer(device, link, now_ns)
            limit_ns = engines.limit_ns(device.name, running) if running else 0
            if limit_ns and now_ns - self.since_ns > limit_ns:
                self.hung = f"no end of a model's work after {limit_ns // 10**9} s"
        return bool(self.hung)

    def _check_answer(self, device: Device, link: HostLink, now_ns: int) -> None:
        oldest = next(iter(device.window.values()))
        heard_ns = max(device.last_report_ns, oldest.placed_ns)
        if now_ns - heard_ns <= QUIET_NS:
            return
        if self.asked_ns <= heard_ns:
            self.asked_ns = now_ns
            link.send([Ping()])
        elif now_ns - self.asked_ns > SILENT_NS:
            self.hung = f"no sign of life for {(now_ns - heard_ns) // 10**9} s"
