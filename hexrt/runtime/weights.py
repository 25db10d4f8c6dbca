"""How many bytes of model weights a device may have at a time. Read once, at the daemon's start."""

from __future__ import annotations

import os

from hexrt.config import Cpu


def weights_budgets(cpu: Cpu) -> dict[str, int]:
    """By device. Where the config says nothing, half of the machine's memory."""
    if not cpu.enabled:
        return {}
    return {"cpu:0": cpu.weights_mib << 20 or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2}
