"""What a GGUF file says about itself: its metadata, and where its tensors lie.

Reads a memory map with every length and count checked against the bytes that are there, so that a header that lies is refused before anything is
taken for it. No library is needed but for the sizes of tensor types. Format: the GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_ENTRIES = 1 << 16  # of metadata
MAX_ELEMENTS = 1 << 21  # of an array; the largest vocabularies have 2 ** 18 tokens
MAX_META_BYTES = 256 << 20
MAX_TENSORS = 1 << 17
MAX_DIMENSIONS = 4
ALIGNMENT = 32
TOKENS = "tokenizer.ggml.tokens"


class GgufFault(ValueError):
    """The file is no GGUF file, or contradicts itself. The message holds no path."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """`shape` as numpy and torch have it, the last dimension fastest; `offset` and `bytes` within the file."""

    name: str
    shape: tuple[int, ...]
    kind: int  # a type of ggml
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    meta: dict[str, Any]
    tensors: tuple[TensorPlace, ...]


class _Bytes:
    """A position in the file's bytes; every reading says what it takes before it takes it."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize("<" + form)
        self.need(size, "a value")
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += size
        return values

    def need(self, size: int, what: str) -> None:
        if size > len(self.data) - self.at:
            raise GgufFault(f"{what} of {size} bytes at {self.at} goes past the end, at {len(self.data)}")

    def text(self) -> str:
        (size,) = self.take("Q")
        self.need(size, "a text")
        raw = self.data[self.at : self.at + size]
        self.at += size
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise GgufFault(f"the text at {self.at - size} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            raise GgufFault(f"the value at {self.at} is of the unknown type {kind}")
        return self.take(SCALARS[kind])[0]

    def array(self) -> list[Any]:
        kind, count = self.take("IQ")
        if kind != STRING and kind not in SCALARS:
            raise GgufFault(f"the array at {self.at} is of the unknown type {kind}")
        least = 8 if kind == STRING else struct.calcsize(SCALARS[kind])
        if count > MAX_ELEMENTS:
            raise GgufFault(f"the array at {self.at} has {count} elements, more than {MAX_ELEMENTS}")
        self.need(count * least, "an array")
        return [self.text() for _ in range(count)] if kind == STRING else list(self.take(f"{count}{SCALARS[kind]}"))


def read_header(path: Path) -> Header:
    """All of the header. Raises GgufFault, or OSError where the file cannot be read."""
    with _opened(path) as file, _mapped(file.fileno()) as data:
        cursor = _Bytes(data)
        tensors, entries = _counts(cursor)
        meta = dict(_entries(cursor, entries))
        return Header(meta, _tensors(cursor, tensors, meta))


def read_shape_meta(path: Path) -> dict[str, Any]:
    """The metadata up to the tokens, which are many: instead of them their number. Raises as `read_header`."""
    with _opened(path) as file, _mapped(file.fileno()) as data:
        cursor = _Bytes(data)
        return dict(_entries(cursor, _counts(cursor)[1], stop=TOKENS))


def _opened(path: Path) -> BinaryIO:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
        raise GgufFault("it is no file")
    return path.open("rb")


def _mapped(fd: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise GgufFault("it is empty") from None


def _counts(cursor: _Bytes) -> tuple[int, int]:
    """(tensors, entries of metadata)."""
    if cursor.data[: len(MAGIC)] != MAGIC:
        raise GgufFault("it does not begin with GGUF")
    cursor.at = len(MAGIC)
    (version,) = cursor.take("I")
    if version not in VERSIONS:
        raise GgufFault(f"it is of version {version}, not one of {', '.join(map(str, VERSIONS))}")
    tensors, entries = cursor.take("QQ")
    for name, count, most, least in (("tensors", tensors, MAX_TENSORS, 24), ("entries", entries, MAX_ENTRIES, 13)):
        if count > most:
            raise GgufFault(f"it claims {count} {name}, more than {most}")
        cursor.need(count * least, f"{count} {name}")
    return tensors, entries


def _entries(cursor: _Bytes, count: int, stop: str = "") -> Iterator[tuple[str, Any]]:
    """Metadata in order; of the array `stop` only the number of elements, and nothing after it."""
    seen = set()
    for _ in range(count):
        key = cursor.text()
        (kind,) = cursor.take("I")
        if key in seen:
            raise GgufFault(f"the field {key!r} is there twice")
        seen.add(key)
        if key == stop and kind == ARRAY:
            yield key, cursor.take("IQ")[1]
            return
        yield key, cursor.value(kind)
        if cursor.at > MAX_META_BYTES:
            raise GgufFault(f"its metadata goes past {MAX_META_BYTES} bytes")


def _tensors(cursor: _Bytes, count: int, meta: dict[str, Any]) -> tuple[TensorPlace, ...]:
    from gguf.constants import GGML_QUANT_SIZES

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    alignment = meta.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise GgufFault(f"its alignment of {alignment!r} is no power of two from 8")
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.text()
        (dimensions,) = cursor.take("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise GgufFault(f"the tensor {name!r} has {dimensions} dimensions")
        shape = cursor.take(f"{dimensions}Q")[::-1]
        kind, offset = cursor.take("IQ")
        if name in found:
            raise GgufFault(f"the tensor {name!r} is there twice")
        if offset % alignment:
            raise GgufFault(f"the tensor {name!r} begins at {offset}, which is no multiple of {alignment}")
        found[name] = shape, kind, offset
    start = -(-cursor.at // alignment) * alignment
    return tuple(_place(name, *entry, start, len(cursor.data), sizes) for name, entry in found.items())


def _place(
    name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, end: int, sizes: dict[int, tuple[int, int]]
) -> TensorPlace:
    if kind not in sizes:
        raise GgufFault(f"the tensor {name!r} is of the unknown type {kind}")
    values, block_bytes = sizes[kind]
    if not all(shape) or shape[-1] % values:
        raise GgufFault(f"the tensor {name!r} of {list(shape)} does not divide into blocks of {values}")
    size = prod(shape) // values * block_bytes
    if start + offset + size > end:
        raise GgufFault(f"the tensor {name!r} of {size} bytes at {start + offset} goes past the end, at {end}")
    return TensorPlace(name, shape, kind, start + offset, size)
