"""Functions on arrays that `map.python` steps of the tests call."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np


def make(value: int, seed: int = 0) -> Any:
    """`value` float32 numbers."""
    return np.random.default_rng(seed).standard_normal(value, np.float32)


def add(value: Any, by: float = 1.0) -> Any:
    return value + np.float32(by)


def total(value: Any) -> float:
    return float(np.sum(value, dtype=np.float64))


def same(value: Any) -> Any:
    return value


def both(value: Any) -> dict[str, Any]:
    """The input itself, a part of it that is not contiguous, and something small."""
    return {"whole": value, "part": value[::2], "count": len(value)}


def mean(value: list[Any]) -> Any:
    """Of arrays of one length."""
    return sum(value[1:], value[0]) / np.float32(len(value))


def split(value: Any) -> list[Any]:
    return [value, value[: len(value) // 2], value * np.float32(2)]


def half(value: Any) -> Any:
    return value[: len(value) // 2]


def twice(value: Any) -> list[Any]:
    """One array, named twice."""
    made = value + np.float32(3)
    return [made, made, value, value]


def often(value: Any, count: int = 1) -> list[Any]:
    """The input, named many times."""
    return [value] * count


def is_read_only(value: Any) -> bool:
    try:
        value[0] = 1
    except ValueError:
        return True
    return False


def scribble(value: Any, by: str) -> Any:
    """Writes to its input, whatever that says."""
    if by == "torch":
        import torch

        torch.from_dlpack(value)[0] = 1e9
    else:
        ctypes.memset(value.ctypes.data, 0x7F, 4)
    return value


def fail(value: Any) -> None:
    raise ValueError(f"no more of these {len(value)}")


def forge(value: Any, handle: int = 1) -> Any:
    """Names a tensor that it was never given."""
    from hexrt.values import descriptor

    return descriptor(handle, "float32", (2000,))


def _die_once(mark: str) -> None:
    try:
        Path(mark).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly:
    """Kills its process when it is encoded, the first time."""

    dtype = np.dtype(np.float32)

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __array__(self, *_: Any, **__: Any) -> Any:
        _die_once(self.mark)
        return np.ones(2000, np.float32)


def die_while_filling(value: Any, mark: str) -> list[Any]:
    return [value + np.float32(1), Deadly(mark)]


def die_while_reading(value: Any, mark: str) -> Any:
    first = value[: len(value) // 2].sum()
    _die_once(mark)
    return value + first
