"""Tensors on their way to the daemon and back: one memfd a message, whose bytes nobody copies through the socket.

Owns the gathering of a workflow's large arrays, `SharedArray`, and the mapping of what a result brought. Used by both faces of the client.
NumPy and what maps memory are imported only where there is an array.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from hexrt import values
from hexrt.errors import BadRequest, Disconnected, OutOfMemory
from hexrt.protocol.messages import MOST_TENSORS, Tensor

ALIGN_BYTES = 64  # of what is put behind a SharedArray
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SharedArray:
    """An array in memory that is passed to the daemon as it is, without a copy. Stands for an input, as a NumPy array does.

        image = shared_array((1080, 1920, 3), "uint8")
        image[:] = camera.read()                    # or fill `image.array` in place
        client.run(build(image))

    Sending it for the first time ends its writing for good: from then on it is read-only here too, may be sent again, and stays readable. So no
    writable view of it may be alive then (a variable that holds `image.array`, a slice of it, a torch tensor over it): BadRequest says so.
    """

    __slots__ = ("_fd", "_pages", "_reader", "dtype", "nbytes", "sealed", "shape")

    def __init__(self, shape: int | Sequence[int], dtype: Any = "float32") -> None:
        """Zeros. Raises BadRequest for what cannot be sent, OutOfMemory."""
        import numpy as np

        self._fd = -1
        self._pages: mmap.mmap | None = None  # for writing, while some of it was asked for
        self._reader: mmap.mmap | None = None
        self.sealed = False
        try:
            likeness = np.broadcast_to(np.zeros((), dtype), shape)
        except (TypeError, ValueError) as error:
            raise BadRequest(f"there is no such array: {error}") from None
        if likeness.dtype.kind not in "biufc" or not likeness.dtype.isnative:
            raise BadRequest(f"a tensor of dtype {likeness.dtype.str} cannot be sent as it is")
        if not likeness.size or not likeness.ndim:
            raise BadRequest("an array without elements or dimensions needs no shared memory")
        self.dtype, self.shape, self.nbytes = likeness.dtype, likeness.shape, likeness.size * likeness.itemsize
        try:
            self._fd = os.memfd_create("hexrt-array", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._fd, self.nbytes)
        except (OSError, OverflowError) as error:
            raise OutOfMemory(f"{self.nbytes} bytes of shared memory are not to be had: {error}") from error

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def array(self) -> Any:
        """All of it as a NumPy array: to be written until it was sent, read-only afterwards."""
        import numpy as np

        if self.sealed:
            return self.__array__()
        if self._pages is None:
            self._pages = mmap.mmap(self._fd, self.nbytes)
        return np.frombuffer(self._pages, self.dtype, self.nbytes // self.dtype.itemsize).reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """A read-only view, which does not stand in the way of sending."""
        import numpy as np

        if self._reader is None:  # private, or it would count as one that could be written
            self._reader = mmap.mmap(self._fd, self.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ)
        found = np.frombuffer(self._reader, self.dtype, self.nbytes // self.dtype.itemsize).reshape(self.shape)
        if copy or (dtype is not None and np.dtype(dtype) != self.dtype):
            return found.astype(dtype or self.dtype)
        return found

    def __getitem__(self, key: Any) -> Any:
        """A view that cannot be written, or an element."""
        return self.__array__()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.sealed:
            raise ValueError("this SharedArray was sent, and so cannot be written any more: make a new one")
        self.array[key] = value

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__array__())

    def __len__(self) -> int:
        return int(self.shape[0])

    def __repr__(self) -> str:
        return f"SharedArray({list(self.shape)}, {self.dtype.name!r}{', sent' if self.sealed else ''})"

    def append(self, contents: Sequence[memoryview]) -> tuple[int, ...]:
        """Puts other bytes behind it before it is sealed, and says where. Raises OutOfMemory."""
        offsets = []
        try:
            end = os.fstat(self._fd).st_size
            for content in contents:
                end += -end % ALIGN_BYTES
                offsets.append(end)
                while content:
                    done = os.pwrite(self._fd, content, end)
                    content, end = content[done:], end + done
        except OSError as error:
            raise OutOfMemory(f"no more shared memory is to be had: {error.strerror}") from error
        return tuple(offsets)

    def let_go(self) -> None:
        """Gives up this object's own writable mapping. Raises BadRequest where somebody else holds a view of it."""
        if self._pages is not None:
            try:
                self._pages.close()
            except BufferError:
                raise BadRequest(
                    "a SharedArray cannot be sent while a view of it can be written: let go of every variable that holds its `.array`, or a "
                    "slice of it or a tensor over it (`del`), or write by `shared[...] = ...`"
                ) from None
            self._pages = None

    def seal(self) -> int:
        """A new descriptor of the memory, whose bytes cannot change from now on. Raises BadRequest where it is still being written."""
        if not self.sealed:
            self.let_go()
            try:
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                raise BadRequest("a SharedArray cannot be sent while another process can write to it") from None
            self.sealed = True
        return os.dup(self._fd)


