"""Values that cross a step: msgpack, with tensors as extension types.

None, bool, int, float, str, bytes, lists, dicts with string keys, and NumPy arrays of plain dtypes. A tensor carries its bytes, or is a
descriptor: a handle that whoever holds the bytes resolves. NumPy is imported only where an array is met, so that the daemon, which never
opens a tensor, stays without it. No pickle, no objects.

torch without a copy: `torch.from_dlpack(array)` of what `decode` gave (only to be read), `tensor.numpy()` for what `encode` takes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import msgspec

from hexrt.core import TensorMeta
from hexrt.errors import TaskFailed

TENSOR = 1
"""msgpack extension code; the payload is msgpack `[dtype name, shape, bytes in C order, little-endian]`."""
DESCRIPTOR = 2
"""msgpack extension code; the payload is msgpack `[handle, dtype name, shape]`. The bytes lie elsewhere, in C order, little-endian."""
INLINE_BYTES = 4096
"""Arrays of more bytes than this become descriptors where the encoder is given a place for them."""
MARK = b"\x02\x93"
"""Bytes that every value with a descriptor in it contains (the code, and an array of three): without them there is none."""
NAMING = 10
"""No value of so few bytes has one."""
_mark = re.compile(re.escape(MARK))

_ITEM_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
_MOST_DIMENSIONS = 32
NIL = msgspec.Raw(b"\xc0")
EMPTY_LIST = msgspec.Raw(b"\x90")
_raw_list = msgspec.msgpack.Decoder(list[msgspec.Raw])
_raw_dict = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def is_array(value: Any) -> bool:
    """True for what `tensor` takes: NumPy arrays and scalars, and what turns into them by itself."""
    return hasattr(value, "__array__") and hasattr(value, "dtype")


_name_of = lru_cache(maxsize=64)(attrgetter("name"))
"""NumPy works a dtype's name out in 4 us, each time."""


def tensor(value: Any, place: Callable[[Any], int | None] | None = None) -> Any:
    """The extension that carries an array, or the plain number of one without dimensions. Raises TypeError for a dtype that cannot be sent.

    `place` is given a large array (little-endian, of any strides), keeps its bytes in C order and returns their handle; None for
    having no room, or for wanting it inline.
    """
    import numpy as np

    if hasattr(value, "filled"):
        raise TypeError("a masked array cannot be sent: send what `filled` gives, or its data and its mask")
    array = np.asarray(value)
    if array.dtype.kind not in "biufc" or (name := _name_of(array.dtype)) not in _ITEM_BYTES:
        raise TypeError(f"a tensor of dtype {array.dtype} cannot be sent")
    if array.ndim > _MOST_DIMENSIONS:
        raise TypeError(f"a tensor of {array.ndim} dimensions cannot be sent: {_MOST_DIMENSIONS} are the most")
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    if array.ndim == 0:
        return array.item()
    if place is not None and array.nbytes > INLINE_BYTES and (handle := place(array)) is not None:
        return descriptor(handle, name, array.shape)
    return msgspec.msgpack.Ext(TENSOR, _encoder.encode((name, array.shape, content_of(array))))


def content_of(array: Any) -> memoryview:
    """The bytes of an array in C order, without a copy where they lie so."""
    import numpy as np

    content: memoryview = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return content


def descriptor(handle: int, dtype: str, shape: Sequence[int]) -> msgspec.msgpack.Ext:
    """The extension that names a tensor whose bytes lie elsewhere."""
    return msgspec.msgpack.Ext(DESCRIPTOR, _encoder.encode((handle, dtype, shape)))


FIRST_HOST_HANDLE = 1 << 32
"""Handles below are those of clients."""


def first_handle(host_epoch: int) -> int:
    """The first of 2**32 handles for what one life of a host puts out."""
    return (host_epoch % (2**31 - 1) + 1) << 32


def handle_of(ext: msgspec.msgpack.Ext) -> int:
    """Raises msgspec.DecodeError where it is no descriptor."""
    return _described.decode(ext.data)[0]


