"""The memory behind the tiers: the HOST arena that hosts map, and the host of the NVME tier, which is started when it is first needed.

Owns the arena's memfd. Tells the keeper what hosts measured of their links, and that a tier cannot be had. Loop thread only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from hexrt.brain.models import PAGE_TOKENS, ModelSource
from hexrt.brain.view import Device
from hexrt.config import Memory, Model
from hexrt.core import DeviceKind
from hexrt.devices.link import HostLink
from hexrt.errors import HexrtError
from hexrt.llm.model_files import about_weight_bytes, read_config
from hexrt.llm.steps import model_shape
from hexrt.memory.arena import create_host_arena, map_fd, read_only
from hexrt.memory.frames import GRANULE
from hexrt.memory.keeper import DISK, Keeper
from hexrt.memory.lru import Lru, NextUse
from hexrt.memory.pool import PagePool
from hexrt.protocol.host import HOST
from hexrt.scheduling.links import Links

log = logging.getLogger("hexrtd")
WRITERS = (DeviceKind.CPU, DeviceKind.CUDA, DeviceKind.DISK)
"""Who moves pages, or uses them in place. Everybody else reads."""


def keeper_of(memory: Memory, arenas_mib: Mapping[str, int]) -> Keeper:
    """The tiers of this machine: HOST, NVME if there is to be one, and the arena of each device."""
    keeper = Keeper(PagePool(Lru() if memory.policy == "lru" else NextUse()), Links(), int(memory.wait_s * 1e9))
    keeper.add_host(memory.host_mib << 20)
    if memory.nvme_mib:
        keeper.add_nvme(memory.nvme_mib << 20)
    for device, mib in arenas_mib.items():
        keeper.add_device(device, mib << 20)
    return keeper


def model_source(path: str, model: Model) -> ModelSource:
    """A model of the config, with what its own files say of its pages, its context and its weights, so far as they can be read."""
    source = ModelSource(
        path, model.dtype, weights=model.weights, kv_dtype=model.kv_dtype, endpoint=model.endpoint,
        concurrency=model.concurrency,
    )  # fmt: skip
    if model.endpoint:
        return source
    try:
        config = read_config(Path(path))
        shape = model_shape(config)
        weight_bytes = about_weight_bytes(Path(path), config, model.dtype, model.weights)
    except (OSError, ValueError, HexrtError) as error:  # its steps will be told by whoever reads it
        return replace(source, why=why_unreadable(Path(path), error))
    page_bytes = shape.page_bytes(model.kv_dtype or model.dtype, PAGE_TOKENS)
    page_bytes += -page_bytes % GRANULE
    return replace(source, page_bytes=page_bytes, context_tokens=shape.context_tokens, weight_bytes=weight_bytes)


def why_unreadable(path: Path, error: Exception) -> str:
    """What a model's files lack, without the path of its folder."""
    if not path.exists():
        return "there is no such folder or file"
    if isinstance(error, OSError):
        return f"{Path(error.filename).name if error.filename else 'a file'} cannot be read: {error.strerror}"
    text = error.message if isinstance(error, HexrtError) else str(error)
    return text.replace(str(path), "its folder")


class Arenas:
    def __init__(self, memory: Memory, keeper: Keeper, start_disk: Callable[[Device], None]) -> None:
        """`start_disk` starts a host for the device. Raises OutOfMemory."""
        self._keeper = keeper
        self._start_disk = start_disk
        self._bytes = memory.host_mib << 20
        self._fd, facts = create_host_arena(self._bytes)
        self._read_only_fd = read_only(self._fd)
        self.facts: dict[str, Any] = {"pages": facts.pages, "why": facts.why}
        self._disk_started = False
        self._view: memoryview | None = None

    def view(self, offset: int, length: int | None) -> memoryview:
        """Bytes of HOST as the daemon reads them."""
        if self._view is None:
            self._view = map_fd(self._read_only_fd, self._bytes, False)
        return self._view[offset : self._bytes if length is None else offset + length]

    def host_started(self, link: HostLink, kind: DeviceKind) -> None:
        if kind in WRITERS:
            link.map(HOST, self._fd, self._bytes, writable=True)

    def let_read(self, link: HostLink) -> None:
        """Sees to it that the host can read HOST from now on."""
        if HOST not in link.mapped:
            link.map(HOST, self._read_only_fd, self._bytes)

    def host_ready(self, device: str, facts: Mapping[str, Any]) -> None:
        """Takes over what a host measured of its links; the disk's may have no file."""
        if device == DISK and not facts["bytes"]:
            if facts["why"]:
                log.warning(
                    "no pages go to NVMe, and what HOST does not hold is computed again or kept: %s", facts["why"]
                )
            self._keeper.close_nvme(facts["why"])
        else:
            self._keeper.learn_links(device, facts)

    def host_lost(self, device: Device) -> None:
        """A device is given up."""
        if device.name == DISK:
            log.warning("pages stay where they are from now on: %s", device.lost)
            self._keeper.no_nvme(device.lost)

    def serve(self) -> None:
        """Starts the host of the NVME tier once there is work for it."""
        if self._keeper.wants_disk and not self._disk_started:
            self._disk_started = True
            self._start_disk(Device(DISK, DeviceKind.DISK, 64, DISK))

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._read_only_fd)
