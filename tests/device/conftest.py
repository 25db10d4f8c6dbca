"""The device that these tests run on, and a clock of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

Clock = Callable[[str, Callable[[], None], int], None]
REPEATS = 20


@pytest.fixture
def clock() -> Clock:
    """Prints the least and the median microseconds of what it is given on the device, and GB/s for the bytes it must move."""

    def measure(name: str, run: Callable[[], None], moved_bytes: int) -> None:
        for _ in range(3):
            run()
        spans = []
        for _ in range(REPEATS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            spans.append((begin, end))
        torch.cuda.synchronize()
        taken = sorted(begin.elapsed_time(end) * 1e3 for begin, end in spans)
        print(
            f"\n{torch.cuda.get_device_name()}, {name}: {taken[0]:.1f} us at least, {taken[len(taken) // 2]:.1f} in the middle,"
            f" {moved_bytes / taken[0] / 1e3:.0f} GB/s"
        )

    return measure
