"""Frames: a little-endian u32 length and that many bytes of msgpack.

Owns the splitting of a byte stream into frames. Holds at most one frame's bytes beyond what it was given; a length above the cap
is refused before anything is buffered. Pure.
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

    __slots__ = ("_buffer", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = b""

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields each body that `data` completes. Raises BadRequest at a length above `max_bytes`; the stream is unusable then."""
        buffer = self._buffer + data if self._buffer else data
        at, end = 0, len(buffer)
        try:
            while end - at >= 4:
                size = int.from_bytes(buffer[at : at + 4], "little")
                if size > self.max_bytes:
                    raise BadRequest(f"a frame of {size} bytes is larger than the {self.max_bytes} allowed", "frame")
                if end - at - 4 < size:
                    break
                body = buffer[at + 4 : at + 4 + size]
                at += 4 + size
                yield body
        finally:
            self._buffer = buffer[at:] if at else buffer
