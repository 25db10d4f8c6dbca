"""Tensors that cross the client socket: a sealed memfd, and where each tensor lies in it.

Owns the check of what a client passed, and the descriptor until somebody takes it. Sealed bytes neither change nor vanish, so that they may be
mapped and read at any time. Promises nothing about what the bytes say.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping

import msgspec

from hexrt.errors import BadRequest
from hexrt.memory.arena import check_sealed, map_fd
from hexrt.protocol.messages import RunResult, Tensor

MOST_CLIENT_HANDLE = 2**32 - 1


class Export(msgspec.Struct, frozen=True, gc=False):
    """A result with tensors that are still the daemon's. `make` is called at most once, when the answer is about to be sent; perhaps never.

    It returns the RunResult with its `tensors`, and a sealed memfd, which is the caller's to close; or one that is wholly inline, and -1.
    It may raise a HexrtError. Until then nothing is copied for the client; `make` must cope with a run that was let go of meanwhile.
    """

    make: Callable[[], tuple[RunResult, int]]


class ClientMemory:
    """What came with one Submit. Closed by whoever was given it, also after `take`."""

    __slots__ = ("_fd", "_view", "bytes", "tensors")

    def __init__(self, fd: int, size: int, tensors: Mapping[int, Tensor]) -> None:
        self._fd = fd
        self._view: memoryview | None = None
        self.bytes = size  # of the whole memfd: so much memory lives on with it
        self.tensors = tensors  # by handle

    def take(self) -> int:
        """The descriptor, the caller's to close from now on."""
        fd, self._fd = self._fd, -1
        return fd

    def content(self, handle: int) -> memoryview:
        """The read-only bytes of a tensor, valid as long as the view is kept. To be asked for before `take`. Raises KeyError."""
        tensor = self.tensors[handle]
        if self._view is None:
            self._view = map_fd(self._fd, self.bytes, False)
        return self._view[tensor.offset : tensor.offset + tensor.bytes]

    def close(self) -> None:
        """May be called again."""
        self._view = None
        if self._fd >= 0:
            os.close(self.take())


def client_memory(fd: int, tensors: tuple[Tensor, ...]) -> ClientMemory:
    """Takes over `fd`, which it closes where it raises BadRequest: no sealed memfd, or a tensor that does not lie in it by itself."""
    try:
        size = check_sealed(fd, 1)
        _check_ranges(tensors, size)
        return ClientMemory(fd, size, {tensor.handle: tensor for tensor in tensors})
    except BadRequest as error:
        os.close(fd)
        raise BadRequest(error.message, error.where or "tensors") from None
    except BaseException:
        os.close(fd)
        raise


def _check_ranges(tensors: tuple[Tensor, ...], size: int) -> None:
    handles = set()
    for i, tensor in enumerate(tensors):
        if not 0 < tensor.handle <= MOST_CLIENT_HANDLE:
            raise BadRequest("a client's handles are numbers from 1 to 2**32 - 1", f"tensors[{i}].handle")
        if tensor.handle in handles:
            raise BadRequest(f"handle {tensor.handle} is given twice", f"tensors[{i}].handle")
        handles.add(tensor.handle)
        if tensor.offset > size:
            raise BadRequest(f"it begins behind the memfd's {size} bytes", f"tensors[{i}].offset")
        if tensor.offset + tensor.bytes > size:
            raise BadRequest(f"it ends behind the memfd's {size} bytes", f"tensors[{i}].bytes")
    order = sorted(range(len(tensors)), key=lambda i: tensors[i].offset)
    for before, after in itertools.pairwise(order):
        if tensors[before].offset + tensors[before].bytes > tensors[after].offset:
            raise BadRequest(
                f"it overlaps tensors[{before}]: name one tensor twice instead", f"tensors[{after}].offset"
            )
