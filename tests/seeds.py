"""Seeds of a test that has a short form in `make test` and a long one in `make campaign`."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(short: int, long: int) -> list[Any]:
    """`short` seeds for every run, those up to `long` for the campaign."""
    return [*range(short), *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(short, long))]
