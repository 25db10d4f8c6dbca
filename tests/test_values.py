"""Values with tensors beside them: descriptors in, descriptors out, and the same value with the bytes inside."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexrt.core import TensorMeta
from hexrt.errors import TaskFailed
from hexrt.values import (
    DESCRIPTOR,
    INLINE_BYTES,
    MARK,
    NAMING,
    bytes_of,
    decode,
    descriptor,
    encode,
    handle_of,
    handles,
    inline,
    pick,
    tensor_meta,
)


class Shelf:
    """Keeps tensors by handle."""

    def __init__(self, room: int = 1000) -> None:
        self.kept: dict[int, bytes] = {}
        self.room = room

    def place(self, array: Any) -> int | None:
        if len(self.kept) == self.room:
            return None
        handle = 1 << 40 | len(self.kept)
        self.kept[handle] = array.tobytes()
        return handle

    def find(self, handle: int) -> memoryview:
        return memoryview(self.kept[handle])


def test_a_large_array_becomes_a_descriptor_and_comes_back_as_a_read_only_view_of_its_bytes() -> None:
    shelf, array = Shelf(), np.arange(2000, dtype=np.float32).reshape(40, 50)
    raw = encode({"a": [array, "text"], "b": array[:2, :2]}, shelf.place)
    assert len(raw) < 200 and len(shelf.kept) == 1
    back = decode(raw, shelf.find)
    np.testing.assert_array_equal(back["a"][0], array)
    assert not back["a"][0].flags.writeable
    assert np.shares_memory(back["a"][0], np.frombuffer(shelf.kept[1 << 40], np.float32))


@pytest.mark.parametrize("elements", [INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1])
def test_only_arrays_of_more_than_the_inline_bytes_are_placed(elements: int) -> None:
    shelf = Shelf()
    encode(np.zeros(elements, np.uint8), shelf.place)
    assert len(shelf.kept) == (elements > INLINE_BYTES)


def test_an_array_for_which_there_is_no_room_is_sent_inline() -> None:
    shelf, array = Shelf(room=1), np.ones(5000, np.uint8)
    raw = encode([array, array + 1], shelf.place)
    assert len(handles(raw)) == 1 and len(raw) > 5000
    np.testing.assert_array_equal(decode(raw, shelf.find)[1], array + 1)


def test_a_transposed_and_a_big_endian_array_arrive_as_they_were() -> None:
    shelf = Shelf()
    flat, big = np.arange(6000).reshape(60, 100).T, np.arange(3000, dtype=">i4")
    back = decode(encode([flat, big], shelf.place), shelf.find)
    np.testing.assert_array_equal(back[0], flat)
    np.testing.assert_array_equal(back[1], big)


def test_the_same_value_inline_is_what_it_would_have_been_without_a_place() -> None:
    shelf = Shelf()
    value = {"x": np.arange(5000, dtype=np.int16), "y": [1.5, None, b"raw", np.ones(3)], "z": "text"}
    raw = encode(value, shelf.place)
    assert bytes(inline(raw, shelf.find)) == encode(value)
    assert bytes(inline(msgspec.Raw(encode(value)), shelf.find)) == encode(value)


def test_each_handle_is_told_once_and_of_a_part_only_its_own() -> None:
    first, second = (descriptor(n, "uint8", (5000,)) for n in (7, 1 << 50))
    raw = encode({"a": [first, second, first], "b": second})
    assert handles(raw) == (7, 1 << 50)
    assert handles(pick(raw, ("b",))) == (1 << 50,)
    assert handles(encode({"text": "\x02", "list": [1, 2, 3], "bytes": MARK})) == ()


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 1000), max_size=6))
@settings(deadline=None)
def test_every_descriptor_holds_the_mark_that_handles_looks_for(handle: int, shape: list[int]) -> None:
    raw = encode(descriptor(handle, "float32", shape))
    assert MARK in raw and len(raw) > NAMING and handles(raw) == (handle,)


def test_a_descriptor_says_its_dtype_shape_and_bytes() -> None:
    ext = descriptor(9, "float16", (3, 4))
    assert ext.code == DESCRIPTOR and handle_of(ext) == 9
    assert tensor_meta(ext) == TensorMeta("float16", (3, 4)) and bytes_of(tensor_meta(ext)) == 24


def test_a_descriptor_cannot_be_read_without_the_memory_that_it_names() -> None:
    raw = encode([descriptor(9, "uint8", (5000,))])
    with pytest.raises(ValueError, match="extension type 2"):
        decode(raw)


@pytest.mark.parametrize("content", [b"", b"x" * 4999, b"x" * 5001])
def test_a_descriptor_whose_memory_has_another_length_is_refused(content: bytes) -> None:
    raw = encode([descriptor(9, "uint8", (5000,))])
    for read in (decode, inline):
        with pytest.raises(ValueError):
            read(raw, lambda handle: memoryview(content))


@pytest.mark.parametrize("dtype, shape", [("object", (5000,)), ("uint8", (-1,)), ("U4", (1,)), ("uint8", (1,) * 33)])
def test_a_descriptor_of_an_impossible_tensor_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        tensor_meta(descriptor(1, dtype, shape))
    with pytest.raises(ValueError):
        decode(encode(descriptor(1, dtype, shape)), lambda handle: memoryview(b"x" * 5000))


def test_what_cannot_be_placed_says_so_by_name() -> None:
    with pytest.raises(TaskFailed, match="object"):
        encode(object(), Shelf().place)


@pytest.mark.parametrize("shift", range(8))
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int16", "uint8"])
def test_an_inline_tensor_is_aligned_and_has_the_sums_that_it_had(shift: int, dtype: str) -> None:
    array = (np.random.default_rng(shift).standard_normal((90, 100)) * 100).astype(dtype)
    back = decode(encode({"x": "." * shift, "a": array}))["a"]
    assert back.flags.aligned and back.flags.c_contiguous and not back.flags.writeable
    assert back.dtype == array.dtype and back.sum() == array.sum()
    np.testing.assert_array_equal(back, array)


def test_a_torch_tensor_goes_and_comes_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    seen: list[Any] = []

    def place(array: Any) -> int:
        seen.append(array)
        return 5

    given = torch.arange(3000, dtype=torch.float32)
    raw = encode(given.numpy(), place)
    assert seen[0].ctypes.data == given.data_ptr()
    content = given.numpy().tobytes()
    back = torch.from_dlpack(decode(raw, lambda handle: memoryview(content)))
    assert torch.equal(back, given)
    assert back.data_ptr() == np.frombuffer(content, np.float32).ctypes.data