def tensor_meta(ext: msgspec.msgpack.Ext) -> TensorMeta:
    """dtype and shape of an encoded tensor, without NumPy. Raises ValueError or msgspec.DecodeError where it is damaged."""
    if ext.code == DESCRIPTOR:
        _, dtype, shape = _described.decode(ext.data)
        _check_meta(dtype, shape)
        return TensorMeta(dtype, shape)
    dtype, shape, content = _tensor.decode(ext.data)
    _check_bytes(dtype, shape, content)
    return TensorMeta(dtype, shape)


def bytes_of(meta: TensorMeta) -> int:
    """Of a tensor whose every dimension is known."""
    return math.prod(n or 0 for n in meta.shape) * _ITEM_BYTES[meta.dtype]


def _check_meta(dtype: str, shape: tuple[int, ...]) -> int:
    """The bytes of such a tensor. Raises ValueError where there can be none."""
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"dtype {dtype[:40]!r} is not allowed in a tensor")
    if len(shape) > _MOST_DIMENSIONS or any(n < 0 for n in shape):
        raise ValueError("the shape of this tensor is not possible")
    return math.prod(shape) * _ITEM_BYTES[dtype]


def _check_bytes(dtype: str, shape: tuple[int, ...], content: memoryview) -> None:
    need = _check_meta(dtype, shape)
    if need != len(content):
        raise ValueError(f"a tensor {dtype}{list(shape)} has {need} bytes, and this one has {len(content)}")


def _encode_hook(value: Any, place: Callable[[Any], int | None] | None = None) -> Any:
    if is_array(value):
        return tensor(value, place)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent")


def _decode_hook(
    code: int,
    data: memoryview,
    tensors: Callable[[int], memoryview] | None = None,
    note: Callable[[int, Any], None] | None = None,
) -> Any:
    handle = -1
    if code == TENSOR:
        dtype, shape, content = _tensor.decode(data)
    elif code == DESCRIPTOR and tensors is not None:
        handle, dtype, shape = _described.decode(data)
        content = tensors(handle)
    else:
        raise ValueError(f"unknown extension type {code}")
    import numpy as np

    _check_bytes(dtype, shape, content)
    flat = np.frombuffer(content.toreadonly(), np.dtype(dtype))
    if not flat.flags.aligned:  # NumPy sums it in another order, so that the last digits would hang on where it lies
        flat = flat.copy()
        flat.flags.writeable = False
    if note is not None and handle >= 0:
        note(handle, flat)
    return flat.reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
_decoder = msgspec.msgpack.Decoder(ext_hook=_decode_hook)
_tensor = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], memoryview])
_described = msgspec.msgpack.Decoder(tuple[int, str, tuple[int, ...]])


def decoder_from(
    tensors: Callable[[int], memoryview], note: Callable[[int, Any], None] | None = None
) -> msgspec.msgpack.Decoder[Any]:
    """For many calls of `decode` with one `tensors`. `note` is told of each descriptor its handle and the array that is the `base` of what it became."""
    return msgspec.msgpack.Decoder(ext_hook=partial(_decode_hook, tensors=tensors, note=note))


def encoder_to(place: Callable[[Any], int | None]) -> msgspec.msgpack.Encoder:
    """For many calls of `encode` with one `place`."""
    return msgspec.msgpack.Encoder(enc_hook=partial(_encode_hook, place=place))


def encode(
    value: Any,
    place: Callable[[Any], int | None] | None = None,
    encoder: msgspec.msgpack.Encoder = _encoder,
) -> bytes:
    """`place` takes the bytes of large arrays, see `tensor`. Raises TaskFailed, naming the type, where the value cannot be sent."""
    if place is not None:
        encoder = encoder_to(place)
    try:
        return encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise TaskFailed(f"the value cannot be sent: {error}") from error


def decode(raw: bytes | msgspec.Raw, tensors: Callable[[int], memoryview] | None = None) -> Any:
    """Tensors come back as read-only NumPy views of `raw`, or of what `tensors` gives for the handle of a descriptor, and last no longer.

    One whose bytes begin at an odd address, as inline ones may, comes as an aligned copy.

    Raises msgspec.DecodeError or ValueError, and whatever `tensors` raises.
    """
    if tensors is None:
        return _decoder.decode(raw)
    return decoder_from(tensors).decode(raw)


