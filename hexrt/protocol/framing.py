"""Frames: a little-endian u32 length and that many bytes of msgpack.

Owns the splitting of a byte stream into frames. Holds at most one frame's bytes beyond what it was given; a length above the cap
is refused before anything is buffered. An unfinished frame's bytes are copied once, however many pieces they come in. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from hexrt.errors import BadRequest

HEADER = struct.Struct("<I")


def frame(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


class FrameSplitter:
    """Cuts a stream of bytes into frame bodies."""

    __slots__ = ("_pieces", "_wanted", "max_bytes", "pending_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.pending_bytes = 0  # of an unfinished frame
        self._pieces: list[bytes] = []
        self._wanted = 0  # bytes, from the unfinished frame's start, without which there is nothing to do

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields each body that `data` completes. Raises BadRequest at a length above `max_bytes`; the stream is unusable then."""
        if self._pieces:
            self._pieces.append(data)
            self.pending_bytes += len(data)
            if self.pending_bytes < self._wanted:
                return
            data = b"".join(self._pieces)
            self._pieces.clear()
        at, end, wanted = 0, len(data), 4
        try:
            while end - at >= 4:
                size = int.from_bytes(data[at : at + 4], "little")
                if size > self.max_bytes:
                    raise BadRequest(f"a frame of {size} bytes is larger than the {self.max_bytes} allowed", "frame")
                if end - at - 4 < size:
                    wanted = 4 + size
                    break
                body = data[at + 4 : at + 4 + size]
                at += 4 + size
                yield body
        finally:
            self.pending_bytes = end - at
            self._wanted = wanted
            if at < end:
                self._pieces.append(data[at:] if at else data)
