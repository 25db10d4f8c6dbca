"""The copies that a host carries out between its places, beside what else it does.

Owns nothing: takes the places as they are mapped. Called on a thread of its own, which lets go of the interpreter while bytes move.
Decides nothing about what lies where, and does not look at whether somebody else touches the bytes: the daemon sees to that.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from ctypes import memmove, memset
from time import monotonic_ns

from hexrt.devices.places import Mapped, Places, address_of, anonymous
from hexrt.errors import HexrtError
from hexrt.protocol.host import Copied, Copy, CopyFault, Piece

PROBE_BYTES = 8 << 20
PROBE_ROUNDS = 3


def carry_out(places: Places, message: Copy) -> Copied:
    """All pieces in order. The pages of a piece that lies outside its places are faults, the other pieces are copied all the same."""
    start = monotonic_ns()
    known: dict[
        int, Mapped
    ] = {}  # kept to the end, so that a place unmapped meanwhile does not go away under the bytes
    faults: list[CopyFault] = []
    moved = first = 0
    for piece in message.pieces:
        source, target, size = known.get(piece.source), known.get(piece.target), piece.page_bytes * piece.pages
        if source is None or target is None or not _fits(piece, source, target, size):
            try:
                source, target = known[piece.source], known[piece.target] = _find(places, piece, size)
            except HexrtError as error:
                faults += _faults(first, piece, error)
                first += max(0, piece.pages)
                continue
        memmove(target.address + piece.target_offset, source.address + piece.source_offset, size)
        moved += size
        first += piece.pages
    return Copied(message.command, start, monotonic_ns(), moved, (), tuple(faults))


def _fits(piece: Piece, source: Mapped, target: Mapped, size: int) -> bool:
    return (
        0 <= piece.source_offset <= piece.source_offset + size <= source.bytes
        and 0 <= piece.target_offset <= piece.target_offset + size <= target.bytes
        and target.writable
    )


def _find(places: Places, piece: Piece, size: int) -> tuple[Mapped, Mapped]:
    """Both ends of a piece; raises what `Places` raises where one is not there, too small, or not to be written."""
    places.address(piece.source, piece.source_offset, size)
    places.address(piece.target, piece.target_offset, size, write=True)
    return places.get(piece.source), places.get(piece.target)


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
