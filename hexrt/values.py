"""Values that cross a step: msgpack, with tensors as an extension type.

None, bool, int, float, str, bytes, lists, dicts with string keys, and NumPy arrays of plain dtypes. NumPy is imported only where an
array is met, so that the daemon, which never opens a tensor, stays without it. No pickle, no objects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from hexrt.core import TensorMeta
from hexrt.errors import TaskFailed

TENSOR = 1
"""msgpack extension code; the payload is msgpack `[dtype name, shape, bytes in C order, little-endian]`."""

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


def tensor(value: Any) -> Any:
    """The extension that carries an array, or the plain number of one without dimensions. Raises TypeError for a dtype that cannot be sent."""
    import numpy as np

    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise TypeError(f"a tensor of dtype {array.dtype} cannot be sent")
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    if array.ndim == 0:
        return array.item()
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return msgspec.msgpack.Ext(TENSOR, _encoder.encode((array.dtype.name, array.shape, content)))


def tensor_meta(ext: msgspec.msgpack.Ext) -> TensorMeta:
    """dtype and shape of an encoded tensor, without NumPy. Raises ValueError or msgspec.DecodeError where it is damaged."""
    dtype, shape, content = _tensor.decode(ext.data)
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"dtype {dtype[:40]!r} is not allowed in a tensor")
    if len(shape) > _MOST_DIMENSIONS or any(n < 0 for n in shape):
        raise ValueError("the shape of this tensor is not possible")
    need = math.prod(shape) * _ITEM_BYTES[dtype]
    if need != len(content):
        raise ValueError(f"a tensor {dtype}{list(shape)} has {need} bytes, and this one has {len(content)}")
    return TensorMeta(dtype, shape)


def _encode_hook(value: Any) -> Any:
    if is_array(value):
        return tensor(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent")


def _decode_hook(code: int, data: memoryview) -> Any:
    if code != TENSOR:
        raise ValueError(f"unknown extension type {code}")
    import numpy as np

    dtype, shape, content = _tensor.decode(data)
    kind = np.dtype(dtype)
    if kind.kind not in "biufc":
        raise ValueError(f"dtype {dtype} is not allowed in a tensor")
    return np.frombuffer(content, kind).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
_decoder = msgspec.msgpack.Decoder(ext_hook=_decode_hook)
_tensor = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], memoryview])


def encode(value: Any) -> bytes:
    """Raises TaskFailed, naming the type, where the value cannot be sent."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise TaskFailed(f"the value cannot be sent: {error}") from error


def decode(raw: bytes | msgspec.Raw) -> Any:
    """Tensors come back as read-only NumPy views of `raw`. Raises msgspec.DecodeError or ValueError."""
    return _decoder.decode(raw)


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