def shared_array(shape: int | Sequence[int], dtype: Any = "float32") -> SharedArray:
    """An array to be filled in place and passed without a copy; see SharedArray."""
    return SharedArray(shape, dtype)


class Gathered:
    """The large arrays of one request, each once, and in the end the memfd that holds them. Used again after `clear` or `pack`."""

    __slots__ = ("_arrays", "_handles")

    def __init__(self) -> None:
        self._arrays: list[Any] = []
        self._handles: dict[int, int] = {}  # by identity of what is in `_arrays`

    def hook(self, value: Any) -> Any:
        """For an encoder: what it finds beside plain values."""
        if isinstance(value, SharedArray) and value.nbytes > values.INLINE_BYTES:
            handle = self._keep(value)
            if handle is not None:
                return values.descriptor(handle, value.dtype.name, value.shape)
        if values.is_array(value):
            return values.tensor(value, self._keep)
        raise TypeError(f"a value of type {type(value).__name__} cannot be sent")

    def _keep(self, array: Any) -> int | None:
        handle = self._handles.get(id(array))
        if handle is None and len(self._arrays) < MOST_TENSORS:
            self._arrays.append(array)
            handle = self._handles[id(array)] = len(self._arrays)
        return handle

    def clear(self) -> None:
        self._arrays.clear()
        self._handles.clear()

    def __bool__(self) -> bool:
        return bool(self._arrays)

    def pack(self) -> tuple[tuple[Tensor, ...], int]:
        """Where each lies, and the sealed memfd, the caller's to close. Raises BadRequest, OutOfMemory.

        A SharedArray stays where it is and the others go behind it; of several, the largest, and of sent ones only one that is alone.
        """
        arrays = list(self._arrays)
        self.clear()
        shared = [a for a in arrays if isinstance(a, SharedArray)]
        for each in shared:
            each.let_go()
        host = max((a for a in shared if not a.sealed or len(arrays) == 1), key=lambda a: a.nbytes, default=None)
        others = [a for a in arrays if a is not host]
        contents = [values.content_of(a) for a in others]
        if host is None:
            from hexrt.memory.arena import sealed_copy

            fd, offsets = sealed_copy(contents)
        else:
            offsets = host.append(contents)
            fd = host.seal()
        at = {id(a): offset for a, offset in zip(others, offsets, strict=True)}
        return tuple(Tensor(i + 1, at.get(id(a), 0), a.nbytes) for i, a in enumerate(arrays)), fd


class Received:
    """The memory that came with a result. What was decoded from it keeps it mapped, however long."""

    __slots__ = ("_tensors", "_view")

    def __init__(self, fd: int, tensors: Sequence[Tensor]) -> None:
        """Takes over `fd`. Raises Disconnected where it is not what a daemon sends, OutOfMemory."""
        from hexrt.memory.arena import map_fd

        try:
            size = max(tensor.offset + tensor.bytes for tensor in tensors)
            self._view = map_fd(fd, size, False)
        except BadRequest as error:
            raise Disconnected(f"the memory of a result is not as long as its tensors ({error.message})") from None
        finally:
            os.close(fd)
        self._tensors = {tensor.handle: tensor for tensor in tensors}

    def content(self, handle: int) -> memoryview:
        tensor = self._tensors.get(handle)
        if tensor is None:
            raise msgspec.DecodeError(f"the result came without its tensor {handle}")
        return self._view[tensor.offset : tensor.offset + tensor.bytes]
