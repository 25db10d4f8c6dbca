"""What every test shares: which tests this machine can run."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if Path("/dev/nvidiactl").exists():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and there is none here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
