"""The copies that a host carries out between its places, beside what else it does.

Owns nothing: takes the places as they are mapped. Called on a thread of its own, which lets go of the interpreter while bytes move.
Decides nothing about what lies where, and does not look at whether somebody else touches the bytes: the daemon sees to that.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from ctypes import memmove, memset
from time import monotonic_ns

from hexrt.devices.places import Places, address_of, anonymous
from hexrt.errors import HexrtError
from hexrt.protocol.host import Copied, Copy, CopyFault, Piece

SPLIT_BYTES = 8 << 20
"""Most bytes moved by one call. Between two calls a host that is told to stop can stop; shorter ones cost speed."""
PROBE_BYTES = 4 << 20
PROBE_ROUNDS = 3


def carry_out(places: Places, message: Copy) -> Copied:
    """All pieces in order. The pages of a piece that lies outside its places are faults, the other pieces are copied all the same."""
    start = monotonic_ns()
    faults: list[CopyFault] = []
    moved = first = 0
    for piece in message.pieces:
        try:
            moved += _move(places, piece)
        except HexrtError as error:
            faults += _faults(first, piece, error)
        first += max(0, piece.pages)
    return Copied(message.command, start, monotonic_ns(), moved, (), tuple(faults))


def _move(places: Places, piece: Piece) -> int:
    size = piece.page_bytes * piece.pages
    # Kept until the bytes are over, so that a place unmapped meanwhile does not go away under them.
    _held = (places.view(piece.source), places.view(piece.target))
    source = places.address(piece.source, piece.source_offset, size)
    target = places.address(piece.target, piece.target_offset, size, write=True)
    if size <= SPLIT_BYTES or abs(source - target) < size:  # what overlaps must move in one go
        memmove(target, source, size)
        return size
    for at in range(0, size, SPLIT_BYTES):
        memmove(target + at, source + at, min(SPLIT_BYTES, size - at))
    return size


def _faults(first: int, piece: Piece, error: HexrtError) -> Iterable[CopyFault]:
    return (CopyFault(first + page, "io", error.message) for page in range(piece.pages))


def measure_link() -> dict[str, float]:
    """Bytes a second of one large copy in memory, and what one small copy takes; within 10 ms on any machine that is of use."""
    source, target = anonymous(PROBE_BYTES), anonymous(PROBE_BYTES)
    there, here = address_of(target), address_of(source)
    for address in (here, there):
        memset(address, 1, PROBE_BYTES)  # takes the memory
    large = min(_timed(there, here, PROBE_BYTES) for _ in range(PROBE_ROUNDS))
    small = min(_timed(there, here, mmap.PAGESIZE) for _ in range(PROBE_ROUNDS))
    return {"copy_bytes_per_s": PROBE_BYTES * 1e9 / large, "latency_ns": float(small)}


def _timed(target: int, source: int, size: int) -> int:
    start = monotonic_ns()
    memmove(target, source, size)
    return max(1, monotonic_ns() - start)