def names_any(raw: bytes | msgspec.Raw) -> bool:
    """Whether the value may have a descriptor in it; no for most that have none."""
    return _mark.search(raw) is not None


def described(raw: bytes | msgspec.Raw) -> tuple[Mapping[int, int], int]:
    """The handles of the descriptors inside, each once, in their order, and how many bytes each should have; not to be changed.

    And the bytes of all descriptors together, so many as `inline` would put in at most. Raises msgspec.DecodeError or ValueError where the
    value or a descriptor is damaged, or two of one handle differ in size.
    """
    if _mark.search(raw) is None:
        return _NONE
    return _describe_small(bytes(raw)) if len(raw) <= SMALL_BYTES else _describe(raw)


def _describe(raw: bytes | msgspec.Raw) -> tuple[Mapping[int, int], int]:
    found: dict[int, int] = {}
    total = 0

    def note(code: int, data: memoryview) -> None:
        nonlocal total
        if code == DESCRIPTOR:
            handle, dtype, shape = _described.decode(data)
            size = _check_meta(dtype, shape)
            total += size
            if found.setdefault(handle, size) != size:
                raise ValueError("two descriptors of one tensor differ in size")

    msgspec.msgpack.Decoder(ext_hook=note).decode(raw)
    return found, total


SMALL_BYTES = 512
_NONE: tuple[Mapping[int, int], int] = MappingProxyType({}), 0
_describe_small = lru_cache(maxsize=1024)(_describe)
"""The daemon asks about the same output some eight times."""


def handles(raw: bytes | msgspec.Raw) -> tuple[int, ...]:
    """Of the descriptors inside, each once, in their order; none where the value is damaged."""
    try:
        return tuple(described(raw)[0])
    except (msgspec.MsgspecError, ValueError):
        return ()


def inline(raw: bytes | msgspec.Raw, tensors: Callable[[int], memoryview]) -> msgspec.Raw:
    """The same value with the bytes of each tensor in it. Raises as `described`, ValueError where bytes are missing, and as `tensors` does."""

    def put(code: int, data: memoryview) -> msgspec.msgpack.Ext:
        if code != DESCRIPTOR:
            return msgspec.msgpack.Ext(code, data)
        handle, dtype, shape = _described.decode(data)
        content = tensors(handle)
        _check_bytes(dtype, shape, content)
        return msgspec.msgpack.Ext(TENSOR, _encoder.encode((dtype, shape, content)))

    if _mark.search(raw) is None:
        return raw if isinstance(raw, msgspec.Raw) else msgspec.Raw(raw)
    return msgspec.Raw(_encoder.encode(msgspec.msgpack.Decoder(ext_hook=put).decode(raw)))


def pick(raw: bytes | msgspec.Raw, path: Sequence[str | int]) -> msgspec.Raw:
    """The encoded part of an encoded value at `path`, without opening what lies beside it. Raises TaskFailed naming the first key that is not there."""
    part: Any = raw
    for depth, key in enumerate(path):
        try:
            part = _raw_list.decode(part)[key] if isinstance(key, int) else _raw_dict.decode(part)[key]
        except (msgspec.MsgspecError, KeyError, IndexError):
            raise TaskFailed(f"there is no {'.'.join(map(str, path[: depth + 1]))!r} in the output") from None
    return part if isinstance(part, msgspec.Raw) else msgspec.Raw(part)


def elements(raw: bytes | msgspec.Raw) -> list[msgspec.Raw]:
    """The encoded elements of an encoded list; each keeps the whole of it in memory. Raises TaskFailed where it is no list."""
    try:
        return _raw_list.decode(raw)
    except msgspec.MsgspecError:
        raise TaskFailed("a map needs a list, and this is none") from None


def join(parts: Sequence[bytes | msgspec.Raw]) -> msgspec.Raw:
    """The encoded list of encoded elements."""
    n = len(parts)
    if n < 16:
        head = bytes((0x90 | n,))
    elif n < 1 << 16:
        head = b"\xdc" + n.to_bytes(2, "big")
    else:
        head = b"\xdd" + n.to_bytes(4, "big")
    return msgspec.Raw(b"".join([head, *parts]))
